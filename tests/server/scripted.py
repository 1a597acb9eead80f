"""The real engine and server around a model that only repeats its prompt: API tests that take milliseconds."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import torch

from backend.engine.config import EngineConfig, Limits
from backend.engine.engine import Engine
from backend.engine.loop import EngineLoop
from backend.engine.runner import StepResult
from backend.engine.sampling import sample
from backend.engine.scheduler import Plan
from backend.engine.text import Text
from backend.events import DeviceInfo, Hello, ModelInfo
from backend.models.errors import ModelError
from backend.planner.shape import AttentionLayer, ModelShape

EOS = 256
VOCAB = 260
NAME = "parrot"


class ByteTokenizer:
    """A token a byte; 256 ends a text."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(
        self, ids: list[int], skip_special_tokens: bool = False, clean_up_tokenization_spaces: bool = False
    ) -> str:
        parts = bytes(i for i in ids if i < 256).decode(errors="replace")
        return parts if skip_special_tokens else parts + "<end>" * sum(i == EOS for i in ids)

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.decode([i]) for i in ids]

    def get_vocab(self) -> dict[str, int]:
        return {chr(i): i for i in range(256)} | {"<end>": EOS}


class Parrot:
    """A runner: the token at place p is the one at p - prompt length. A 0 byte in the prompt stands for the end token.

    `gate` holds the steps when it is closed; `fail` makes the next step raise; `step_s` is how long a step takes
    at least.
    """

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.fail: str | None = None
        self.step_s = 0.0

    def configure(self, config: EngineConfig) -> None:
        pass

    def move(self, plan: Plan) -> None:
        pass

    def execute(self, plan: Plan) -> StepResult:
        self.gate.wait(30)
        time.sleep(self.step_s)
        if self.fail:
            message, self.fail = self.fail, None
            raise RuntimeError(message)
        ready = [r for r, count in plan.work.items() if r.computed + count == r.known]
        logits = torch.zeros(len(ready), VOCAB)
        for row, request in enumerate(ready):
            token = request.tokens[request.known - request.prompt_tokens]
            logits[row, EOS if token == 0 else token] = 20.0
            logits[row, (token + 1) % 256] = 10.0
        if not ready:
            return StepResult([], [], None, 1e-6, 1e-5, 1e-6)
        tokens, logits = sample(logits, ready, {EOS})
        return StepResult(ready, tokens.tolist(), logits, 1e-6, 1e-5, 1e-6)


class Bird:
    """What a server is made of, with the strings to pull in a test."""

    def __init__(self, **config: object):
        self.config = EngineConfig(**{"max_model_len": 512, "num_blocks": 128, "block_size": 4, **config})
        self.runner = Parrot()
        tokenizer = ByteTokenizer()
        self.loaded = SimpleNamespace(
            name=NAME,
            tokenizer=tokenizer,
            config=SimpleNamespace(vocab_size=VOCAB),
            encode_chat=self._encode_chat,
            device=torch.device("cpu"),
            dtype=torch.float32,
            roofs=None,
        )
        self.has_template = True
        self.boot_error: Exception | None = None
        self.boot_gate = threading.Event()
        self.boot_gate.set()
        self.loop: EngineLoop | None = None

    def boot(self, emit, say) -> tuple[EngineLoop, SimpleNamespace]:
        say("fetching the parrot")
        self.boot_gate.wait(30)
        if self.boot_error:
            raise self.boot_error
        shape = ModelShape.from_measured(
            attention=[AttentionLayer(2, 1, 8, 8)],
            hidden=16,
            vocab=VOCAB,
            parameters=10_000,
            matmul_parameters=9_000,
            head_parameters=4_160,
            gathered_parameters=0,
            dtype_bytes=4,
            kv_dtype_bytes=4,
        )
        limits = Limits(max_model_len=512, kv_bytes_per_token=shape.kv_bytes_per_token, memory_bytes=2**20)
        engine = Engine(self.runner, Text(self.loaded.tokenizer), shape, self.config, emit, {EOS}, limits)
        model = ModelInfo(name=NAME, layers=1, max_model_len=512, kv_bytes_per_token=shape.kv_bytes_per_token)
        engine.report(
            Hello(
                epoch="test",
                model=model,
                device=DeviceInfo(memory_bytes=2**20),
                block_size=self.config.block_size,
                num_blocks=self.config.num_blocks,
                config={"prefix_cache": self.config.prefix_cache},
            )
        )
        self.loop = EngineLoop(engine)
        return self.loop, self.loaded

    def release(self) -> None:
        """Lets everything run that was held."""
        self.boot_gate.set()
        self.runner.gate.set()
        self.runner.step_s = 0.0

    def _encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        if not self.has_template:
            raise ModelError(f"{NAME} has no chat template")
        return list("".join(f"{m['role']}: {m['content']}\n" for m in messages).encode())
