"""Choosing tokens for a whole batch of logits.

One uniform number per request and token, drawn from the request's own generator, and the inverse of the cumulative
distribution: what a request says depends on its seed and its logits, not on who else is in the batch.
"""

from __future__ import annotations

from operator import attrgetter

import numpy as np
import torch

from backend.engine.request import GREEDY_BELOW, Request
from backend.engine.upload import upload

_plain = attrgetter("plain")
NUCLEUS_GUESS = 256  # a nucleus is nearly always smaller; sorting a whole vocabulary costs a hundred times more


def all_plain(requests: list[Request]) -> bool:
    """Does nobody ask for more than the best token? True of the same requests for good."""
    return all(map(_plain, requests))


def sample(
    logits: torch.Tensor, requests: list[Request], stop_ids: frozenset[int], plain: bool | None = None
) -> tuple[np.ndarray, torch.Tensor]:
    """[S, V] logits -> S token ids (int64), -1 where the best logit is not finite, and the [S, V] float32 logits that
    they were chosen from (before temperature). plain: `all_plain(requests)`, where that is known.

    The host waits for the device once, at the end; a nucleus that must be looked for (top-p) makes it wait once more.
    """
    logits = logits.float()
    if logits.device.type == "cpu" and (all_plain(requests) if plain is None else plain):
        return _greedy(logits.numpy()), logits
    special = [(row, request) for row, request in enumerate(requests) if not request.plain]
    for row, request in special:
        params = request.params
        if request.output_tokens < params.min_tokens:
            banned = [*params.stop_token_ids, *(() if params.ignore_eos else stop_ids)]
            logits[row, banned] = -torch.inf
    random = [row for row, request in special if request.params.temperature > GREEDY_BELOW]
    best, chosen = _best(logits)
    truncated = [i for i in random if requests[i].params.top_k or requests[i].params.top_p < 1]
    whole = [i for i in random if i not in truncated]
    # Apart, because candidates stand in another order after truncation: a neighbour's top-p must not change a choice.
    for rows, draw in ((whole, _draw_whole), (truncated, _draw_truncated)):
        if rows:
            among = [requests[i] for i in rows]
            temperature = _column([r.params.temperature for r in among], np.float32, logits.device)
            where = upload(np.array(rows), logits.device)
            chosen[where] = draw(logits[where] / temperature, among)
    return torch.where(best.isfinite(), chosen, -1).cpu().numpy(), logits


def _greedy(logits: np.ndarray) -> np.ndarray:
    """[S, V] -> where the largest number of each row stands, -1 where it is not finite."""
    best, where = _largest(logits)
    return np.where(np.isfinite(best), where, -1)


def _best(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[S, V] -> the largest number of each row and where it stands; NaN is larger than all."""
    if logits.device.type == "cpu":
        best, where = _largest(logits.numpy())
        return torch.from_numpy(best), torch.from_numpy(where)
    where = logits.argmax(-1)
    return logits.gather(-1, where[:, None])[:, 0], where


def _largest(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same by numpy: vectorised, a tenth of the time that torch.max takes for a large vocabulary."""
    where = logits.argmax(-1)
    return logits[np.arange(len(where)), where], where


def _column(values: list, dtype: type, device: torch.device) -> torch.Tensor:
    """[R, 1]"""
    return upload(np.array(values, dtype=dtype)[:, None], device)


def _draw_whole(scaled: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """[R, V] logits after temperature -> [R] token ids."""
    return _inverse(scaled.softmax(-1), requests).flatten()


def _draw_truncated(scaled: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """The same with top-k, then top-p (the order of transformers' warpers)."""
    probabilities, ids = _truncate(scaled, requests)
    return ids.gather(-1, _inverse(probabilities, requests)).flatten()


def _inverse(probabilities: torch.Tensor, requests: list[Request]) -> torch.Tensor:
    """[R, C] probabilities up to a factor -> [R, 1] columns, each chosen by its request's next uniform number."""
    cumulative = probabilities.double().cumsum(-1)
    uniform = _column([r.rng.random() for r in requests], np.float64, probabilities.device)
    index = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True)
    # Whatever the rounding of the sums, a token of probability 0 is never chosen.
    last = (probabilities > 0).cumsum(-1).argmax(-1, keepdim=True)
    return torch.minimum(index, last)


def _truncate(scaled: torch.Tensor, requests: list[Request]) -> tuple[torch.Tensor, torch.Tensor]:
    """Probabilities (not normalised) of the candidates, best first, and their ids: [R, C] each."""
    vocabulary = scaled.shape[-1]
    top_k = _column([min(r.params.top_k or vocabulary, vocabulary) for r in requests], np.int64, scaled.device)
    top_p = _column([r.params.top_p for r in requests], np.float32, scaled.device)
    width = min(vocabulary, NUCLEUS_GUESS)
    while True:
        values, ids = scaled.topk(width, dim=-1)
        # Mass relative to what top-k leaves, which is the whole vocabulary where it is off.
        rank = torch.arange(width, device=scaled.device)
        kept = values.masked_fill(rank >= top_k, -torch.inf)
        total = torch.where(top_k <= width, kept.logsumexp(-1, keepdim=True), scaled.logsumexp(-1, keepdim=True))
        probabilities = (kept - total).exp()
        before = probabilities.cumsum(-1) - probabilities
        nucleus = before < top_p
        enough = (~nucleus).any(-1, keepdim=True) | (top_k <= width)
        if width == vocabulary or bool(enough.all()):
            nucleus[:, 0] = True
            return probabilities * nucleus, ids
        width = min(vocabulary, width * 16)


def top_logprobs(logits: torch.Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """[V] logits -> the chosen token's log probability and the `count` best (id, log probability), best first."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(count) if count else None
    pairs = list(zip(best.indices.tolist(), best.values.tolist(), strict=True)) if best else []
    return float(logprobs[token]), pairs
