"""Reading a `config.json` key by key: what is read is understood, what looks like attention and is not read refuses.

Limits keep a broken or hostile file from costing time: no real model comes near them.
"""

from __future__ import annotations

import re

from backend.planner.shape import UnsupportedArchitecture

# A key that smells of attention or of the cache and that no parser reads may change what is stored: refuse.
_SUSPICIOUS = re.compile(
    r"kv|key_value|window|mla|ssm|mamba|linear|index|compress|lora|latent|conv|chunk|sparse|expert|block_config"
)
# Keys that move nothing, or only say how a layer is computed.
_HARMLESS = {
    "clip_qkv", "chunk_size_feed_forward", "use_mamba_kernels", "mamba_ssm_dtype", "mamba_chunk_size", "chunk_size",
    "mamba_hidden_act", "use_conv_bias", "rescale_prenorm_residual", "expert_bias_rate",
}  # fmt: skip
MAX_LAYERS = 1_000
MAX_COUNT = 2**31
_SHOWN = 60


class Reader:
    """One configuration being read. Problems gather in `reasons`; `finish` raises them all at once."""

    def __init__(self, config: dict):
        self.config = config
        found = config.get("model_type")
        self.model_type = found[:_SHOWN] if isinstance(found, str) and found else "unknown"
        self.reasons: list[str] = []
        self._read = set(_HARMLESS)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str, default=None):
        """As it stands, with `default` for a key that is missing or null."""
        self._read.add(key)
        value = self.config.get(key)
        return default if value is None else value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            self.reasons.append(f"{key} must be true or false, found {_short(value)}")
            return default
        return value

    def count(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`; 1 (and a reason) where there is none, so that reading can go on."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_COUNT:
            wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
            self.reasons.append(f"{key} must be {wanted}, found {_short(value)}")
            return max(1, least)
        return value

    def layers(self, key: str = "num_hidden_layers") -> int:
        value = self.count(key)
        if value > MAX_LAYERS:
            self.reasons.append(f"{key} is {value:,}; more than {MAX_LAYERS:,} layers are not believed")
            return 1
        return value

    def types(self, layers: int, known: set[str]) -> list[str] | None:
        """`layer_types`, one of `known` a layer; None when the file does not list them."""
        found = self.get("layer_types")
        if found is None:
            return None
        if not isinstance(found, list) or not all(isinstance(kind, str) for kind in found):
            self.reasons.append(f"layer_types must be a list of names, found {_short(found)}")
            return None
        unknown = sorted(set(found) - known)
        if unknown:
            self.reasons.append(f"layer types {_short(', '.join(unknown))} are not known here")
        if len(found) != layers:
            self.reasons.append(f"layer_types lists {len(found)} layers, num_hidden_layers says {layers}")
        return None if unknown or len(found) != layers else found

    def heads(self, *, kv_default: int | None = None, head_dim_default: int | None = None) -> tuple[int, int, int, int]:
        """(hidden size, query heads, KV heads, head size), each checked against the others."""
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if "num_key_value_heads" in self.config and self.config["num_key_value_heads"] is None:
            self.reasons.append("num_key_value_heads is null: the file says that it is set elsewhere, not where")
        kv_heads = self.count("num_key_value_heads", heads if kv_default is None else kv_default)
        if self.has("head_dim") or head_dim_default is not None:
            head_dim = self.count("head_dim", head_dim_default)
        else:
            head_dim = hidden // heads or 1
            if hidden % heads:
                self.reasons.append(
                    f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}), and no head_dim"
                )
        if heads % kv_heads:
            self.reasons.append(f"num_attention_heads ({heads}) is no multiple of num_key_value_heads ({kv_heads})")
        return hidden, heads, kv_heads, head_dim

    def context(self) -> int | None:
        value = self.get("max_position_embeddings")
        return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_COUNT else None

    def check(self) -> None:
        """Raises UnsupportedArchitecture with every reason found so far."""
        if self.reasons:
            raise UnsupportedArchitecture(self.model_type, self.reasons)

    def finish(self) -> None:
        """`check`, after a look at what nobody read."""
        strange = [
            key
            for key, value in self.config.items()
            if isinstance(key, str) and key not in self._read and _SUSPICIOUS.search(key) and value
        ]
        for key in sorted(strange)[:10]:
            self.reasons.append(f"'{key[:_SHOWN]}' may change what attention reads or stores, and is not known here")
        if self.config.get("use_bidirectional_attention"):
            self.reasons.append("attention is bidirectional")
        self.check()


def _short(value: object) -> str:
    """What stands there, cut to a length that fits a message."""
    if isinstance(value, list | dict):
        return type(value).__name__
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**18:
        return "a number too large to believe"
    text = repr(value[:_SHOWN] if isinstance(value, str) else value)
    return text if len(text) <= _SHOWN + 2 else text[:_SHOWN] + "…"
