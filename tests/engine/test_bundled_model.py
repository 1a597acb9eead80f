"""The bundled model itself, in float32: what it says with everybody at once is what it says alone."""

import pytest

from backend.engine.build import build
from backend.engine.request import SamplingParams
from backend.events import Finished, Hello
from tests.engine.stub import ids, run
from tests.engine.tiny import assert_same, prompts, reference

COUNT, NEW, SHARED = 64, 5, 40
pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def case(smollm2_path):
    from backend.models.loader import load

    loaded = load(str(smollm2_path), dtype="float32", device="cpu")
    texts = prompts(COUNT, 40, 49_000, shared=SHARED)
    return texts, [reference(loaded, text, NEW) for text in texts]


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("everything at once", {"max_running": 32, "chunk_size": 16, "num_blocks": 512}),
        ("a pool too small", {"max_running": 32, "block_size": 4, "num_blocks": 200, "prefix_cache": False}),
    ],
)
def test_64_prompts_together(case, smollm2_path, name, switches):
    from backend.models.loader import load

    texts, want = case
    events: list = []
    engine = build(load(str(smollm2_path), dtype="float32", device="cpu"), switches, events.append)
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    requests = [engine.submit(text, params, id=str(i))[0] for i, text in enumerate(texts)]
    said = run(engine)
    for i, request in enumerate(requests):
        assert len(ids(said[request.number])) == NEW
        assert_same(ids(said[request.number]), want[i], f"{name}, prompt {i}")
    finished = [e for e in events if isinstance(e, Finished)]
    if "prefix_cache" in switches:
        assert sum(e.preemptions for e in finished) > 0
    else:
        assert sum(e.cached_tokens for e in finished) > 0
    (hello,) = [e for e in events if isinstance(e, Hello)]
    tensors = [x for pools in engine.runner.cache.layers.values() for x in pools]
    per_token = sum(x[0].numel() * x.element_size() for x in tensors)
    assert hello.model.kv_bytes_per_token == per_token == 2 * 30 * 3 * 64 * 4
