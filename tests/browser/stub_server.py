"""The real engine server and scheduler over a model that is a list of words: fast, the same every time, no weights.

python -m tests.browser.stub_server --port 8123 --num-blocks 64 --step-ms 20
"""

from __future__ import annotations

import argparse
import re
import time
from types import SimpleNamespace

import msgspec
import torch

from backend.engine.config import EngineConfig
from backend.engine.engine import Engine
from backend.engine.loop import EngineLoop
from backend.engine.runner import StepResult
from backend.events import DeviceInfo, Hello, ModelInfo
from backend.planner.shape import ModelShape
from backend.server import host as engine_host
from backend.server.app import create_app
from backend.server.host import EngineHost
from backend.server.listen import bind
from backend.server.serve import Server
from backend.telemetry import ceiling
from backend.telemetry.ceiling import Ceiling, Ceilings, Conditions

ANSWER = (
    "Keys and values of the tokens before are kept in blocks , so that each step computes one token and reads the "
    "rest . A block that two requests need is held once . What nobody holds stays for whoever asks again , until room "
    "is needed ."
).split()
SPECIAL = ["<user>", "<assistant>"]


class Words:
    """A tokenizer: a word with the space before it is a token."""

    def __init__(self, size: int = 16384):
        self.size = size
        self.words: list[str] = []
        self.ids: dict[str, int] = {}
        for word in [*SPECIAL, *(f" {w}" for w in ANSWER)]:
            self._id(word)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self._id(piece) for piece in re.findall(r"\s*\S+|\s+", text)]

    def decode(self, ids) -> str:
        return "".join(map(self.piece, ids))

    def piece(self, token: int) -> str:
        return self.words[token] if token < len(self.words) else f" #{token}"  # of a prompt of ids

    def get_vocab(self) -> dict[str, int]:
        return {"x" * 64: 0}

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [self.piece(i) for i in ids]

    def _id(self, word: str) -> int:
        if word not in self.ids:
            if len(self.words) >= self.size:
                return self.ids[SPECIAL[0]]
            self.ids[word] = len(self.words)
            self.words.append(word)
        return self.ids[word]


class PacedRunner:
    """Takes as long as it is told, and answers with the next word of ANSWER."""

    def __init__(self, words: Words, step_s: float):
        self.words, self.step_s = words, step_s

    def configure(self, config: EngineConfig) -> None:
        pass

    def move(self, plan) -> None:
        pass

    def execute(self, plan) -> StepResult:
        started = time.perf_counter()
        time.sleep(self.step_s)
        complete = [r for r, tokens in plan.work.items() if r.computed + tokens == r.known]
        said = [self.words.ids[f" {ANSWER[(r.number + r.output_tokens) % len(ANSWER)]}"] for r in complete]
        forward_s = time.perf_counter() - started
        return StepResult(complete, said, None, 0.0, forward_s, 0.0, attention_s=0.2 * forward_s)


def ceilings(read: float = 20e9) -> Ceilings:
    """Of a machine on which a step of 20 ms is memory-bound; what tests see must not hang on where they run."""

    def value(rate: float, unit: str) -> Ceiling:
        return Ceiling(value=rate, low=0.9 * rate, high=1.05 * rate, unit=unit, way="scripted", ways={}, rounds=3)

    conditions = Conditions(device="cpu", device_name="stub", host="stub", dtype="bfloat16", threads=1, torch="none")
    return Ceilings(
        copy=value(15e9, "B/s"), read=value(read, "B/s"), matmul=value(400e9, "FLOP/s"), conditions=conditions
    )


class ScriptedCeilings:
    """What is measured takes half a second and finds a faster machine than what was known before."""

    def __init__(self) -> None:
        self.found = ceilings()

    def cached(self, device: str, dtype: str) -> Ceilings:
        return self.found

    def measure(self, device: str, dtype: str, *, progress) -> Ceilings:
        progress(0.5, "scripted")
        time.sleep(0.5)
        self.found = ceilings(25e9)
        return self.found


def boot(emit, say, *, config: EngineConfig, step_s: float):
    words = Words()
    shape = ModelShape.from_config(
        {
            "model_type": "llama", "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "intermediate_size": 1536, "vocab_size": words.size,
        },
        dtype_bytes=2,
    )  # fmt: skip
    engine = Engine(PacedRunner(words, step_s), words, shape, config, emit)
    engine.report(
        Hello(
            epoch=f"stub-{time.time_ns()}",
            wall_time=time.time(),
            model=ModelInfo(
                name="stub-words",
                family="llama",
                dtype="bfloat16",
                layers=30,
                hidden=576,
                heads=9,
                kv_heads=3,
                head_dim=64,
                vocab=words.size,
                parameters=134_515_008,
                weight_bytes=269_030_016,
                kv_bytes_per_token=23040,
                max_model_len=config.max_model_len,
                chat_template=True,
                notes=["words in a list: no weights were loaded"],
                shape=msgspec.to_builtins(shape),
            ),
            device=DeviceInfo(kind="cpu", name="stub", threads=1),
            block_size=config.block_size,
            num_blocks=config.num_blocks,
            config={name: getattr(config, name) for name in config.__struct_fields__},
        )
    )
    loaded = SimpleNamespace(
        name="stub-words",
        tokenizer=words,
        chat_template=True,
        device=torch.device("cpu"),
        dtype="bfloat16",
        roofs=None,
        config=SimpleNamespace(vocab_size=words.size),
        encode_chat=lambda messages: words.encode(
            "".join(f"{SPECIAL[0]} {message['content']}\n" for message in messages) + SPECIAL[1]
        ),
    )
    return EngineLoop(engine), loaded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--num-blocks", type=int, default=256)
    parser.add_argument("--step-ms", type=float, default=20)
    parser.add_argument("--computes-on", default="host", help="uuid of the device that the hardware readings call ours")
    arguments = parser.parse_args()
    config = EngineConfig(num_blocks=arguments.num_blocks, max_model_len=4096, chunk_size=128)
    known = ScriptedCeilings()
    ceiling.cached, ceiling.measure, ceiling.keep = known.cached, known.measure, lambda found: None
    engine_host.used = lambda device: (arguments.computes_on,)
    socket = bind("127.0.0.1", arguments.port)
    print(f"http://127.0.0.1:{socket.getsockname()[1]}", flush=True)
    host = EngineHost(lambda emit, say: boot(emit, say, config=config, step_s=arguments.step_ms / 1e3))
    Server(create_app(host)).run(sockets=[socket])


if __name__ == "__main__":
    main()
