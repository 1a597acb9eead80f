"""An architecture from dimensions that a person types, for models that no parser knows."""

from __future__ import annotations

from backend.planner.arch import Architecture, Attention, Latent, Layer, Recurrent
from backend.planner.blocks import attention, gated_experts, gated_mlp, plain_mlp
from backend.planner.errors import PlannerError
from backend.planner.hybrids import delta_net
from backend.planner.reader import MAX_COUNT, MAX_LAYERS


def by_hand(
    *,
    layers: int,
    kv_heads: int = 1,
    head_dim: int = 128,
    q_heads: int | None = None,
    hidden: int | None = None,
    ff: int = 0,
    gated: bool = True,
    vocab: int = 0,
    tied: bool = True,
    norms: bool = True,
    window: int | None = None,
    sliding_layers: int | None = None,
    experts: int = 0,
    experts_per_token: int = 0,
    kv_lora_rank: int = 0,
    qk_rope_head_dim: int = 0,
    index_head_dim: int = 0,
    full_attention_interval: int = 0,
    linear: dict[str, int] | None = None,
) -> Architecture:
    """All counts are elements. `window` holds for the first `sliding_layers` layers (all, if not said);
    `kv_lora_rank` makes the attention latent; `full_attention_interval` keeps keys and values in every so-manieth
    layer and a delta net, of dimensions `linear` (as `hybrids.delta_net`), in the others.

    Raises PlannerError.
    """
    heads = q_heads or kv_heads
    hidden = hidden or heads * head_dim
    given = {"layers": layers, "kv_heads": kv_heads, "head_dim": head_dim, "q_heads": heads, "hidden": hidden}
    for name, value in given.items():
        if not 1 <= value <= (MAX_LAYERS if name == "layers" else MAX_COUNT):
            raise PlannerError(f"{name} must be positive and of a believable size, not {value}")
    for name, value in {"ff": ff, "vocab": vocab, "experts": experts, "experts_per_token": experts_per_token}.items():
        if not 0 <= value <= MAX_COUNT:
            raise PlannerError(f"{name} must not be negative, nor beyond belief: {value}")
    if heads % kv_heads:
        raise PlannerError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    if window is not None and window < 1:
        raise PlannerError("a window must see at least one token")
    if experts and not 1 <= experts_per_token <= experts:
        raise PlannerError(f"a token uses between 1 and {experts} experts, not {experts_per_token}")

    windowed = (layers if sliding_layers is None else sliding_layers) if window else 0
    ffn = None
    if ff:
        if experts:
            ffn = gated_experts(hidden, experts, experts_per_token, ff)
        else:
            ffn = (gated_mlp if gated else plain_mlp)(hidden, ff)

    def mixer(index: int) -> Attention | Latent | Recurrent:
        if full_attention_interval and (index + 1) % full_attention_interval:
            return delta_net(hidden, **(linear or {}))
        if kv_lora_rank:
            return Latent(
                heads=heads,
                latent=kv_lora_rank,
                rope=qk_rope_head_dim,
                nope=head_dim,
                v_dim=head_dim,
                index=index_head_dim,
            )
        return attention(hidden, heads, kv_heads, head_dim, window=window if index < windowed else None)

    kinds: dict[tuple, Layer] = {}
    made = []
    for index in range(layers):
        key = (bool(full_attention_interval and (index + 1) % full_attention_interval), index < windowed)
        if key not in kinds:
            kinds[key] = Layer(mixer=mixer(index), ffn=ffn, norms=2 * hidden * norms)
        made.append(kinds[key])
    return Architecture(
        model_type="entered by hand",
        layers=tuple(made),
        hidden=hidden,
        vocab=vocab,
        tied=tied,
        final_vectors=hidden * norms,
    )
