"""How weights and the KV cache are stored: bits an element, with the scales that every real format carries."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from backend.planner.arch import Architecture, Attention, Latent
from backend.planner.errors import PlannerError, UnsupportedDtype

MATRICES = ("attention", "mlp", "experts", "shared")
# Kept as published by most quantised checkpoints: their error weighs most and they are small.
OTHERS = ("router", "vectors", "positions", "head", "embedding")
PARTS = (*MATRICES, *OTHERS)
LATENT_SCALE_GROUP, LATENT_SCALE_BYTES = 128, 4  # fp8_ds_mla: a float32 scale for every 128 elements of the latent
INDEX_SCALE_BYTES = 4  # of an indexer's key, stored in fp8


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightFormat:
    """Bits an element for each part of a model (`PARTS`), and the formats of arithmetic that suit it, best first."""

    name: str
    bits: tuple[float, ...]  # in the order of PARTS
    math: tuple[str, ...]
    words: str = ""
    only_experts: bool = False  # of a mixture only the experts' matrices are quantised

    def of(self, part: str) -> float:
        return self.bits[PARTS.index(part)]

    def for_model(self, arch: Architecture) -> WeightFormat:
        """Formats that quantise experts only leave everything else of a mixture as published (16 bit)."""
        if not (self.only_experts and arch.mixtures):
            return self
        bits = tuple(self.of(part) if part == "experts" else 16.0 for part in PARTS)
        return replace(self, bits=bits, only_experts=False)


def _weights(name: str, matrices: float, math: tuple[str, ...], words: str, *, everything: float = 16.0, **more):
    bits = tuple(float(matrices if part in MATRICES else everything) for part in PARTS)
    return WeightFormat(name=name, bits=bits, math=math, words=words, **more)


_HALF = ("bf16", "fp16", "fp32")  # the last for machines that were measured in nothing else
WEIGHTS: dict[str, WeightFormat] = {
    form.name: form
    for form in (
        _weights("fp32", 32, ("fp32",), "4 bytes a parameter", everything=32),
        _weights("bf16", 16, _HALF, "2 bytes a parameter"),
        _weights("fp16", 16, ("fp16", "bf16", "fp32"), "2 bytes a parameter"),
        _weights("fp8", 8, ("fp8", *_HALF), "1 byte; tables, head and norms stay 16 bit"),
        _weights("fp8-block", 8 + 32 / 128**2, ("fp8", *_HALF), "1 byte and a float32 scale for each 128 × 128 block"),
        _weights("int8", 8 + 16 / 4096, ("int8", *_HALF), "1 byte and a 16-bit scale for each row (of about 4,096)"),
        _weights(
            "mxfp4", 4.25, _HALF, "4 bits and an 8-bit scale for 32; of a mixture only experts", only_experts=True
        ),
        _weights("nvfp4", 4.5, ("fp4", "fp8", *_HALF), "4 bits and an 8-bit scale for each 16"),
        _weights("int4-g128", 4 + 20 / 128, _HALF, "4 bits, a 16-bit scale and a 4-bit zero for each 128 (AWQ, GPTQ)"),
        _weights("int4-g32", 4 + 32 / 32, _HALF, "4 bits, a 16-bit scale and a 16-bit zero for each 32"),
        _weights("q8_0", 8.5, _HALF, "GGUF: 8 bits and a 16-bit scale for each 32, in all matrices", everything=8.5),
        _weights("q4_0", 4.5, _HALF, "GGUF: 4 bits and a 16-bit scale for each 32, in all matrices", everything=4.5),
        _weights("q4_k_m", 4.85, _HALF, "GGUF: about 4.85 bits an element over all matrices", everything=4.85),
    )
}
_WEIGHT_ALIASES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "fp8_block": "fp8-block", "awq": "int4-g128",
    "gptq": "int4-g128", "int4": "int4-g128", "fp4": "nvfp4",
}  # fmt: skip
_INT4 = re.compile(r"int4[ -]g(?:roup)? ?(\d+)(.*)")


def weight_format(name: str) -> WeightFormat:
    """By name; "int4-g64 scales+zeros bf16" is understood too. Raises UnsupportedDtype."""
    text = name.strip().lower()
    if text in WEIGHTS or text in _WEIGHT_ALIASES:
        return WEIGHTS[_WEIGHT_ALIASES.get(text, text)]
    if match := _INT4.fullmatch(text):
        group = int(match[1])
        if group:
            return _weights(
                text, 4 + _per_group_bits(match[2]) / group, _HALF, f"4 bits and its scales for each {group}"
            )
    raise UnsupportedDtype(f"unknown weight format '{name[:60]}'; known: {', '.join(WEIGHTS)}")


def keeping(form: WeightFormat, parts: dict[str, float], words: str) -> WeightFormat:
    """`form` with other bits for some parts: what a checkpoint leaves unquantised."""
    bits = tuple(parts.get(part, form.of(part)) for part in PARTS)
    return replace(form, bits=bits, words=words)


@dataclass(frozen=True, kw_only=True, eq=False)
class KvFormat:
    """Bits an element of keys and values; `latent_split`: DeepSeek's layout, fp8 latent beside a 16-bit rotary part."""

    name: str
    bits: float
    words: str = ""
    latent_split: bool = False

    def layer_bytes(self, mixer: Attention | Latent, elements: int) -> float:
        """Bytes of one token in one layer; `elements` of it are on this GPU."""
        if not (self.latent_split and isinstance(mixer, Latent)):
            return elements * self.bits / 8
        scales = mixer.latent / LATENT_SCALE_GROUP * LATENT_SCALE_BYTES
        index = mixer.index + INDEX_SCALE_BYTES if mixer.index else 0
        return mixer.latent + scales + 2 * mixer.rope + index


KV: dict[str, KvFormat] = {
    form.name: form
    for form in (
        KvFormat(name="fp32", bits=32, words="4 bytes an element"),
        KvFormat(name="bf16", bits=16, words="2 bytes an element"),
        KvFormat(name="fp8", bits=8, words="1 byte an element, one scale for the tensor"),
        KvFormat(name="int8", bits=8, words="1 byte an element, scales of a layer"),
        KvFormat(name="nvfp4", bits=4 + 8 / 16, words="4 bits, an 8-bit scale for each 16"),
        KvFormat(name="int4-g64", bits=4 + 32 / 64, words="4 bits, a 16-bit scale and zero for each 64"),
        KvFormat(name="fp8_ds_mla", bits=8, latent_split=True, words="latent fp8 with scales, rotary part 16 bit"),
    )
}
_KV_ALIASES = {
    "fp16": "bf16", "bfloat16": "bf16", "float16": "bf16", "float32": "fp32", "auto": "bf16", "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8", "int4": "int4-g64",
}  # fmt: skip


def kv_format(name: str) -> KvFormat:
    """By name; "int4 group 32 fp16 scale+zero" is understood too. Raises UnsupportedDtype."""
    text = name.strip().lower()
    if text in KV or text in _KV_ALIASES:
        return KV[_KV_ALIASES.get(text, text)]
    if match := re.fullmatch(r"(?:int|fp)([248])[ -]g(?:roup)? ?(\d+)(.*)", text):
        bits, group = int(match[1]), int(match[2])
        if group:
            return KvFormat(name=text, bits=bits + _per_group_bits(match[3]) / group, words=f"scales for each {group}")
    raise UnsupportedDtype(f"unknown KV cache format '{name[:60]}'; known: {', '.join(KV)}")


def kv_of_bytes(element_bytes: float) -> KvFormat:
    """A format that is known by its bytes an element only."""
    if not 0 < element_bytes <= 16:
        raise PlannerError(f"a KV element of {element_bytes} bytes is none")
    return KvFormat(name=f"{element_bytes:g} B", bits=8 * element_bytes)


def _per_group_bits(words: str) -> int:
    """ "fp16 scale+zero": two 16-bit numbers; "scale" alone: one; nothing said: both."""
    width = 32 if "32" in words else 8 if "fp8" in words or "e8m0" in words else 16
    both = "zero" in words or "scale" not in words
    return width * (2 if both else 1)
