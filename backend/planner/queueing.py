"""Little's law and what follows from it. It holds for stable systems only: whatever is not is said to be unstable."""

from __future__ import annotations

from collections.abc import Callable

from backend.planner.errors import PlannerError
from backend.planner.napkin import positive
from backend.planner.results import Result, Term


def arrival_rate(concurrency: float, output: float, tpot_s: float, ttft_s: float = 0.0) -> Result:
    """Requests a second that `concurrency` at once amount to: L = λ·W."""
    positive(concurrency=concurrency, output=output, tpot_s=tpot_s)
    stay = ttft_s + output * tpot_s
    return Result(
        concurrency / stay, "req/s", "exact", formula=f"{concurrency:g} / ({ttft_s:g} s + {output:g} × {tpot_s:g} s)"
    )


def stable(wanted: float, possible: float) -> str:
    """At more arrivals than the system completes the queue grows without bound."""
    return "stable" if wanted < possible else "unstable"


def fixed_point(
    arrivals: float, output: float, ttft_s: float, tpot_s: Callable[[int], float], most: int | None
) -> Result:
    """Requests at once at `arrivals` a second, when a larger batch makes every token slower: the smallest L with
    L ≥ λ·(TTFT + T·TPOT(L)). None when no L up to `most` is enough."""
    positive(arrivals=arrivals, output=output)
    limit = most if most is not None else 1 << 20

    def missing(running: int) -> float:
        return arrivals * (ttft_s + output * tpot_s(running)) - running

    low, high = 0, 1
    while missing(high) > 0:
        low, high = high, high * 2
        if low >= limit:
            where = f"{limit:,} at once fit" if most is not None else "no batch is large enough"
            possible = best_rate(output, ttft_s, tpot_s, limit)
            note = f"unstable: {where}, which complete {possible:.3g} req/s; the queue grows without bound"
            return Result(None, "sequences", "estimate", note=note)
        high = min(high, limit)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if missing(middle) > 0 else (low, middle)
    tpot = tpot_s(high)
    terms = (
        Term("stay", ttft_s + output * tpot, "s", f"{ttft_s:.3g} s + {output:g} × {tpot * 1e3:.3g} ms"),
        Term("arrivals", arrivals, "req/s"),
    )
    return Result(high, "sequences", "estimate", terms, "smallest L ≥ λ × stay(L)")


def best_rate(output: float, ttft_s: float, tpot_s: Callable[[int], float], most: int) -> float:
    """Requests a second with `most` at once: completions grow with the batch."""
    return most / (ttft_s + output * tpot_s(most)) if most else 0.0


def sojourn(rho: float, service_s: float, model: str = "M/M/1") -> Result:
    """Mean time in a queue with one server and Poisson arrivals. Raises PlannerError for ρ ≥ 1: there is none."""
    positive(service_s=service_s)
    if not 0 <= rho < 1:
        raise PlannerError(f"utilisation must be below 1 for a queue to have a mean wait, not {rho}")
    if model == "M/M/1":
        return Result(service_s / (1 - rho), "s", "exact", formula=f"{service_s:g} s / (1 - {rho:g})")
    if model == "M/D/1":
        value = service_s * (1 + rho / (2 * (1 - rho)))
        return Result(value, "s", "exact", formula=f"{service_s:g} s × (1 + {rho:g} / (2 × (1 - {rho:g})))")
    raise PlannerError(f"unknown queue '{model}'; known: M/M/1, M/D/1")


def evicted_per_step(batch: float, prompt: float, output: float) -> Result:
    """Cache tokens that steady traffic frees (and fills) in each decode step: each sequence leaves once in `output`."""
    positive(output=output)
    formula = f"{batch:g} × ({prompt:g} + {output:g}) / {output:g}"
    return Result(batch * (prompt + output) / output, "tokens", "exact", formula=formula)


def prefill_servers(prefill_s: float, decode_step_s: float, batch: float, output: float) -> Result:
    """Prefill servers that keep one decode server busy: its completions a second × seconds of a prompt."""
    positive(decode_step_s=decode_step_s, output=output)
    rate = batch / (output * decode_step_s)
    return Result(rate * prefill_s, "prefill per decode server", "exact", formula=f"{rate:.3g} req/s × {prefill_s:g} s")
