"""Prompts and chunks by flash attention: what is a CUDA operation there is written out here."""

from __future__ import annotations

import random

import pytest
import torch

from backend.engine import attention
from backend.engine.gpu import spans
from backend.engine.kv_cache import KVCache

CPU = torch.device("cpu")


def written_out(q, k, v, starts_q, starts_k, longest_q, longest_k, scale):
    """What torch's operation is for, in float64."""
    assert longest_q == starts_q.diff().max() and longest_k == starts_k.diff().max()
    out = torch.empty_like(q)
    for i in range(len(starts_q) - 1):
        rows, at = slice(*starts_q[i : i + 2].tolist()), slice(*starts_k[i : i + 2].tolist())
        keys, values = (x[at].double().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), keys) * scale
        seen = torch.ones(scores.shape[1:], dtype=torch.bool).tril(scores.shape[2] - scores.shape[1])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


@pytest.fixture(params=["at once", "one by one"])
def flash(monkeypatch, request):
    """Everything is taken for a GPU; the ragged operation is there or not."""
    spans.works.cache_clear()
    called = []

    def ragged(*args):
        if request.param == "one by one":
            raise RuntimeError("no such kernel for this device")
        called.append(1)
        return written_out(*args)

    monkeypatch.setattr(spans, "ragged", ragged)
    monkeypatch.setattr(spans, "knows", lambda *args: True)
    yield lambda: bool(called) == (request.param == "at once")
    spans.works.cache_clear()


class Layer:
    layer_idx = 0


@pytest.mark.parametrize("seed", range(12))
def test_a_step_is_what_masks_make_of_it(flash, seed):
    """Singles, chunks and prompts in one step: the same with and without, and the same K and V in the pool."""
    rng, make = random.Random(seed), torch.Generator().manual_seed(seed)
    kv_heads, group, dim, block = rng.randint(1, 2), rng.randint(1, 3), 16, 4
    lengths = [rng.randint(1, 12) for _ in range(rng.randint(2, 4))]
    contexts = [rng.choice([0, 0, rng.randint(1, 20)]) if seed % 3 else 0 for _ in lengths]
    before = rng.randint(0, 1) * 4  # rows of the step that others have
    tokens = before + sum(lengths)
    places = torch.randperm(400, generator=make)
    slots = [places[40 * i : 40 * i + n + c] for i, (n, c) in enumerate(zip(lengths, contexts, strict=True))]
    q, k, v = (torch.randn(1, h, tokens, dim, generator=make) for h in (kv_heads * group, kv_heads, kv_heads))
    filled = torch.randn(2, (100 + 1) * block, kv_heads, dim, generator=make)
    window = rng.choice([None, 64, 64])
    told = []
    for fast in (False, True):
        cache = KVCache(100, block, CPU)
        for pool, content in zip(cache.layer(0, k, v), filled, strict=True):
            pool.copy_(content)
        rows, own = before, []
        for n, c, where in zip(lengths, contexts, slots, strict=True):
            own.append(attention.Span(rows, n, c, where))
            rows += n
        new = torch.cat([torch.arange(400, 400 + before), *(w[c:] for w, c in zip(slots, contexts, strict=True))])
        step = attention.Step(cache, new, [], own)
        if fast:
            step.ragged = spans.Spans(before, lengths, contexts, slots)
        with attention.active(step):
            out = attention.attend(Layer, q, k, v, sliding_window=window)[0]
        told.append((out[0, before:], *cache.layers[0]))
    for want, got in zip(*told, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert flash()


@pytest.mark.parametrize("way, name", [("ragged", "ragged"), ("one by one", "one_by_one")])
def test_a_way_that_answers_otherwise_is_not_used(monkeypatch, way, name):
    kind = (way, 4, 2, 16, torch.float32, CPU)
    monkeypatch.setattr(spans, "ragged", written_out)
    right = getattr(spans, name)
    spans.works.cache_clear()
    assert spans.works(*kind)
    monkeypatch.setattr(spans, name, lambda *args: right(*args).roll(1, 0))
    spans.works.cache_clear()
    assert not spans.works(*kind)
    spans.works.cache_clear()


def test_without_any_way_masks_serve(monkeypatch):
    monkeypatch.setattr(spans, "knows", lambda *args: True)
    monkeypatch.setattr(spans, "works", lambda *args: False)
    one, q = spans.Spans(0, [3], [0], [torch.arange(3)]), torch.zeros(1, 2, 3, 16)
    assert one.attend(q, q, q, None, 0, 1.0, None, None, None) is None


def test_what_flash_attention_does_not_know_goes_by_masks():
    one = spans.Spans(0, [3], [0], [torch.arange(3)])
    q = torch.zeros(1, 2, 3, 16)
    assert one.attend(q, q, q, None, 0, 1.0, None, None, None) is None  # float32, and not on a GPU
    half = q.half().to("meta")
    assert not spans.knows(half, half, half)
