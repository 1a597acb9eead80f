"""Shared prefixes and chunked prompts: work that need not be done again, and work cut into steps."""

from __future__ import annotations

from backend.planner.errors import PlannerError
from backend.planner.results import Result


def cached_tokens(prompt: int, shared: int, block_size: int = 16) -> Result:
    """Tokens of a shared prefix that come from the cache: whole blocks, and never the last token, whose logits choose
    the first word."""
    if prompt < 1 or shared < 0 or block_size < 1:
        raise PlannerError("a prompt has at least one token and a block at least one slot")
    hit = min(shared, prompt - 1) // block_size * block_size
    formula = f"floor(min({shared:,}, {prompt:,} - 1) / {block_size}) × {block_size}"
    return Result(hit, "tokens", "exact", formula=formula)


def saved_share(prompt: int, cached: int) -> Result:
    """Share of the prompt's linear work; attention of the rest still reads the cached keys."""
    if not 0 <= cached <= prompt or not prompt:
        raise PlannerError(f"of {prompt} tokens {cached} cannot be cached")
    return Result(cached / prompt, "fraction", "exact", formula=f"{cached:,} / {prompt:,}")


def chunks(prompt: int, chunk: int) -> int:
    """Steps that a prompt takes; weights are read again in each."""
    if prompt < 1 or chunk < 1:
        raise PlannerError("a prompt and a chunk have at least one token")
    return -(-prompt // chunk)


def reread_kv_tokens(prompt: int, chunk: int) -> int:
    """Cached tokens that later chunks read again, about prompt² / 2·chunk."""
    return sum(range(0, prompt, chunk))
