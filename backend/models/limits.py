"""Where generation ends: the ids that stop it, and the longest sequence that the positions allow."""

from __future__ import annotations

from typing import Any

DEFAULT_MODEL_LEN = 2048  # for the few architectures without position limit


def stop_ids(vocab: int, *sources: Any) -> frozenset[int]:
    """Every end-of-sequence id named by `sources` (generation config, config, tokenizer): an int, a list, or none."""
    ids: set[int] = set()
    for source in sources:
        named = getattr(source, "eos_token_id", None)
        if isinstance(named, int) and not isinstance(named, bool):
            ids.add(named)
        elif isinstance(named, (list, tuple)):
            ids.update(i for i in named if isinstance(i, int))
    return frozenset(i for i in ids if 0 <= i < vocab)


def max_model_len(config: Any) -> tuple[int, str]:
    """(tokens, note). RoPE that changes with the length ("longrope", "dynamic") is held to the original length.

    Such RoPE picks its frequencies from the longest sequence of the whole batch, so one long request would change
    what the others compute.
    """
    length = next(
        (
            value
            for name in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length")
            if isinstance(value := getattr(config, name, None), int) and value > 0
        ),
        None,
    )
    if length is None:
        return DEFAULT_MODEL_LEN, f"the model names no longest sequence; {DEFAULT_MODEL_LEN} tokens assumed"
    for rope in _rope_settings(config):
        kind = rope.get("rope_type") or rope.get("type")
        if kind not in ("longrope", "dynamic"):
            continue
        original = (
            rope.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or length
        )
        if original < length or kind == "dynamic":
            return min(original, length), (
                f"{kind} RoPE changes its frequencies beyond {original} tokens, for all requests of a batch at once; "
                f"sequences are held to {min(original, length)} tokens"
            )
    return length, ""


def _rope_settings(config: Any) -> list[dict]:
    """RoPE settings of a config: one dict, or one a layer type (transformers 5), or the older `rope_scaling`."""
    found = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(found, dict):
        return []
    nested = [value for value in found.values() if isinstance(value, dict)]
    return nested or [found]
