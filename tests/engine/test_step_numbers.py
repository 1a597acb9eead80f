"""What a step says of itself, against the live tensors and the textbook's formulas."""

from backend.engine.request import SamplingParams
from backend.events import Step
from tests.engine.stub import run
from tests.engine.tiny import LLAMA, load_tiny, prompts, tiny_engine

LENGTHS, NEW = (40, 7, 23), 6


def test_flops_bytes_and_times_of_every_step():
    events: list = []
    loaded = load_tiny()
    engine = tiny_engine(loaded, events, chunk_size=16, prefix_cache=False)
    weights = sum(p.numel() for name, p in loaded.model.named_parameters() if p.dim() == 2 and "embed" not in name)
    head = loaded.model.get_output_embeddings().weight.numel()  # tied: also the embedding, and read as the head
    for i, length in enumerate(LENGTHS):
        engine.submit(prompts(1, 500, 500, seed=i)[0][:1] * length, SamplingParams(max_tokens=NEW), id=str(i))
    run(engine)
    steps = [e for e in events if isinstance(e, Step)]
    pools = [x for pool in engine.runner.cache.layers.values() for x in pool]
    token_bytes = sum(x[0].numel() * x.element_size() for x in pools)
    per_pair = 4 * LLAMA["num_hidden_layers"] * LLAMA["num_attention_heads"] * LLAMA["head_dim"]

    computed: dict[int, int] = {}
    for step in steps:
        spans = {number: tokens for number, tokens, _ in step.prefill}
        decoding = step.decode if step.decode is not None else [n for n in computed if n not in spans]
        live = {n: 1 for n in decoding if computed[n] < LENGTHS[n - 1] + NEW - 1} | spans
        pairs = attended = rows = 0
        for number, tokens in live.items():
            before = computed.get(number, 0)
            pairs += sum(before + i + 1 for i in range(tokens))
            attended += before + tokens
            computed[number] = before + tokens
            rows += computed[number] >= LENGTHS[number - 1]
        assert step.attention_flops == per_pair * pairs
        assert step.flops == step.attention_flops + 2 * weights * sum(live.values()) + 2 * head * rows
        assert step.kv_write_bytes == token_bytes * sum(live.values())
        assert step.kv_read_bytes == token_bytes * attended
        assert 0 < step.attention_s < step.forward_s < step.step_s
        assert abs(step.weight_bytes / (4 * (weights + head)) - 1) < 0.01  # norms and biases are the rest
    assert computed == {n: length + NEW - 1 for n, length in enumerate(LENGTHS, 1)}
