"""What would help most here? Each lever is the same question with one thing changed, planned again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from backend.planner import roofline as roof
from backend.planner.arch import Architecture, Attention
from backend.planner.errors import PlannerError
from backend.planner.formats import KV, WEIGHTS
from backend.planner.plan import Setup, cached_prefix, decode, room, speculation

MOST_AT_ONCE = 1024  # larger batches are not planned for
GROUP = 8  # query heads that share a KV head in most models of today


@dataclass(frozen=True)
class Lever:
    """Factors against the setup as it is: above 1 is better."""

    name: str
    words: str
    throughput: float  # decode ceiling, batch as large as memory allows
    concurrency: float
    ttft: float  # 2: half the time
    applies: bool = True


@dataclass(frozen=True)
class _Figures:
    throughput: float
    room: float
    ttft: float


def rank(setup: Setup, by: str = "throughput") -> list[Lever]:
    """Largest gain first; those that are in use already, or bring nothing here, at the end."""
    base = _figures(setup)
    found = [_lever(base, setup, *entry) for entry in _CHANGES]
    found += [_paging(setup, base), _speculative(setup, base)]
    return sorted(found, key=lambda lever: (lever.applies, getattr(lever, by)), reverse=True)


def _figures(setup: Setup) -> _Figures:
    fit = room(setup).value or 0
    batch = max(1, min(int(fit), MOST_AT_ONCE))
    ttft = roof.prefill_time(
        setup.arch, setup.weights, setup.accelerator, tokens=setup.prompt, cached=cached_prefix(setup), tp=setup.tp
    )
    return _Figures(batch / decode(setup, batch).value, fit, ttft.value)


def _lever(base: _Figures, setup: Setup, name: str, change: Callable[[Setup], tuple[Setup, str] | str]) -> Lever:
    try:
        made = change(setup)
        if isinstance(made, str):
            return Lever(name, made, 1.0, 1.0, 1.0, applies=False)
        other, words = made
        new = _figures(other)
    except PlannerError as error:
        return Lever(name, str(error), 1.0, 1.0, 1.0, applies=False)
    return Lever(name, words, new.throughput / base.throughput, _ratio(new.room, base.room), base.ttft / new.ttft)


def _ratio(new: float, base: float) -> float:
    return new / base if base else (float("inf") if new else 1.0)


def regrouped(arch: Architecture, kv_heads: Callable[[Attention], int]) -> Architecture:
    """The same model with another number of KV heads; its K and V matrices shrink or grow with them."""

    def changed(mixer):
        if not isinstance(mixer, Attention):
            return mixer
        wanted = kv_heads(mixer)
        matrices = mixer.matrices + arch.hidden * (wanted - mixer.kv_heads) * (mixer.k_dim + mixer.v_dim)
        return replace(mixer, kv_heads=wanted, matrices=max(0, matrices))

    return replace(arch, layers=tuple(replace(layer, mixer=changed(layer.mixer)) for layer in arch.layers))


def _gqa(setup: Setup) -> tuple[Setup, str] | str:
    full = [m for m in setup.arch.kv_layers if isinstance(m, Attention)]
    if not full:
        return "its attention keeps no heads of keys and values"
    shared = full[0].heads // full[0].kv_heads
    if shared >= GROUP or full[0].heads % GROUP:
        return f"in use: {shared} query heads share a KV head"
    other = regrouped(setup.arch, lambda mixer: max(1, mixer.heads // GROUP))
    return setup.but(arch=other), f"{GROUP} query heads share a KV head instead of {shared}; needs a model trained so"


def _kv_dtype(setup: Setup) -> tuple[Setup, str] | str:
    if setup.kv.bits <= 8:
        return f"in use: {setup.kv.name}"
    return setup.but(kv=KV["fp8"]), f"1 byte an element instead of {setup.kv.bits / 8:g}"


def _weight_dtype(name: str) -> Callable[[Setup], tuple[Setup, str] | str]:
    def change(setup: Setup) -> tuple[Setup, str] | str:
        form = WEIGHTS[name]
        if setup.weights.of("mlp") <= form.of("mlp") or setup.weights.of("experts") <= form.of("experts"):
            return f"in use: {setup.weights.name}"
        return setup.but(weights=form), form.words

    return change


def _prefix(setup: Setup) -> tuple[Setup, str] | str:
    if setup.shared_prefix:
        return f"in use: {setup.shared_prefix:,} tokens shared"
    shared = setup.prompt // 2
    return setup.but(shared_prefix=shared), f"if half of each prompt ({shared:,} tokens) were the same"


def _faster(words: str, **factors: float) -> Callable[[Setup], tuple[Setup, str]]:
    return lambda setup: (setup.but(accelerator=setup.accelerator.scaled(**factors)), words)


def _more_gpus(setup: Setup) -> tuple[Setup, str]:
    return setup.but(tp=setup.tp * 2), f"{setup.tp * 2} GPUs share every layer; exchange between them is not counted"


_CHANGES: tuple[tuple[str, Callable], ...] = (
    ("Grouped-query attention", _gqa),
    ("KV cache in fp8", _kv_dtype),
    ("Weights in fp8", _weight_dtype("fp8")),
    ("Weights in int4", _weight_dtype("int4-g128")),
    ("Shared prefix", _prefix),
    ("Twice the bandwidth", _faster("a part that reads twice as fast", bandwidth=2.0)),
    ("Twice the FLOP/s", _faster("a part that computes twice as fast", flops=2.0)),
    ("Twice the memory", _faster("a part that holds twice as much", memory=2.0)),
    ("Twice the GPUs (TP)", _more_gpus),
)


def _paging(setup: Setup, base: _Figures) -> Lever:
    """Blocks on demand hold the tokens that are there; reserving holds the longest answer from the start."""
    longest, middle = setup.context, setup.prompt + setup.output // 2
    paged = room(setup.but(context=middle, output=min(setup.output, middle - 1))).value or 0
    gain = _ratio(paged, base.room)
    half = min(max(1, int(paged)), MOST_AT_ONCE)
    speed = half / decode(setup, half).value / base.throughput
    words = f"answers are half done on average: {middle:,} tokens held, not {longest:,} reserved"
    return Lever("Paging instead of reserving", words, speed, gain, 1.0)


def _speculative(setup: Setup, base: _Figures) -> Lever:
    accept = setup.accept or 0.7
    asked = setup.but(accept=accept)
    gain = speculation(asked, setup.batch).value
    alone = speculation(asked, 1).value
    words = (
        f"{accept:.0%} accepted, {setup.gamma} drafted: × {alone:.2f} alone, × {gain:.2f} at a batch of {setup.batch}"
    )
    return Lever("Speculative decoding", words, gain, 1.0, 1.0)
