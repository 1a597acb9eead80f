"""A name becomes a model that may serve: found, gated, loaded, looked at."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError

from backend.events import ModelInfo
from backend.models import catalogue, chat, find, randomised
from backend.models import dtype as dtypes
from backend.models.cache import Say, say_to_stderr
from backend.models.errors import ModelError, first_line
from backend.models.gate import gate, text_part
from backend.models.hush import without_bars
from backend.models.limits import max_model_len, stop_ids
from backend.models.plain import PlainTokenizer
from backend.models.probe import LayerShape, probe

__all__ = ["LoadedModel", "ModelError", "load"]


@dataclass
class LoadedModel:
    """A transformers causal language model in eval mode with eager attention, and what the engine must know of it."""

    name: str
    folder: Path
    model: Any
    tokenizer: Any  # transformers tokenizer; PlainTokenizer for random weights without one
    config: Any
    device: torch.device
    dtype: torch.dtype
    weights: str  # real | random
    stop_ids: frozenset[int]
    max_model_len: int
    attention: list[LayerShape]  # one a layer, as its attention is really called
    notes: list[str] = field(default_factory=list)  # the first one says why this dtype
    dtype_asked: bool = True  # by name; else it was chosen here, and may be chosen better once the kernels are known
    computes_in: torch.dtype | None = None  # where it is not the dtype that weights, K and V are stored in
    roofs: None = None  # are measured; only a device that is not here has them from a data sheet

    @property
    def chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of `messages`. Raises ModelError without a chat template, or when the template refuses them."""
        return chat.encode_chat(self.tokenizer, messages, self.name)

    @property
    def kv_bytes_per_token(self) -> int:
        return sum(s.kv_heads * (s.key_dim + s.value_dim) for s in self.attention) * self.dtype.itemsize

    def info(self) -> ModelInfo:
        """The model for the screen. Counts are of the live tensors; a tensor shared by two modules counts once."""
        parameters = list(self.model.parameters())
        head = self.model.get_output_embeddings()
        # An embedding is a gather of a few rows, unless it is also the head, which is multiplied whole.
        gathered = {
            id(module.weight)
            for module in self.model.modules()
            if isinstance(module, torch.nn.Embedding) and (head is None or module.weight is not head.weight)
        }
        first = self.attention[0]
        return ModelInfo(
            name=self.name,
            family=self.config.model_type,
            weights=self.weights,
            dtype=str(self.dtype).removeprefix("torch."),
            layers=len(self.attention),
            hidden=self.config.hidden_size,
            heads=first.heads,
            kv_heads=first.kv_heads,
            head_dim=first.key_dim,
            vocab=self.config.vocab_size,
            parameters=sum(p.numel() for p in parameters),
            weight_bytes=sum(p.nbytes for p in parameters),
            step_weight_bytes=sum(p.nbytes for p in parameters if id(p) not in gathered),
            kv_bytes_per_token=self.kv_bytes_per_token,
            max_model_len=self.max_model_len,
            chat_template=self.chat_template,
            notes=list(self.notes),
        )


def load(
    name: str,
    *,
    weights: str = "real",
    dtype: str | None = None,
    device: str | None = None,
    say: Say = say_to_stderr,
) -> LoadedModel:
    """Find `name`, refuse what the engine cannot compute exactly, and load the rest. Raises ModelError.

    weights: "real", or "random" for any config.json (a file, folder, catalogue name or Hugging Face id).
    dtype: float32 | bfloat16 | float16, or None for the best of this device. device: cpu | cuda[:n], None for the best.
    """
    if weights not in ("real", "random"):
        raise ModelError(f"unknown weights '{weights}'; known: real, random")
    place = _device(device)
    number, why = dtypes.choose(place, dtype)
    real = weights == "real"
    folder = find.path(name, say) if real else find.config_folder(name, say)
    config = _config(folder, name)
    notes = [why]
    if not real:
        config, note = _shape_only(config)
        notes += note
    gate(config)
    say(f"Loading {name} ({weights} weights, {str(number).removeprefix('torch.')}, {place}) …")
    with without_bars():
        model = _real(folder, config, number, place, name) if real else _random(config, number, place, name)
    model.eval().requires_grad_(False)
    _check_tied(model, config, name)
    tokenizer = _tokenizer(folder, name, real, config.vocab_size)
    if isinstance(tokenizer, PlainTokenizer):
        notes.append("no tokenizer: text is bytes and made-up words, good for looking at speed only")
    if not real:
        notes.append("random weights: the speed and the memory are real, the text means nothing")
    if made_of := find.origin(folder):
        notes.append(made_of)
    if any((getattr(config, key, 0) or 0) > 1 for key in ("num_experts", "num_local_experts", "n_routed_experts")):
        notes.append("mixture of experts: the weights read in a step are counted as all experts, an upper bound")
    length, note = max_model_len(config)
    if note:
        notes.append(note)
    return LoadedModel(
        name=_title(name),
        folder=folder,
        model=model,
        tokenizer=tokenizer,
        config=model.config,
        device=place,
        dtype=number,
        weights=weights,
        stop_ids=stop_ids(config.vocab_size, model.generation_config, config, tokenizer),
        max_model_len=length,
        attention=_probe(model, name, length),
        notes=notes,
        dtype_asked=dtype not in (None, "auto"),
    )


def _title(name: str) -> str:
    """How a model is called on screen and in the API: a path by its last part that says something."""
    local = Path(name).expanduser()
    if not local.exists():
        return name
    local = local.resolve()
    if local.is_dir():
        return local.name
    return local.parent.name if local.name == "config.json" else local.stem


def _device(asked: str | None) -> torch.device:
    if asked in (None, "auto"):
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(asked)
    except RuntimeError as error:
        raise ModelError(f"unknown device '{asked}'; known: auto, cpu, cuda, cuda:0 …") from error
    if device.type not in ("cpu", "cuda"):
        raise ModelError(f"device '{asked}' is not supported; known: auto, cpu, cuda, cuda:0 …")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise ModelError(f"device '{asked}' was asked for, but torch {torch.__version__} sees {count} NVIDIA GPUs")
    return device


def _config(folder: Path, name: str) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except StrictDataclassError as error:  # a setting that cannot be; the cause says which
        raise ModelError(f"config.json of {name} is wrong: {first_line(error.__cause__ or error)}") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        if "trust_remote_code" in str(error) or "does not recognize this architecture" in str(error):
            raise ModelError(
                f"{name} needs model code that transformers {_transformers_version()} does not have. "
                "Code from a model's repository is never run; a newer transformers may know it."
            ) from error
        raise ModelError(f"config.json of {name} cannot be read: {first_line(error)}") from error


def _transformers_version() -> str:
    import transformers

    return transformers.__version__


def _shape_only(config: Any) -> tuple[Any, list[str]]:
    """For random weights: the text part of a multimodal model, and plain numbers where the weights are quantized."""
    notes = []
    text = text_part(config)
    if text is not config:
        notes.append(f"only the text part of {config.model_type} is built")
    if getattr(text, "quantization_config", None):
        del text.quantization_config
        notes.append("the checkpoint is quantized; here every weight has the dtype above")
    return text, notes


def _real(folder: Path, config: Any, dtype: torch.dtype, device: torch.device, name: str) -> Any:
    from transformers import AutoModelForCausalLM

    _check_room(_stored_parameters(folder, config), dtype, device, name)
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation="eager",
            use_safetensors=True,  # never a pickle
            local_files_only=True,
            output_loading_info=True,
            device_map=None if device.type == "cpu" else {"": device},
        )
    except (OSError, ValueError, RuntimeError, KeyError, ImportError, SafetensorError) as error:
        raise ModelError(f"{name} cannot be loaded: {first_line(error)}") from error
    # What the checkpoint lacks was filled with noise: the model would run and say nonsense.
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"{name} lacks {len(missing)} weights that its configuration calls for, first {missing[0]}. "
            "The checkpoint is incomplete, or config.json is of another model."
        )
    return model


def _random(config: Any, dtype: torch.dtype, device: torch.device, name: str) -> Any:
    try:
        _check_room(randomised.count_parameters(config), dtype, device, name)
        return randomised.build(config, dtype, device)
    except (ValueError, RuntimeError, TypeError, AttributeError, KeyError) as error:
        raise ModelError(f"no model can be built from the configuration of {name}: {first_line(error)}") from error


def _stored_parameters(folder: Path, config: Any) -> int:
    """Parameters on disk, from the headers of the safetensors files."""
    from safetensors import safe_open

    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    count = 0
    try:
        for file in names:
            with safe_open(folder / file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118 - not a dict
                    size = 1
                    for extent in tensors.get_slice(key).get_shape():
                        size *= extent
                    count += size
    except (OSError, SafetensorError) as error:
        raise ModelError(f"the weights in {folder} are damaged: {first_line(error)}") from error
    return count


def _check_room(parameters: int, dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Refuse what cannot fit, instead of being killed by the system half-way."""
    need = parameters * dtype.itemsize
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if need > free:
        raise ModelError(
            f"{name} needs {need / 2**30:.1f} GiB for its weights in {str(dtype).removeprefix('torch.')}, and "
            f"{device} has {free / 2**30:.1f} GiB free. Choose a smaller model, or --dtype bfloat16 if it was float32."
        )


def _check_tied(model: Any, config: Any, name: str) -> None:
    """A tied head must be the embedding itself; a copy or noise would speak garbage."""
    if not getattr(config, "tie_word_embeddings", False):
        return
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is not None and head.weight.data_ptr() != embedding.weight.data_ptr():
        raise ModelError(f"{name} says that its head is its embedding (tie_word_embeddings), but it was loaded apart")


def any_tokenizer(say: Say = say_to_stderr) -> Any:
    """The bundled model's, for engines that only need text cut into pieces; without it, bytes and made-up words."""
    try:
        return _tokenizer(find.path(catalogue.DEFAULT, say), catalogue.DEFAULT, True, 1 << 20)
    except ModelError:
        return PlainTokenizer(32_000)


def _tokenizer(folder: Path, name: str, real: bool, vocab: int) -> Any:
    from transformers import AutoTokenizer

    if not any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        if real:
            raise ModelError(f"{name} has no tokenizer files (tokenizer.json), so its tokens cannot be read or written")
        return PlainTokenizer(vocab)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        raise ModelError(f"the tokenizer of {name} cannot be read: {first_line(error)}") from error
    if len(tokenizer) > vocab and max(tokenizer.get_vocab().values()) >= vocab and real:
        raise ModelError(
            f"the tokenizer of {name} knows {len(tokenizer)} tokens, its embedding only {vocab}: "
            "they are not of the same model"
        )
    return tokenizer


def _probe(model: Any, name: str, length: int) -> list[LayerShape]:
    try:
        return probe(model, name, length)
    except (RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        raise ModelError(f"{name} does not run: {first_line(error)}") from error
