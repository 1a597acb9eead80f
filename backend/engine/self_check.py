"""Before a model serves: do paged logits equal its own? What cannot be shown equal is refused, never served wrong."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from backend.engine.config import EngineConfig
from backend.engine.request import Request, SamplingParams
from backend.engine.runner import TorchRunner
from backend.engine.scheduler import Plan
from backend.models.errors import ModelError

if TYPE_CHECKING:
    from backend.models.loader import LoadedModel

# Relative difference of logits, by dtype: rounding stays well below, attention to a wrong token far above. In bfloat16
# rounding is 1 to 2 %, and 6 % where it sends a token of a mixture to another expert.
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1, torch.float16: 2e-2}
LENGTHS = ((13, 11), (5, 9))  # two requests, each computed in two chunks and one single token


@torch.inference_mode()
def reference_logits(loaded: LoadedModel) -> list[torch.Tensor]:
    """What the model says with its own eager attention: [tokens, V] for each text that the self-check uses."""
    loaded.model.set_attn_implementation("eager")
    return [
        loaded.model(input_ids=torch.tensor([ids], device=loaded.device), use_cache=False).logits[0].float()
        for ids in _texts(loaded)
    ]


def _texts(loaded: LoadedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    vocabulary = loaded.model.config.get_text_config().vocab_size
    return [torch.randint(vocabulary, (a + b + 1,), generator=generator).tolist() for a, b in LENGTHS]


@torch.inference_mode()
def self_check(loaded: LoadedModel, expected: list[torch.Tensor] | None = None, **paths: Any) -> int:
    """Compares paged with the model's own eager attention on a few tokens: whole prompts, chunks after a context,
    single tokens, two requests in one step, block tables out of order.

    `expected`: its reference_logits, taken before anything in the model was replaced; None takes them now.
    `paths`: what TorchRunner is told of kernels and graphs: those that will serve.
    Returns the K and V bytes a token takes, read off the live tensors. Raises ModelError with the difference.
    """
    texts = _texts(loaded)
    expected = reference_logits(loaded) if expected is None else expected
    config = EngineConfig(block_size=4, num_blocks=16, max_running=2, max_model_len=64)
    runner = TorchRunner(loaded, **paths)
    runner.configure(config)
    blocks = torch.randperm(16, generator=torch.Generator().manual_seed(0)).tolist()
    requests = [
        Request(
            number=i,
            id=str(i),
            tokens=[],
            prompt_tokens=0,
            params=SamplingParams(temperature=0.0),
            row=i,
            table=blocks[8 * i : 8 * i + 8],
        )
        for i in range(2)
    ]
    for part in range(3):
        plan = Plan(moved=dict.fromkeys(requests, 0))
        for request, ids, (a, b) in zip(requests, texts, LENGTHS, strict=True):
            count = (a, b, 1)[part]
            request.computed = len(request.tokens)
            request.tokens = ids[: request.computed + count]
            plan.work[request] = count
        result = runner.execute(plan)
        for row, request in enumerate(result.requests):
            want = expected[request.number][request.known - 1]
            error = float((result.logits[row] - want).norm() / want.norm())
            if not error < TOLERANCE[loaded.dtype]:
                raise ModelError(
                    f"{loaded.name}: paged attention does not reproduce this model (logits differ by {error:.1%} "
                    f"after {request.known} tokens, allowed {TOLERANCE[loaded.dtype]:.1%}); it is not served"
                )
    return runner.cache.bytes_per_token()
