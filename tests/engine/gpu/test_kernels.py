"""The Triton kernels agree with plain arithmetic: 210 random shapes, block tables, dtypes, windows, caps and sinks."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

# What rounding of the inputs' dtype explains: weights are rounded to it once, and the answer once.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@dataclass
class Case:
    """One batch of single tokens, its pool and its block tables, drawn from a seed."""

    seed: int
    q: torch.Tensor = field(init=False)

    def __post_init__(self):
        rng = random.Random(self.seed)
        make = torch.Generator().manual_seed(self.seed)
        self.dtype = rng.choice(list(TOLERANCE))
        batch, self.kv_heads, self.group = rng.choice([1, 1, 2]), rng.choice([1, 1, 2]), rng.choice([1, 2, 3, 4, 6, 7])
        self.key_dim = rng.choice([8, 16, 24, 64, 80, 128])
        self.value_dim = self.key_dim if rng.random() < 0.8 else rng.choice([16, 48])
        self.block_size = rng.choice([1, 4, 5, 16, 32])
        self.lengths = [rng.choice([0, 1, 16, rng.randint(1, 80), rng.randint(1, 80)]) for _ in range(batch)]
        self.longest = max(self.lengths + [1])
        widest = -(-self.longest // self.block_size)
        blocks = (batch + 1) * widest
        self.tables = torch.randperm(blocks, generator=make).reshape(batch + 1, widest).int()
        self.rows = torch.randperm(batch + 1, generator=make)[:batch]
        heads, slots = self.kv_heads * self.group, blocks * self.block_size
        spread = rng.choice([0.3, 1.0, 4.0])
        self.q = (torch.randn(1, batch, heads, self.key_dim, generator=make) * spread).to(self.dtype).transpose(1, 2)
        self.keys = torch.randn(slots, self.kv_heads, self.key_dim, generator=make).to(self.dtype)
        self.values = torch.randn(slots, self.kv_heads, self.value_dim, generator=make).to(self.dtype)
        self.scale = rng.choice([self.key_dim**-0.5, 0.2])
        self.window = rng.choice([None, None, 1, rng.randint(2, 60)])
        self.softcap = rng.choice([None, None, 2.0, 50.0])
        self.sinks = torch.randn(heads, generator=make).to(self.dtype) if rng.random() < 0.3 else None
        self.splits, self.tile = rng.choice([None, 1, 2, 3]), rng.choice([16, 32, 32, None])

    def run(self, paged) -> torch.Tensor:
        return paged.decode(
            self.q[0].transpose(0, 1), self.keys, self.values, self.rows, self.tables, torch.tensor(self.lengths),
            self.block_size, self.scale, longest=self.longest, window=self.window, softcap=self.softcap,
            sinks=self.sinks, splits=self.splits, tile=self.tile,
        )  # fmt: skip

    def expected(self, row: int) -> torch.Tensor:
        """[Hq, Dv] in float64, written out."""
        length = self.lengths[row]
        table = self.tables[self.rows[row]].long()
        slots = (table[:, None] * self.block_size + torch.arange(self.block_size)).flatten()[:length]
        slots = slots[-self.window :] if self.window else slots
        keys, values = (x[slots].double().repeat_interleave(self.group, 1) for x in (self.keys, self.values))
        scores = torch.einsum("hd,lhd->hl", self.q[0, :, row].double(), keys) * self.scale
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.sinks is not None:
            scores = torch.cat([scores, self.sinks.double()[:, None]], -1)
        weights = scores.softmax(-1)[:, : len(slots)]
        return torch.einsum("hl,lhd->hd", weights, values)


@pytest.mark.parametrize("part", range(7))
def test_decode_is_attention(triton, part):
    for seed in range(30 * part, 30 * part + 30):
        case = Case(seed)
        got = case.run(triton)
        assert got.dtype == case.dtype
        for row, length in enumerate(case.lengths):
            if not length:
                assert not got[row].any(), f"seed {seed}: padding must give zeros"
                continue
            want = case.expected(row)
            error = float((got[row].double() - want).abs().max() / max(1.0, want.abs().max()))
            assert error <= TOLERANCE[case.dtype], f"seed {seed}, row {row}: {error:.1e} in {case.dtype}"


def test_the_cases_are_many_kinds():
    cases = [Case(seed) for seed in range(210)]
    for kind in ("window", "softcap", "sinks"):
        assert 40 < sum(getattr(case, kind) is not None for case in cases) < 200
    assert {case.dtype for case in cases} == set(TOLERANCE)
    assert sum(case.key_dim != case.value_dim for case in cases) > 20
    assert sum(0 in case.lengths for case in cases) > 30
    assert sum((case.splits or 2) > 1 for case in cases) > 100


@pytest.mark.parametrize("seed", range(30))
def test_write_puts_each_token_into_its_slot(triton, seed):
    rng, make = random.Random(seed), torch.Generator().manual_seed(seed)
    dtype = rng.choice(list(TOLERANCE))
    tokens, heads, key_dim, value_dim = (rng.randint(0, 5), rng.randint(1, 3), *rng.choices([8, 16, 24, 80], k=2))
    pools = [torch.zeros(40, heads, dim, dtype=dtype) for dim in (key_dim, value_dim)]
    key = torch.randn(1, tokens, heads, key_dim, generator=make).to(dtype).transpose(1, 2)  # as projections give them
    value = torch.randn(1, heads, tokens, 2 * value_dim, generator=make).to(dtype)[..., ::2]  # strides of any kind
    slots = torch.randperm(40, generator=make)[:tokens]
    want = [pool.clone() for pool in pools]
    for pool, new in zip(want, (key, value), strict=True):
        pool[slots] = new[0].transpose(0, 1)
    triton.write(*pools, slots, key, value)
    assert all(torch.equal(a, b) for a, b in zip(pools, want, strict=True))


@pytest.mark.filterwarnings("ignore:All-NaN slice:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
def test_what_is_not_a_number_stays_visible(triton):
    for splits in (1, 2):
        case = Case(0)
        case.lengths = [40] * len(case.rows)
        case.tables = torch.arange(case.tables.shape[0] * 40).reshape(-1, 40).int()
        case.block_size, case.longest, case.splits, case.tile, case.window = 1, 40, splits, 16, None
        case.keys, case.values = (torch.zeros(4000, *x.shape[1:], dtype=x.dtype) for x in (case.keys, case.values))
        case.q = torch.full_like(case.q, torch.nan)
        assert case.run(triton).isnan().all()


@pytest.mark.parametrize(
    "programs, processors, longest, tile, want",
    [
        (8, 132, 8192, 64, 33),  # one request, eight KV heads: contexts are split for 132 processors
        (8 * 64, 132, 8192, 64, 1),  # a large batch fills them by itself
        (1, 132, 8192, 64, 64),
        (8, 132, 100, 64, 2),  # never more splits than tiles
        (8, 132, 1, 64, 1),
    ],
)
def test_contexts_are_split_where_the_batch_is_small(triton, programs, processors, longest, tile, want):
    assert triton.split_count(programs, processors, longest, tile) == want


def test_what_a_program_cannot_hold_is_left_to_torch(triton):
    pool = torch.zeros(4, 1, 64)
    assert triton.knows(torch.zeros(1, 1, 64), pool, pool)
    assert not triton.knows(torch.zeros(1, 1, 576), torch.zeros(4, 1, 576), torch.zeros(4, 1, 512))
    assert not triton.knows(torch.zeros(1, 1, 64, dtype=torch.float64), pool.double(), pool.double())
    assert not triton.knows(torch.zeros(1, 1, 64).half(), pool, pool)


def test_they_compile_for_a_gpu_that_is_not_here(triton, tmp_path):
    """Compute capability 9.0, as far as machine code, which takes the compiler and no GPU."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.gpu.compiled", "90"], env=plain | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, timeout=100, cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert not done.returncode, done.stderr[-2000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == ["decode", "decode", "reduce", "write"]
    assert all(int(line.split()[3]) <= 99 * 1024 for line in done.stdout.splitlines())
