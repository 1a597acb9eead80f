"""The bundled model itself, in float32: what it says with everybody at once is what it says alone."""

import pytest
import torch

from backend.engine.build import build
from backend.engine.request import SamplingParams
from backend.events import Finished, Hello
from tests.engine.stub import ids, run
from tests.engine.tiny import assert_same, prompts, reference

COUNT, NEW, SHARED = 16, 5, 40
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def case(smollm2_path):
    from backend.models.loader import load

    loaded = load(str(smollm2_path), dtype="float32", device="cpu")
    texts = prompts(COUNT, 40, 49_000, shared=SHARED)
    return Referee(loaded), texts


class Referee:
    """What `generate` says. Where an answer is at hand, one pass over prompt and answer tells each best next token,
    which is what greedy `generate` would take and a fifth of its work."""

    def __init__(self, loaded):
        self.loaded = loaded
        self.known: dict[tuple[int, ...], tuple[list[int], list[float]]] = {}

    @torch.inference_mode()
    def best(self, text: list[int], said: list[int]) -> tuple[list[int], list[float]]:
        """The best token at each place of an answer, given all before it, and how far the next best is behind."""
        key = (*text, *said)
        if key not in self.known:
            logits = self.loaded.model(input_ids=torch.tensor([[*text, *said[:-1]]]), use_cache=False).logits[0]
            best = logits[len(text) - 1 :].float().topk(2)
            gaps = (best.values[:, 0] - best.values[:, 1]).tolist()
            self.known[key] = best.indices[:, 0].tolist(), gaps
        return self.known[key]


def test_the_referee_says_what_generate_says(case):
    referee, texts = case
    for text in texts[:: COUNT // 4]:
        tokens, _ = reference(referee.loaded, text, NEW)
        assert referee.best(text, tokens)[0] == tokens


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("everything at once", {"max_running": 8, "chunk_size": 16, "num_blocks": 512}),
        ("a pool too small", {"max_running": 32, "block_size": 4, "num_blocks": 90, "prefix_cache": False}),
    ],
)
def test_many_prompts_together(case, smollm2_path, name, switches):
    from backend.models.loader import load

    referee, texts = case
    events: list = []
    engine = build(load(str(smollm2_path), dtype="float32", device="cpu"), switches, events.append)
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    requests = [engine.submit(text, params, id=str(i))[0] for i, text in enumerate(texts)]
    said = run(engine)
    for i, request in enumerate(requests):
        answer = ids(said[request.number])
        assert len(answer) == NEW
        assert_same(answer, referee.best(texts[i], answer), f"{name}, prompt {i}")
    finished = [e for e in events if isinstance(e, Finished)]
    if "prefix_cache" in switches:
        assert sum(e.preemptions for e in finished) > 0
    else:
        assert sum(e.cached_tokens for e in finished) > 0
    (hello,) = [e for e in events if isinstance(e, Hello)]
    tensors = [x for pools in engine.runner.cache.layers.values() for x in pools]
    per_token = sum(x[0].numel() * x.element_size() for x in tensors)
    assert hello.model.kv_bytes_per_token == per_token == 2 * 30 * 3 * 64 * 4
