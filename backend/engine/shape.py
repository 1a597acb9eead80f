"""The shape that the step arithmetic works with: read off the configuration, else counted on the live model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from backend.planner.shape import AttentionLayer, ModelShape, UnsupportedArchitecture

if TYPE_CHECKING:
    from backend.models.loader import LoadedModel


def model_shape(loaded: LoadedModel) -> ModelShape:
    """FLOP and byte counts of a loaded model; what the planner does not know is counted tensor by tensor."""
    config = loaded.model.config.get_text_config()
    element_bytes = loaded.dtype.itemsize
    try:
        return ModelShape.from_config(config.to_dict(), dtype_bytes=element_bytes)
    except UnsupportedArchitecture:
        return _counted(loaded.model, config, element_bytes)


def _counted(model: torch.nn.Module, config, element_bytes: int) -> ModelShape:
    head = model.get_output_embeddings().weight
    tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tables.pop(id(head), None)  # a tied head multiplies: it is read, not looked up
    matrices = {id(p): p.numel() for p in model.parameters() if p.dim() >= 2 and id(p) not in tables}
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return ModelShape.from_measured(
        attention=[AttentionLayer(heads, kv_heads, head_dim, head_dim)] * config.num_hidden_layers,
        hidden=config.hidden_size,
        vocab=config.vocab_size,
        parameters=sum(p.numel() for p in model.parameters()),
        matmul_parameters=sum(matrices.values()),
        head_parameters=head.numel(),
        gathered_parameters=sum(tables.values()),
        dtype_bytes=element_bytes,
        kv_dtype_bytes=element_bytes,
    )
