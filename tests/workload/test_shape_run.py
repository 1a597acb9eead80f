"""A load of one shape fits, or says why not."""

from backend.workload.shape_run import STEPS, Shape, body, obstacle

CONFIG = {"max_running": 8, "max_model_len": 1024}


def test_the_last_step_attends_the_context():
    shape = Shape(4, 512)
    assert shape.prompt_tokens + shape.output_tokens == 512 and shape.output_tokens == STEPS
    tiny = Shape(1, 16)
    assert tiny.prompt_tokens >= 1 and tiny.output_tokens >= 2


def test_prompts_are_of_one_length_and_different():
    asked = body(Shape(3, 100), vocab=1000, seed=1)
    assert [len(prompt) for prompt in asked["prompt"]] == [76] * 3
    assert len({tuple(prompt) for prompt in asked["prompt"]}) == 3
    assert all(100 <= token < 500 for prompt in asked["prompt"] for token in prompt)
    assert asked["ignore_eos"] and asked["max_tokens"] == STEPS


def test_what_does_not_fit_is_told_with_its_numbers():
    assert obstacle(Shape(8, 512), CONFIG, num_blocks=256, block_size=16) == ""
    assert "256 blocks, the pool has 255" in obstacle(Shape(8, 512), CONFIG, num_blocks=255, block_size=16)
    assert "at most 8" in obstacle(Shape(16, 16), CONFIG, num_blocks=999, block_size=16)
    assert "1,024" in obstacle(Shape(1, 2048), CONFIG, num_blocks=999, block_size=16)
