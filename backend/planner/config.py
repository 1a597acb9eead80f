"""From a Hugging Face `config.json` to a list of layers. One parser a `model_type`; what has none is refused.

Defaults are those of the transformers configuration classes (a key left out of the file takes them).
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable

from backend.planner import classic, families, hybrids, latent, mixtures
from backend.planner.arch import Architecture
from backend.planner.reader import Reader
from backend.planner.shape import UnsupportedArchitecture

PARSERS: dict[str, Callable[[Reader], Architecture]] = {
    **dict.fromkeys(families.FAMILIES, families.read),
    **classic.PARSERS,
    **latent.PARSERS,
    **mixtures.PARSERS,
    **hybrids.PARSERS,
}


def parse(config: object) -> Architecture:
    """The layers of a language model; of a multimodal one, those of its `text_config`.

    Raises UnsupportedArchitecture with every reason found and the nearest known kinds.
    """
    if not isinstance(config, dict):
        raise UnsupportedArchitecture("unknown", [f"a config.json holds one object, not a {type(config).__name__}"])
    outer, notes = config, ()
    if isinstance(config.get("text_config"), dict) and Reader(config).model_type not in PARSERS:
        config = config["text_config"]
        if "tie_word_embeddings" in outer and "tie_word_embeddings" not in config:
            config = config | {"tie_word_embeddings": outer["tie_word_embeddings"]}
        notes = ("a multimodal model: its text part is counted, vision and audio towers take memory of their own",)
    reader = Reader(config)
    known = PARSERS.get(reader.model_type)
    if known is None:
        closest = difflib.get_close_matches(reader.model_type, PARSERS, n=3, cutoff=0.3)
        near = f"nearest known: {', '.join(closest)}" if closest else f"known: {', '.join(sorted(PARSERS))}"
        reason = f"unknown model_type; {near}"
        raise UnsupportedArchitecture(reader.model_type, [reason], closest)
    if reader.config.get("num_nextn_predict_layers"):
        notes += ("layers that predict further tokens (MTP) are left out, as engines leave them unless asked",)
    try:
        found = known(reader)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(error.model_type, error.reasons, [reader.model_type]) from None
    return dataclasses.replace(found, notes=found.notes + notes) if notes else found
