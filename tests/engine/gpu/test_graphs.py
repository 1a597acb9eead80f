"""Decode steps by graphs: padding changes no answer, everything else goes its usual way. A stand-in for a graph
computes again on the same memory, which is all that a graph does; the kernels are Triton's, interpreted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backend.engine.gpu import paged
from backend.engine.gpu.graphs import Columns, DecodeGraphs, padded, sizes
from backend.engine.request import SamplingParams
from backend.engine.self_check import reference_logits, self_check
from tests.engine.stub import ids, run
from tests.engine.test_families import FAMILIES
from tests.engine.tiny import LLAMA, assert_same, load_tiny, prompts, reference, tiny_engine

CPU = torch.device("cpu")
NEW = 4


class Again:
    """Captures a callable, and notes each replay by the batch that it was captured for."""

    def __init__(self):
        self.captured, self.replayed = [], []

    def __call__(self, compute):
        size = len(compute())
        self.captured.append(size)

        class Graph:
            def replay(graph):
                self.replayed.append(size)
                return compute()

        return Graph()


# ---- sizes and padding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest", [1, 2, 3, 5, 16, 33, 64, 100, 256, 1000, 1024])
def test_every_batch_has_a_graph_and_little_padding(largest):
    known = sizes(largest)
    assert known == sorted(set(known)) and known[-1] == largest
    for batch in range(1, largest + 1):
        size = min(size for size in known if size >= batch)
        assert size < 2 * batch and (batch < 16 or size < 1.5 * batch)
    assert len(known) <= 36


def test_padding_attends_to_nothing_and_writes_to_trash():
    made = Columns(*padded(Columns(*(np.full(3, i + 7) for i in range(5))), 5, trash_slot=99))
    assert made.slots.tolist() == [9, 9, 9, 99, 99] and made.lengths.tolist() == [10, 10, 10, 0, 0]
    assert made.ids.tolist() == [7, 7, 7, 0, 0] and made.rows.tolist() == [11, 11, 11, 0, 0]


def test_a_batch_replays_the_next_larger_graph_on_its_own_memory():
    again = Again()
    graphs = DecodeGraphs(lambda columns: columns.ids * 10 + columns.lengths, again, [1, 2, 4, 6], 0, CPU)
    assert again.captured == [6, 4, 2, 1]  # the largest first: the others live in its memory
    for batch, size in ((1, 1), (2, 2), (3, 4), (4, 4), (5, 6), (3, 4)):
        numbers = np.arange(batch) + batch
        out = graphs.run(Columns(numbers, numbers, numbers, numbers * 0 + 1, numbers))
        assert out.tolist() == (numbers * 10 + 1).tolist()
        assert again.replayed[-1] == size


# ---- in the engine -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def case():
    loaded = load_tiny()
    texts = prompts(3, 12, 512)
    return loaded, texts, [reference(loaded, text, NEW) for text in texts]


def answers(engine, texts) -> list[list[int]]:
    params = SamplingParams(max_tokens=NEW, temperature=0.0)
    requests = [engine.submit(text, params, id="x")[0] for text in texts]
    said = run(engine)
    return [ids(said[request.number]) for request in requests]


def test_answers_are_the_models_own(triton, case):
    loaded, texts, want = case
    again = Again()
    engine = tiny_engine(
        loaded, triton_attention=True, capture=again, max_running=4, block_size=8, chunk_size=8, token_budget=16
    )
    for got, expected in zip(answers(engine, texts), want, strict=True):
        assert_same(got, expected, "graphs")
    assert 4 in again.replayed and set(again.replayed) <= {1, 2, 4}  # three at once, padded; fewer at the end
    assert engine.runner.notes == ["decode steps as CUDA graphs, for 3 sizes of the batch"]


def test_what_is_captured_writes_k_and_v_with_the_kernel(triton, case, monkeypatch):
    loaded, texts, _ = case
    written, write = [], paged.write

    def noted(keys, values, slots, *others):
        written.append(len(slots))
        write(keys, values, slots, *others)

    again = Again()
    engine = tiny_engine(loaded, triton_attention=True, capture=again, max_running=4)
    monkeypatch.setattr(paged, "write", noted)
    answers(engine, texts)
    assert again.replayed
    for size in set(again.replayed):
        assert written.count(size) >= again.replayed.count(size) * LLAMA["num_hidden_layers"]


def test_padding_touches_the_trash_block_only(triton, case):
    """The pool after padded graphs holds what it holds after the same steps without any."""
    loaded, texts, _ = case
    pools = []
    for capture in (Again(), None):
        engine = tiny_engine(loaded, triton_attention=True, capture=capture, max_running=4, num_blocks=16)
        answers(engine, texts)
        pools.append([pool for pair in engine.runner.cache.layers.values() for pool in pair])
        assert bool(capture and capture.replayed) == (capture is not None)
    for padded_pool, plain_pool in zip(*pools, strict=True):
        torch.testing.assert_close(padded_pool[:-16], plain_pool[:-16], rtol=1e-4, atol=1e-4)  # sums in other orders


def test_a_new_pool_gets_new_graphs(triton, case):
    loaded, texts, want = case
    again = Again()
    engine = tiny_engine(loaded, triton_attention=True, capture=again, max_running=2)
    engine.configure({"num_blocks": 8, "max_running": 1})
    assert again.captured == [2, 1, 1]
    assert_same(answers(engine, texts[:1])[0], want[0], "after a switch")
    assert set(again.replayed) == {1}


def test_what_cannot_be_captured_is_launched_and_said(triton, case):
    loaded, texts, want = case

    def refuse(compute):
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    engine = tiny_engine(loaded, triton_attention=True, capture=refuse)
    (note,) = engine.runner.notes
    assert note.startswith("no CUDA graphs") and note.endswith("operation not permitted when stream is capturing")
    assert_same(answers(engine, texts[:1])[0], want[0], "without graphs")


def test_a_layer_that_the_kernel_does_not_know_is_not_captured(triton):
    loaded = load_tiny(LLAMA | {"head_dim": 264, "num_attention_heads": 2, "num_key_value_heads": 1})
    engine = tiny_engine(loaded, triton_attention=True, capture=Again())
    assert "does not know the attention of layer 0" in engine.runner.notes[0]
    text = prompts(1, 8, 512)[0]
    assert_same(answers(engine, [text])[0], reference(loaded, text, NEW), "by torch")


# Every kind of attention that the kernels know; others differ in what they leave to the model's own layers.
KINDS = ("llama", "gpt_neox, untied", "gemma2, soft cap and alternating windows", "gpt_oss, sinks")


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_attention_passes_its_check(triton, name):
    loaded = load_tiny(FAMILIES[name])
    expected = reference_logits(loaded)
    again = Again()
    self_check(loaded, expected, triton_attention=True, capture=again)
    assert again.replayed == [2]
