"""GGUF to a transformers folder: plain safetensors, tokenizer, chat template. Done once, kept in the cache.

Stored as float32 when the file is small. A 4-bit weight times its float16 scale needs more than the 11 bits of
float16's mantissa, so half precision on disk would change the model: with SmolLM2-135M, greedy float32 output then
differed in 1 of 629 tokens for float16 and 2 of 629 for bfloat16. Reading half the bytes did not pay either: the file
is mapped, and 0.5 GB of float32 loads in 0.5 s. From 1 GiB of GGUF on (several GB dense) disk and memory win: bfloat16,
which is also what such a model runs in.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path

from safetensors import SafetensorError

from backend.models.cache import Say
from backend.models.errors import ModelError, first_line
from backend.models.gate import gate
from backend.models.hush import without_bars

FLOAT32_LIMIT_BYTES = 1 << 30

# llama.cpp's names of pre-tokenizers that split off every digit before the GPT-2 rule; transformers drops that.
SPLITS_DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}

# What transformers' reader trips over in a damaged file, or one of an architecture that it cannot map.
_BROKEN = (ValueError, LookupError, TypeError, struct.error, RuntimeError, ArithmeticError, ImportError)


def convert_gguf(source: Path, folder: Path, say: Say) -> None:
    """Write `source` into the empty `folder`. Raises ModelError for a file that transformers cannot read."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    say(f"Converting {source.name} to safetensors (once; about half a minute for a small model) …")
    try:
        where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
        config = AutoConfig.from_pretrained(**where)
        gate(config)
        tokenizer = AutoTokenizer.from_pretrained(**where, config=config)
        with without_bars():
            model, found = AutoModelForCausalLM.from_pretrained(
                **where,
                config=config,  # reading the file's metadata takes seconds each time
                dtype=torch.float32 if source.stat().st_size < FLOAT32_LIMIT_BYTES else torch.bfloat16,
                quantization_config=GgufConfig(dequantize=True),  # else the weights stay packed and cannot be saved
                output_loading_info=True,
            )
        if missing := sorted(found["missing_keys"]):
            raise ModelError(f"{source.name} lacks {len(missing)} tensors of its architecture, first {missing[0]}")
        _restore_digit_split(tokenizer, source)
        with without_bars():
            model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except SafetensorError as error:
        raise ModelError(f"the unpacked {source.name} cannot be written: {first_line(error)}") from error
    except (*_BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # the disk's trouble, not the file's
            raise
        raise ModelError(f"{source.name} cannot be read as a GGUF model: {first_line(error)}") from error
    say(f"Converted {source.name}.")


def _restore_digit_split(tokenizer, source: Path) -> None:
    """Make runs of spaces before a number tokenize as in the original tokenizer (see SPLITS_DIGITS)."""
    from tokenizers import pre_tokenizers

    rust = tokenizer.backend_tokenizer
    if pre_tokenizer_name(source) in SPLITS_DIGITS and isinstance(rust.pre_tokenizer, pre_tokenizers.ByteLevel):
        rust.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), rust.pre_tokenizer]
        )


def pre_tokenizer_name(source: Path) -> str:
    """The metadata string `tokenizer.ggml.pre`, or "". Searched for: gguf's reader takes seconds for a vocabulary."""
    key = b"tokenizer.ggml.pre"
    pattern = struct.pack("<Q", len(key)) + key + struct.pack("<I", 8)  # length, key, value type 8: a string
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        at = data.find(pattern)
        if at < 0:
            return ""
        at += len(pattern)
        (length,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + length].decode(errors="replace")
