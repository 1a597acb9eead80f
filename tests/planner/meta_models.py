"""Parameter counts of transformers' own models, built on the meta device: no weights, no memory.

`python -m tests.planner.meta_models` compares the whole catalogue (minutes); the tests take a part of it.
"""

from __future__ import annotations

import copy
import sys
import time

from backend.planner import catalogue

# Published under a model_type that its own class does not have: the class that its makers name.
BUILT_AS = {"kimi_k2": "deepseek_v3"}


def numel(config: dict) -> int | None:
    """Distinct parameters; None when the installed transformers does not know this model_type."""
    import torch
    import transformers

    config = copy.deepcopy(config)
    kind = config.pop("model_type")
    config.pop("quantization_config", None)
    config.pop("torch_dtype", None)
    if "hybrid_override_pattern" in config:
        letters = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}
        config["layers_block_type"] = [letters[letter] for letter in config.pop("hybrid_override_pattern")]
    tokens = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    try:
        made = transformers.AutoConfig.for_model(BUILT_AS.get(kind, kind), **config, **tokens)
    except ValueError:
        return None
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())


def sweep(keys: list[str]) -> int:
    wrong = 0
    for key in keys:
        model, start = catalogue.models()[key], time.perf_counter()
        built, counted = numel(model.config), model.architecture.parameters
        verdict = "not built here" if built is None else "equal" if built == counted else f"OFF BY {counted - built:+,}"
        wrong += built is not None and built != counted
        print(f"{key:28} {counted:>20,} {verdict} ({time.perf_counter() - start:.1f} s)", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(1 if sweep(sys.argv[1:] or list(catalogue.models())) else 0)
