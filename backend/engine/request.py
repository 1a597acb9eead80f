"""A request is counters: tokens known, tokens computed, tokens scheduled. Phases are words derived from them."""

from __future__ import annotations

import hashlib
import random
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

GREEDY_BELOW = 1e-5  # colder than this, the best token has all the mass that float32 can hold


class SamplingParams(msgspec.Struct, kw_only=True):
    """How to choose tokens and when to stop. Validated by the server; the engine trusts it."""

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0: greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: off
    seed: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None  # None: off; n: the chosen token's and the n best


class TokenLogprob(msgspec.Struct):
    token_id: int
    token: str
    logprob: float
    top: list[tuple[int, str, float]] = []  # (token id, token, logprob), best first


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    queue_s: float | None = None
    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None


class Delta(msgspec.Struct, kw_only=True, gc=False):
    """What one step added to one request. The last one carries `finish_reason` and `usage`.

    Hundreds of them a step: nothing in one points back to it, so the garbage collector need not look at them.
    """

    request: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # stop | length | abort | error
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    message: str = ""  # with finish_reason "error"
    usage: Usage | None = None


ROOT_HASH = b""


def block_hash(parent: bytes, tokens: list[int], salt: bytes = b"") -> bytes:
    """Content hash of a full block, chained over its parent: equal hashes mean equal prefixes."""
    return hashlib.blake2b(parent + array("I", tokens).tobytes(), key=salt[:64], digest_size=16).digest()


@dataclass(eq=False, slots=True)
class Request:
    number: int
    id: str
    tokens: list[int]  # known: the prompt, then what was sampled
    prompt_tokens: int
    params: SamplingParams
    group: str = ""  # the API id that its siblings share
    user: str = ""
    priority: int = 0
    salt: bytes = b""  # namespace of the prefix cache
    fork_of: Request | None = None  # n > 1: shares the prompt's blocks of this one
    computed: int = 0  # tokens whose K and V are in the pool
    table: list[int] = field(default_factory=list)  # logical block -> physical block
    row: int = -1  # its row in the runner's block tables while it runs
    hashes: list[bytes] = field(default_factory=list)  # of its full blocks, as far as computed here
    sealed_blocks: int = 0  # leading blocks already offered to the prefix cache
    admitted: bool = False  # in the batch now
    decoding: bool = False  # has said something since it was last admitted: one token behind, never more
    done: bool = False
    cached_tokens: int = 0
    preemptions: int = 0
    lost: int = 0  # tokens computed when it was last preempted
    swapped: int = 0  # computed tokens whose K and V wait in host memory
    saved: Any = None  # those K and V; the runner's
    recomputed_tokens: int = 0
    t_queued: float = 0.0
    t_admitted: float | None = None
    t_first: float | None = None
    t_last: float | None = None
    rng: random.Random | None = None
    plain: bool = False  # its tokens are the best ones, from the first on: sampling need not look at its parameters

    def __post_init__(self):
        self.plain = self.params.temperature <= GREEDY_BELOW and not self.params.min_tokens

    @property
    def known(self) -> int:
        return len(self.tokens)

    @property
    def output_tokens(self) -> int:
        return len(self.tokens) - self.prompt_tokens

    @property
    def to_compute(self) -> int:
        return len(self.tokens) - self.computed

    @property
    def order(self) -> tuple[int, int]:
        """Place in every queue: lower priority number first, then arrival. The last one is the victim of preemption."""
        return self.priority, self.number

    def hash_blocks(self, count: int, block_size: int) -> list[bytes]:
        """Hashes of the first `count` full blocks, extending the chain as needed."""
        for i in range(len(self.hashes), count):
            parent = self.hashes[i - 1] if i else ROOT_HASH
            self.hashes.append(block_hash(parent, self.tokens[i * block_size : (i + 1) * block_size], self.salt))
        return self.hashes[:count]
