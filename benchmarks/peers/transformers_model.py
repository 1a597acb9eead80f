"""The model as both transformers peers load it."""

import torch
import transformers


def load(order: dict):
    torch.set_num_threads(order["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        order["model"], dtype=getattr(torch, order["dtype"]), attn_implementation="sdpa"
    ).eval()
    return model.to("cuda") if torch.cuda.is_available() else model


def versions() -> dict:
    return {"version": transformers.__version__, "torch": str(torch.__version__), "threads": torch.get_num_threads()}
