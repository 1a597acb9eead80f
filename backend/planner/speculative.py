"""Speculative decoding: a draft proposes γ tokens, one step of the large model checks them all."""

from __future__ import annotations

from backend.planner.errors import PlannerError
from backend.planner.results import Result


def expected_tokens(accept: float, gamma: int) -> Result:
    """Tokens that one verifying step yields when each drafted one is accepted with probability `accept`,
    independently: (1 - a^(γ+1)) / (1 - a)."""
    if not 0 <= accept <= 1 or gamma < 0:
        raise PlannerError(f"acceptance must lie in 0 … 1 and γ not below 0, not {accept} and {gamma}")
    value = gamma + 1 if accept == 1 else (1 - accept ** (gamma + 1)) / (1 - accept)
    return Result(value, "tokens/step", "exact", formula=f"(1 - {accept:g}^{gamma + 1}) / (1 - {accept:g})")


def speedup(accept: float, gamma: int, draft_cost: float, verify_cost: float = 1.0) -> Result:
    """Against one token a step. `draft_cost`: one draft step, `verify_cost`: the step that checks γ + 1 tokens, both in
    plain steps of the large model. At a large batch the check computes more than it reads and the gain is gone."""
    tokens = expected_tokens(accept, gamma).value
    formula = f"{tokens:.4g} / ({verify_cost:.3g} + {gamma} × {draft_cost:g})"
    return Result(tokens / (verify_cost + gamma * draft_cost), "x", "estimate", formula=formula)


def most_speedup(accepted_length: float) -> Result:
    """No draft is free and no check is cheaper than a step: never more than the accepted length."""
    return Result(accepted_length, "x", "bound", formula="tokens accepted a step")
