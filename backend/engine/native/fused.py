"""Norms, gated MLPs and attention projections of a transformers model as one compiled operation each. In steps in which
every request has one new token whole layers are, with nothing between them.

A module is replaced only when its replacement computes the same on random input: class names say too little, and code
changes with versions. What is not known, or answers otherwise, stays as it is. Float32 on the CPU, inference only;
weights in bfloat16 stay in memory as they are, and the comparison is made with the module computing as the kernels do.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from backend.engine import attention, native
from backend.engine.kv_cache import KVCache
from backend.engine.native.linear import LinearInFloat32, PackedLinear, is_packable, multiplies_pairs, pack, release
from backend.engine.native.paged import Singles

ROWS = 5  # of the random input
LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer")  # two residual halves, nothing else
MODELS = ("LlamaModel", "MistralModel", "Qwen2Model")  # embedding, layers and norm, nothing else
# What a module raises that is not what it looked like: another signature, another layout.
UNLIKE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
ROPES = ("default", "linear", "llama3", "yarn")  # others look at the longest sequence of the step as well
POSITIONS = 8192  # whose angles are kept
LAYER_PARTS = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
TOLERANCE = 1e-4  # of the largest number in the answer
TOLERANCE_ROUNDED = 2e-3  # where inputs of products are rounded to bfloat16: here and there to the other neighbour
ATTENTIONS = ("LlamaAttention", "MistralAttention", "Qwen2Attention")  # nothing between projection and rotation


class RMSNorm(nn.Module):
    def __init__(self, plain: nn.Module):
        super().__init__()
        self.weight = nn.Parameter(plain.weight.detach().float(), requires_grad=False)
        self.eps = float(plain.variance_epsilon)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.kvscope.rms_norm(x, self.weight, self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) · up(x))"""

    def __init__(self, plain: nn.Module):
        super().__init__()
        self.inner = plain.gate_proj.out_features
        self.register_buffer("gate_up", pack(plain.gate_proj, plain.up_proj), persistent=False)
        self.register_buffer("down", pack(plain.down_proj), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.kvscope.gated_mlp(x, self.gate_up, self.down, self.inner)


class Attention(nn.Module):
    """The projections as one, rotated and written to the pool by it; attention itself is the engine's."""

    def __init__(self, plain: nn.Module):
        super().__init__()
        projections = plain.q_proj, plain.k_proj, plain.v_proj
        self.layer_idx, self.scaling, self.head_dim = plain.layer_idx, plain.scaling, plain.head_dim
        self.sliding_window = getattr(plain, "sliding_window", getattr(plain.config, "sliding_window", None))
        self.heads, self.kv_heads = (p.out_features // plain.head_dim for p in projections[:2])
        self.register_buffer("packed", pack(*projections), persistent=False)
        biases = [p.bias for p in projections if p.bias is not None]
        self.register_buffer("bias", torch.cat(biases).detach().float() if len(biases) == 3 else None, persistent=False)
        self.o_proj = PackedLinear(plain.o_proj)

    def forward(self, hidden_states: torch.Tensor, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_):
        step = attention.current()
        template = hidden_states.new_empty(1, self.kv_heads, 0, self.head_dim)
        keys, values = step.cache.layer(self.layer_idx, template, template)
        cos, sin = (x[0].contiguous() for x in position_embeddings)
        rows = torch.ops.kvscope.project(
            hidden_states[0], self.packed, self.bias, cos, sin, step.slots, keys, values
        ).transpose(0, 1)[None]
        q, k, v = rows.split((self.heads, self.kv_heads, self.kv_heads), 1)
        out, _ = attention.attend(self, q, k, v, scaling=self.scaling, sliding_window=self.sliding_window, written=True)
        return self.o_proj(out.flatten(2)), None


class Around(nn.Module):
    """Stands for a module and can do some of its work in a shorter way."""

    def __init__(self, plain: nn.Module):
        super().__init__()
        self.plain = plain

    def __getattr__(self, name: str):
        """What is asked of that module beside its answer."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("plain"), name)


class DecoderLayer(Around):
    """A layer whose parts are fused already: one operation in steps in which every request has one new token."""

    def __init__(self, plain: nn.Module):
        super().__init__(plain)
        before, attend, after, mlp = (getattr(plain, name) for name in LAYER_PARTS)
        self.window, self.index, self.scaling = attend.sliding_window, attend.layer_idx, attend.scaling
        # Read once: a module looks each of its tensors up in three dictionaries.
        self.weights = (
            before.weight, before.eps, attend.packed, attend.bias, attend.o_proj.packed, attend.o_proj.bias,
            after.weight, after.eps, mlp.gate_up, mlp.down, mlp.inner,
        )  # fmt: skip

    def forward(self, hidden_states: torch.Tensor, *, position_embeddings, **others):
        step = attention.current()
        if not self.knows(step):
            return self.plain(hidden_states, position_embeddings=position_embeddings, **others)
        return self.decode(hidden_states, *position_embeddings, step)

    def knows(self, step: attention.Step) -> bool:
        """Has every request one new token, sees this layer all of its tokens, and is there a pool yet?"""
        singles = step.singles
        seen = isinstance(singles, Singles) and singles.see(self.window)
        return seen and not step.spans and self.index in step.cache.layers

    def decode(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, step: attention.Step) -> torch.Tensor:
        singles = step.singles
        answer, seconds = torch.ops.kvscope.decoder_layer(
            x, *self.weights, cos, sin, step.slots, *step.cache.layers[self.index], singles.tables, singles.lengths,
            singles.block_size, self.scaling,
        )  # fmt: skip
        step.seconds += seconds
        return answer


class Decoder(Around):
    """A model without its head whose layers are one operation each: nothing but these in steps in which every request
    has one new token. Masks, checks and look-ups between them take 5 % of a small model's step."""

    def __init__(self, plain: nn.Module):
        super().__init__(plain)
        self.decoding = list(plain.layers)
        # The layers may differ in what they see and in nothing else.
        self.narrowest = min(self.decoding, key=lambda layer: layer.window or math.inf)
        # Cosines and sines of the first positions, [positions, head size], where they depend on nothing else.
        self.cos = self.sin = torch.empty(0)
        if plain.rotary_emb.rope_type in ROPES:
            positions = torch.arange(min(POSITIONS, plain.config.max_position_embeddings))
            self.cos, self.sin = (x[0] for x in plain.rotary_emb(_random(1, 1, 1), positions[None]))

    def forward(self, input_ids: torch.Tensor | None = None, position_ids: torch.Tensor | None = None, **others):
        step = attention.current()
        if input_ids is None or not self.narrowest.knows(step):
            return self.plain(input_ids=input_ids, position_ids=position_ids, **others)
        x = self.plain.embed_tokens(input_ids)
        if step.singles.longest <= len(self.cos):
            cos, sin = nn.functional.embedding(position_ids, self.cos), nn.functional.embedding(position_ids, self.sin)
        else:
            cos, sin = self.plain.rotary_emb(x, position_ids)
        for layer in self.decoding:
            x = layer.decode(x, cos, sin, step)
        return BaseModelOutputWithPast(last_hidden_state=self.plain.norm(x))


@torch.inference_mode()
def fuse(model: nn.Module) -> int:
    """Replaces what can be replaced, one module after another, and returns how many. Before linear layers are packed.

    The engine's attention is put under a transformers model, as replacements are compared on it.
    """
    if hasattr(model, "set_attn_implementation"):
        attention.put_under(model)
    return sum(_replace(model, replacement) for replacement in (_part, _layer, _model))


def _replace(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> int:
    """Puts what computes the same in the place of each module that has a replacement, and returns how many had."""
    found = [(parent, name, child) for parent in list(model.modules()) for name, child in parent.named_children()]
    replaced = 0
    for parent, name, child in found:
        made = replacement(child)
        if made is not None:
            setattr(parent, name, made)
            replaced += 1
    return replaced


def _model(plain: nn.Module) -> nn.Module | None:
    layers = getattr(plain, "layers", None)
    if type(plain).__name__ not in MODELS or not isinstance(layers, nn.ModuleList) or not len(layers):
        return None
    if any(type(layer) is not DecoderLayer for layer in layers) or type(plain.norm) is not RMSNorm:
        return None
    try:
        made = Decoder(plain)
        return made if _same_model(plain, made) else None
    except UNLIKE:
        return None


def _same_model(plain: nn.Module, fused: Decoder) -> bool:
    ids, positions = torch.arange(ROWS)[None], torch.arange(ROWS - 1, 2 * ROWS - 1)[None]
    told = []
    for module in (plain, fused):
        step = _singles_step()
        for layer in plain.layers:
            shape = 2 * ROWS * ROWS, layer.self_attn.kv_heads, layer.self_attn.head_dim
            step.cache.layers[layer.index] = _random(*shape), _random(*shape)
        with attention.active(step):
            out = module(input_ids=ids, position_ids=positions, use_cache=False)
        told.append((out[0], *(pool for pools in step.cache.layers.values() for pool in pools)))
    return all(_close(a, b) for a, b in zip(*told, strict=True))


def _singles_step() -> attention.Step:
    """ROWS requests with one new token each after ROWS - 1 ... 2 ROWS - 2 others, in two blocks each; no pool yet."""
    tables = torch.arange(2 * ROWS).reshape(ROWS, 2).int()
    lengths = torch.arange(ROWS, 2 * ROWS).int()
    slots = torch.arange(ROWS) * 2 * ROWS + lengths - 1
    step = attention.Step(KVCache(2 * ROWS, ROWS, torch.device("cpu")), slots, [], [])
    step.singles = Singles(tables, lengths, 2 * ROWS - 1, ROWS)
    return step


def _layer(plain: nn.Module) -> nn.Module | None:
    parts = [getattr(plain, part, None) for part in LAYER_PARTS]
    if type(plain).__name__ not in LAYERS or [type(p) for p in parts] != [RMSNorm, Attention, RMSNorm, GatedMLP]:
        return None
    made = DecoderLayer(plain)
    return made if _same_layer(plain, made) else None


def _same_layer(plain: nn.Module, fused: DecoderLayer) -> bool:
    """The same answers for requests that each have one new token, and the same K and V in the pool."""
    attend = plain.self_attn
    x, size = _random(1, ROWS, len(plain.input_layernorm.weight)), attend.head_dim
    angles = _random(1, ROWS, size // 2)
    angles = torch.cat([angles, angles], -1)
    kept = _random(2, 2 * ROWS * ROWS, attend.kv_heads, size)
    told = []
    for module in (plain, fused):
        step = _singles_step()
        step.cache.layers[attend.layer_idx] = tuple(pool.clone() for pool in kept)
        with attention.active(step):
            out = module(x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)
        if not isinstance(out, torch.Tensor):
            return False  # a version whose layers return more than their answer
        told.append((out, *step.cache.layers[attend.layer_idx]))
    return all(_close(a, b) for a, b in zip(*told, strict=True))


def _part(plain: nn.Module) -> nn.Module | None:
    """A norm, MLP or attention that computes the same, with weights of its own: those of `plain` are released."""
    for fits, fused, same in (
        (_is_norm, RMSNorm, _same_rows),
        (_is_gated_mlp, GatedMLP, _same_rows),
        (_is_attention, Attention, _same_attention),
    ):
        if fits(plain):
            try:
                made = fused(plain)
                with LinearInFloat32(rounded=native.multiplies_bfloat16()):
                    alike = same(plain, made)
            except UNLIKE:
                return None
            if not alike:
                return None
            for module in plain.modules():
                if type(module) is nn.Linear:
                    release(module)
            return made
    return None


def _is_norm(plain: nn.Module) -> bool:
    weight = getattr(plain, "weight", None)
    return (
        type(plain).__name__.endswith("RMSNorm")
        and hasattr(plain, "variance_epsilon")
        and isinstance(weight, torch.Tensor)
        and is_packable(weight)
        and weight.dim() == 1
        and len(weight) % 8 == 0
    )


def _is_gated_mlp(plain: nn.Module) -> bool:
    parts = [getattr(plain, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    return (
        all(type(part) is nn.Linear and part.bias is None and is_packable(part.weight) for part in parts)
        and parts[0].weight.shape == parts[1].weight.shape == parts[2].weight.shape[::-1]
        and parts[0].out_features % 8 == 0
    )


def _is_attention(plain: nn.Module) -> bool:
    parts = [getattr(plain, name, None) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
    return (
        type(plain).__name__ in ATTENTIONS
        and all(type(part) is nn.Linear and is_packable(part.weight) for part in parts)
        and len({part.bias is None for part in parts[:3]}) == 1
        and plain.head_dim % 16 == 0
    )


def _same_rows(plain: nn.Module, fused: nn.Module) -> bool:
    width = fused.weight.shape[0] if isinstance(fused, RMSNorm) else plain.gate_proj.in_features
    x = _random(1, ROWS, width)
    return _close(plain(x), fused(x), _tolerance(fused))


def _same_attention(plain: nn.Module, fused: Attention) -> bool:
    """The same answers, and the same K and V in the pool."""
    x, angles = _random(1, ROWS, plain.q_proj.in_features), _random(1, ROWS, plain.head_dim // 2)
    angles = torch.cat([angles, angles], -1)
    slots = torch.arange(1, ROWS + 1)
    told = []
    for module in (plain, fused):
        step = attention.Step(KVCache(2, ROWS, x.device), slots, [], [attention.Span(0, ROWS, 0, slots)])
        with attention.active(step):
            out = module(hidden_states=x, position_embeddings=(angles.cos(), angles.sin()), attention_mask=None)[0]
        told.append((out, *step.cache.layers[plain.layer_idx]))
    return all(_close(a, b, _tolerance(fused)) for a, b in zip(*told, strict=True))


def _random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _tolerance(fused: nn.Module) -> float:
    return TOLERANCE_ROUNDED if any(multiplies_pairs(x) for x in fused.buffers()) else TOLERANCE


def _close(want: torch.Tensor, got: torch.Tensor, tolerance: float = TOLERANCE) -> bool:
    return want.shape == got.shape and bool((want - got).abs().max() <= tolerance * want.abs().max())
