"""The compiled kernels: equal to plain arithmetic in every shape, in the engine, and missed by nobody when absent."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from backend.engine import kernels as kernels_module
from backend.engine import native
from backend.engine.build import build as build_engine
from backend.engine.config import ConfigError
from backend.engine.kernels import Chosen, Kernels, choose
from backend.engine.kv_cache import KVCache
from backend.engine.native import __main__ as command
from backend.engine.native import build, fused, linear
from backend.engine.native.linear import PackedLinear, pack_linears
from backend.engine.native.paged import Singles
from backend.engine.request import SamplingParams
from backend.engine.self_check import reference_logits, self_check
from backend.events import Hello, Step
from backend.models import dtype as dtypes
from backend.models.errors import ModelError
from backend.models.loader import load
from tests.engine.stub import ids, run
from tests.engine.test_families import FAMILIES
from tests.engine.tiny import LLAMA, assert_same, load_tiny, prompts, reference, tiny_engine


@pytest.fixture(scope="session")
def kernels() -> None:
    """Compiled once into the user's cache, as `make run` does."""
    try:
        build.build()
    except build.BuildError as error:
        pytest.skip(f"the kernels cannot be compiled here: {error}")
    assert native.load() == ""


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    largest = float(want.abs().max()) if want.numel() else 0.0
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=max(1e-4, 1e-6 * largest))


def seen(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a packed layer with weights of this dtype multiplies: on CPUs with arithmetic for bfloat16 x is rounded."""
    return x.bfloat16().float() if dtype == torch.bfloat16 and native.multiplies_bfloat16() else x


def attended(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype) -> None:
    """Where the CPU multiplies bfloat16 the weights of the values are rounded to it too."""
    if dtype == torch.bfloat16 and native.multiplies_bfloat16():
        assert (got - want).norm() < 0.01 * want.norm()
    else:
        close(got, want)


# ---- the kernels ---------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 70), inputs=st.integers(1, 600), outputs=st.integers(1, 90), bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 9),
)  # fmt: skip
def test_a_packed_linear_layer_is_a_linear_layer(kernels, rows, inputs, outputs, bias, dtype, seed):
    torch.manual_seed(seed)
    plain = nn.Linear(inputs, outputs, bias=bias, dtype=dtype)
    x = torch.randn(rows, inputs)
    with torch.inference_mode():
        packed = PackedLinear(plain)
        assert packed.packed.dtype == dtype
        assert torch.equal(packed.weight, plain.weight)
        close(packed(x), plain.double()(seen(x, dtype).double()))


def test_what_is_packed_in_half_the_bytes_is_rounded_as_torch_rounds(kernels):
    bits = torch.tensor([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7FC00001, 0x7F800000, 0, 1]).int()
    plain = nn.Linear(1, 16, bias=False)
    plain.weight.data = torch.cat([bits.view(torch.float32), torch.randn(8)])[:, None]
    packed = linear.pack(plain, half=True)
    want = plain.weight.data.bfloat16()
    got = PackedLinear(plain)
    got.packed = packed
    torch.testing.assert_close(got.weight, want, rtol=0, atol=0, equal_nan=True)


def test_what_is_packed_stays_whatever_is_packed_after_it(kernels, monkeypatch):
    monkeypatch.setattr(linear, "ROOM_BYTES", 20_000)  # some share a room, some need another, one is larger than it
    torch.manual_seed(0)
    plain = [nn.Linear(inputs, outputs) for inputs, outputs in ((60, 33), (7, 16), (90, 20), (80, 90), (16, 1))]
    packed = [PackedLinear(layer) for layer in plain]
    for layer, own in zip(plain, packed, strict=True):
        assert torch.equal(own.weight, layer.weight)
        assert own.packed.data_ptr() % linear.LINE_BYTES == 0


@pytest.mark.parametrize("rows", [0, 1, 5, 130, 2000])
def test_a_packed_linear_layer_takes_any_batch(kernels, rows):
    torch.manual_seed(0)
    plain = nn.Linear(600, 50)
    x = torch.randn(2, rows, 1200)[..., ::2]  # not contiguous, more rows than are worked on together
    with torch.inference_mode():
        close(PackedLinear(plain)(x), plain.double()(x.double()))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6), group=st.integers(1, 8),
    kv_heads=st.integers(1, 3), size=st.sampled_from([16, 64, 80, 128, 256]),
    block_size=st.sampled_from([1, 5, 16, 64]), spread=st.sampled_from([0.1, 1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 9),
)  # fmt: skip
def test_paged_decode_is_attention(kernels, lengths, group, kv_heads, size, block_size, spread, dtype, seed):
    torch.manual_seed(seed)
    widest = -(-max(lengths) // block_size)
    tables = torch.randperm(len(lengths) * widest).reshape(len(lengths), widest).int()
    k, v = (torch.randn(tables.numel() * block_size, kv_heads, size).to(dtype) for _ in range(2))
    q = torch.randn(len(lengths), kv_heads * group, size) * spread
    got = torch.ops.kvscope.paged_decode(q, k, v, tables, torch.tensor(lengths).int(), block_size, size**-0.5)
    query = seen(q * size**-0.5, dtype if size % 32 == 0 else torch.float32)
    for row, length in enumerate(lengths):
        slots = (tables[row, :, None].long() * block_size + torch.arange(block_size)).flatten()[:length]
        keys, values = (x[slots].double().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("hd,lhd->hl", query[row].double(), keys)
        attended(got[row], torch.einsum("hl,lhd->hd", scores.softmax(-1), values), dtype)


@settings(max_examples=40, deadline=None)
@given(
    groups=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=1, max_size=3),
    group=st.integers(1, 4),
    size=st.sampled_from([16, 64, 80]), block_size=st.sampled_from([1, 16]), spread=st.sampled_from([1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 9),
)  # fmt: skip
def test_what_requests_have_in_common_is_attended_to_as_if_it_were_their_own(
    kernels, groups, group, size, block_size, spread, dtype, seed
):
    """groups: (requests, tokens in common), in the same blocks; what follows is each request's own."""
    torch.manual_seed(seed)
    kv_heads, own = 2, 40
    common = [tokens // block_size for requests, tokens in groups for _ in range(requests)]
    widest = max(common) + own // block_size + 1
    tables, at = torch.zeros(len(common), widest).int(), 0
    for requests, tokens in groups:
        rows = tables[at : at + requests]
        rows[:] = torch.randint(2000 // block_size, rows.shape)
        rows[:, : tokens // block_size] = rows[0, : tokens // block_size].clone()
        at += requests
    order = torch.randperm(len(common))
    tables, lengths = tables[order], torch.tensor(common)[order] * block_size + torch.randint(1, own, (len(common),))
    k, v = (torch.randn(2000, kv_heads, size).to(dtype) for _ in range(2))
    q = torch.randn(len(common), kv_heads * group, size) * spread
    together = torch.ops.kvscope.paged_decode(q, k, v, tables, lengths.int(), block_size, size**-0.5)
    for row in range(len(common)):
        one = slice(row, row + 1)
        alone = torch.ops.kvscope.paged_decode(q[one], k, v, tables[one], lengths[one].int(), block_size, size**-0.5)
        attended(together[row], alone[0], dtype)


@settings(max_examples=60, deadline=None)
@given(
    length=st.integers(1, 90), context=st.sampled_from([0, 1, 37, 256, 700]), group=st.integers(1, 8),
    kv_heads=st.integers(1, 3), size=st.sampled_from([16, 64, 80, 128, 256]), spread=st.sampled_from([0.1, 1.0, 8.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 9),
)  # fmt: skip
def test_span_attention_is_causal_attention(kernels, length, context, group, kv_heads, size, spread, dtype, seed):
    torch.manual_seed(seed)
    tokens = context + length
    slots = torch.randperm(2 * tokens)[:tokens]
    k, v = (torch.randn(2 * tokens, kv_heads, size).to(dtype) for _ in range(2))
    # As fused layers leave them: the heads of a token together, K and V between them and the next one's.
    q = torch.randn(length, kv_heads * (group + 2), size)[:, : kv_heads * group] * spread
    got = torch.ops.kvscope.span_attention(q, k, v, slots, size**-0.5)
    keys, values = (x[slots].double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("thd,lhd->htl", seen(q * size**-0.5, dtype).double(), keys)
    late = torch.ones(length, tokens, dtype=torch.bool).triu(context + 1)
    want = torch.einsum("htl,lhd->thd", scores.masked_fill(late, -torch.inf).softmax(-1), values)
    attended(got, want, dtype)


def test_a_span_sees_nothing_that_comes_later(kernels):
    torch.manual_seed(0)
    k, v = (torch.randn(300, 2, 64) for _ in range(2))
    q, slots = torch.randn(120, 6, 64), torch.randperm(300)
    before = torch.ops.kvscope.span_attention(q, k, v, slots, 0.125)
    later = slots[180 + 50 + 1 :]
    k[later], v[later] = torch.nan, 1e30
    after = torch.ops.kvscope.span_attention(q, k, v, slots, 0.125)
    assert torch.equal(before[: 50 + 1], after[: 50 + 1])


def test_what_a_span_cannot_be_is_refused(kernels):
    pool, q = torch.zeros(32, 1, 16), torch.zeros(2, 1, 16)
    for slots in ([0, 32], [-1, 0]):
        with pytest.raises(RuntimeError, match="is not in the pool"):
            torch.ops.kvscope.span_attention(q, pool, pool, torch.tensor(slots), 1.0)
    with pytest.raises(RuntimeError, match="one for each token"):
        torch.ops.kvscope.span_attention(q, pool, pool, torch.tensor([0]), 1.0)
    assert torch.ops.kvscope.span_attention(q[:0], pool, pool, torch.tensor([0]), 1.0).shape == (0, 1, 16)


def test_what_is_not_a_number_stays_visible(kernels):
    k = v = torch.zeros(16, 1, 16)
    q = torch.full((1, 1, 16), torch.nan)
    table, length = torch.zeros(1, 1).int(), torch.tensor([9]).int()
    assert torch.ops.kvscope.paged_decode(q, k, v, table, length, 16, 1.0).isnan().all()
    assert torch.ops.kvscope.span_attention(q, k, v, torch.arange(9), 1.0).isnan().all()


def test_a_head_size_that_the_kernel_does_not_know_is_left_to_the_readable_path(kernels):
    singles = Singles(torch.zeros(1, 1).int(), torch.ones(1).int(), 1, 16)
    for size, known in ((8, False), (16, True), (24, False)):
        pool = torch.zeros(16, 1, size)
        answer = singles.attend(torch.zeros(1, 1, 1, size), pool, pool, 1.0, None, None, None)
        assert (answer is not None) == known


def test_nobody_attends_to_nothing(kernels):
    pool, tables = torch.zeros(32, 1, 16), torch.zeros(0, 2).int()
    nothing = torch.ops.kvscope.paged_decode(torch.zeros(0, 1, 16), pool, pool, tables, tables[:, 0], 16, 1.0)
    assert nothing.shape == (0, 1, 16)


def test_tables_that_point_out_of_the_pool_are_refused(kernels):
    pool, q = torch.zeros(32, 1, 16), torch.zeros(1, 1, 16)
    for block, length in ((2, 3), (-1, 3), (0, 17), (0, 0)):
        with pytest.raises(RuntimeError, match=r"block -?\d+ is not in the pool|tokens in 1 blocks"):
            torch.ops.kvscope.paged_decode(
                q, pool, pool, torch.tensor([[block]]).int(), torch.tensor([length]).int(), 16, 1.0
            )


# ---- in the engine -------------------------------------------------------------------------------------------------

COUNT, NEW = 16, 12


@pytest.fixture(scope="module", params=[False, True], ids=["packed", "fused"])
def case(kernels, request):
    texts = prompts(COUNT, 90, 512, shared=70)
    loaded = load_tiny()
    want = [reference(loaded, text, NEW) for text in texts]
    if request.param:
        # Two norms, MLP, attention and the whole a layer; the last norm; all but the head.
        assert fused.fuse(loaded.model) == 12
        assert pack_linears(loaded.model) == 1  # the head
    else:
        assert pack_linears(loaded.model) == 15  # seven a layer, and the head
    return loaded, texts, want


@pytest.mark.parametrize(
    "config",
    [
        {"max_running": 1},
        {"max_running": 16},
        {"chunk_size": 16, "token_budget": 64},
        {"num_blocks": 40, "block_size": 8, "chunk_size": 32},  # too small: requests are preempted
        {"block_size": 1, "num_blocks": 4096},
        {"kv_cache": False, "prefix_cache": False, "token_budget": 512},  # K and V of a step are kept nowhere
    ],
    ids=str,
)
def test_answers_are_the_models_own(case, config):
    loaded, texts, want = case
    engine = tiny_engine(loaded, native_attention=True, **config)
    requests = [engine.submit(t, SamplingParams(max_tokens=NEW, temperature=0.0), id="x")[0] for t in texts]
    said = run(engine)
    for request, expected in zip(requests, want, strict=True):
        assert_same(ids(said[request.number]), expected, str(config))


@pytest.mark.parametrize("config", [{}, {"num_blocks": 40, "block_size": 8, "chunk_size": 32}], ids=str)
def test_weights_in_bfloat16_answer_as_the_same_weights_in_float32_do(kernels, config):
    """Only K and V are rounded, and inputs where the CPU multiplies bfloat16: the widest gap between two words that may
    change places is theirs."""
    gap = 0.7 if native.multiplies_bfloat16() else 0.3  # of logits that lie within 20 of each other
    texts = prompts(8, 90, 512, shared=70)
    plain = load_tiny()
    plain.model.to(torch.bfloat16).float()
    want = [reference(plain, text, NEW) for text in texts]
    loaded = load_tiny()
    loaded.model.to(torch.bfloat16)
    loaded.dtype = torch.bfloat16
    chosen = choose(Kernels("native", "packed", "fused"), loaded)
    with chosen.widened(loaded.model):
        for got, expected in zip(reference_logits(loaded), reference_logits(plain), strict=True):
            assert (got - expected).norm() < (0.05 if native.multiplies_bfloat16() else 1e-5) * expected.norm()
    assert chosen.apply(loaded.model) == [
        "packed bfloat16 weights, fused layers, native paged attention: compiled here for this CPU"
    ]
    assert all(m.packed.dtype == torch.bfloat16 for m in loaded.model.modules() if hasattr(m, "packed"))
    engine = tiny_engine(loaded, native_attention=True, **config)
    requests = [engine.submit(t, SamplingParams(max_tokens=NEW, temperature=0.0), id="x")[0] for t in texts]
    said = run(engine)
    assert {pool.dtype for pools in engine.runner.cache.layers.values() for pool in pools} == {torch.bfloat16}
    for request, (tokens, gaps) in zip(requests, want, strict=True):
        got = ids(said[request.number])
        parted = next((i for i, (a, b) in enumerate(zip(got, tokens, strict=False)) if a != b), None)
        assert parted is None or gaps[parted] < gap, (got, tokens, gaps)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_family_passes_its_check_with_them(kernels, name, dtype):
    loaded = load_tiny(FAMILIES[name])
    loaded.model.to(dtype)
    loaded.dtype = dtype
    chosen = Chosen(True, True, False, "", half=dtype == torch.bfloat16)
    with chosen.widened(loaded.model):
        expected = reference_logits(loaded)
    packed = pack_linears(loaded.model)
    assert (packed == 0) == all(type(m) is not nn.Linear for m in load_tiny(FAMILIES[name]).model.modules())
    self_check(loaded, expected, native_attention=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_passes_its_check_with_what_can_be_fused(kernels, name):
    loaded = load_tiny(FAMILIES[name])
    expected = reference_logits(loaded)
    count = fused.fuse(loaded.model)
    pack_linears(loaded.model)
    self_check(loaded, expected, native_attention=True)
    if name.startswith(("llama", "mistral", "qwen2")):
        assert count


@pytest.mark.parametrize("kept", [0, 40, 8192])
@pytest.mark.parametrize("rope", ["default", "linear", "dynamic"])
def test_angles_are_the_models_own_whether_they_are_kept_or_not(kernels, monkeypatch, rope, kept):
    monkeypatch.setattr(fused, "POSITIONS", kept)
    config = LLAMA | {"rope_parameters": {"rope_type": rope, "rope_theta": 10_000.0, "factor": 2.0}}
    texts = prompts(4, 60, 512)
    loaded = load_tiny(config)
    want = [reference(loaded, text, NEW) for text in texts]
    assert fused.fuse(loaded.model) == 12
    assert len(loaded.model.model.cos) == (0 if rope == "dynamic" else min(kept, 512))
    engine = tiny_engine(loaded, native_attention=True)
    requests = [engine.submit(t, SamplingParams(max_tokens=NEW, temperature=0.0), id="x")[0] for t in texts]
    said = run(engine)
    for request, expected in zip(requests, want, strict=True):
        assert_same(ids(said[request.number]), expected, rope)


def test_a_model_that_does_more_than_its_layers_stays(kernels):
    loaded = load_tiny()

    class LlamaModel(type(loaded.model.model)):
        """With Granite's factor, under the name of one without."""

        def forward(self, input_ids=None, **others):
            return super().forward(inputs_embeds=12 * self.embed_tokens(input_ids), **others)

    loaded.model.model.__class__ = LlamaModel
    assert fused.fuse(loaded.model) == 11
    assert type(loaded.model.model) is LlamaModel


def test_a_module_that_only_looks_like_one_stays(kernels):
    class ShiftedRMSNorm(nn.Module):
        """Gemma's: the weight is what is added to 1."""

        def __init__(self, width: int):
            super().__init__()
            self.weight, self.variance_epsilon = nn.Parameter(torch.full((width,), 0.1)), 1e-6

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon) * (1 + self.weight)

    class GeluMLP(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
            self.down_proj = nn.Linear(2 * width, width, bias=False)

        def forward(self, x):
            return self.down_proj(nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))

    model = nn.ModuleDict({"norm": ShiftedRMSNorm(16), "mlp": GeluMLP(16)})
    assert fused.fuse(model) == 0
    assert model.mlp.down_proj.weight is not None


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 70), width=st.sampled_from([8, 24, 576]), seed=st.integers(0, 9))
def test_a_fused_norm_is_a_norm(kernels, rows, width, seed):
    torch.manual_seed(seed)
    x, weight = torch.randn(2, rows, width) * 3, torch.randn(width)
    want = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    close(torch.ops.kvscope.rms_norm(x, weight, 1e-5), want)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(0, 40), width=st.integers(1, 40), inner=st.sampled_from([8, 24, 120]), seed=st.integers(0, 9))
def test_a_fused_mlp_is_an_mlp(kernels, rows, width, inner, seed):
    torch.manual_seed(seed)
    x, gate, up, down = (torch.randn(*s) for s in ((rows, width), (inner, width), (inner, width), (width, inner)))
    pack = torch.ops.kvscope.pack
    got = torch.ops.kvscope.gated_mlp(x, pack(torch.cat([gate, up])), pack(down), inner)
    x, gate, up, down = (t.double() for t in (x, gate, up, down))
    close(got, nn.functional.silu(x @ gate.T) * (x @ up.T) @ down.T)


def test_a_slot_out_of_the_pool_is_refused(kernels):
    x, packed, angle = torch.zeros(1, 8), torch.ops.kvscope.pack(torch.zeros(48, 8)), torch.zeros(1, 16)
    for slot in (-1, 32):
        with pytest.raises(RuntimeError, match="is not in the pool"):
            k, v = torch.zeros(32, 1, 16), torch.zeros(32, 1, 16)
            torch.ops.kvscope.project(x, packed, None, angle, angle, torch.tensor([slot]), k, v)


def test_the_model_to_be_reproduced_may_name_the_arguments_of_its_layers():
    x, weight, bias = torch.randn(3, 8), torch.randn(4, 8).bfloat16(), torch.randn(4).bfloat16()
    want = nn.functional.linear(x.bfloat16().float(), weight.float(), bias.float())
    with linear.LinearInFloat32(rounded=True):
        for got in (
            nn.functional.linear(x, weight, bias),
            nn.functional.linear(x, weight=weight, bias=bias),
            nn.functional.linear(input=x, weight=weight, bias=bias),
        ):
            assert torch.equal(got, want)
    with linear.LinearInFloat32():
        assert torch.equal(nn.functional.linear(x, weight), nn.functional.linear(x, weight.float()))


def test_a_wrongly_packed_weight_is_found_before_it_serves(kernels):
    loaded = load_tiny()
    expected = reference_logits(loaded)
    pack_linears(loaded.model)
    loaded.model.model.layers[1].mlp.down_proj.packed[0, :, 0] *= 1.5
    with pytest.raises(ModelError, match="does not reproduce this model"):
        self_check(loaded, expected, native_attention=True)


def gathers(monkeypatch, config: dict, native_attention: bool) -> int:
    """Copies of K and V that answering one short prompt takes."""
    seen = []
    gather = KVCache.gather
    monkeypatch.setattr(KVCache, "gather", lambda *args: (seen.append(1), gather(*args))[1])
    engine = tiny_engine(load_tiny(config), native_attention=native_attention)
    engine.submit(list(range(5)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), id="x")
    run(engine)
    return len(seen)


def test_the_pool_is_read_in_place_where_the_kernel_knows_the_layer(kernels, monkeypatch):
    windowed = FAMILIES["mistral, sliding window"] | {"sliding_window": 8}
    assert gathers(monkeypatch, LLAMA, native_attention=False) == 7 * 2  # seven single tokens, two layers
    assert gathers(monkeypatch, LLAMA, native_attention=True) == 0
    assert gathers(monkeypatch, LLAMA | {"head_dim": 12}, native_attention=True) == 7 * 2
    assert gathers(monkeypatch, windowed, native_attention=True) == 4 * 2  # from the ninth token on


def test_a_step_of_single_tokens_is_one_operation_a_layer(kernels):
    loaded, events, whole = load_tiny(), [], []
    fused.fuse(loaded.model)
    for module in (loaded.model.model, *loaded.model.model.layers):
        module.plain.register_forward_hook(lambda *_: whole.append(1))
    engine = tiny_engine(loaded, events, native_attention=True)
    engine.submit(list(range(5)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), id="x")
    run(engine)
    assert len(whole) == 3  # the prompt's step went through transformers' model and its two layers part by part
    steps = [event for event in events if isinstance(event, Step)]
    assert len(steps) == 8 and all(0 < step.attention_s < step.forward_s for step in steps)


def test_packing_takes_the_place_of_the_plain_weights(kernels):
    model = load_tiny(LLAMA | {"tie_word_embeddings": False}).model
    plain = {name: m.weight.detach().clone() for name, m in model.named_modules() if type(m) is nn.Linear}
    floats = sum(p.numel() for p in model.parameters())
    assert pack_linears(model) == len(plain)
    assert all(type(m) is not nn.Linear for m in model.modules())
    packed = [m.packed for m in model.modules() if isinstance(m, PackedLinear)]
    assert floats == sum(p.numel() for p in [*model.parameters(), *packed])
    for name, weight in plain.items():
        assert torch.equal(model.get_submodule(name).weight, weight)
    tied = load_tiny().model
    pack_linears(tied)
    assert tied.model.embed_tokens.weight.shape == (512, 96)


# ---- built, chosen, absent -----------------------------------------------------------------------------------------


@pytest.fixture
def tiny_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"architectures": ["LlamaForCausalLM"]}))
    return tmp_path


def hello(folder, kernels: Kernels, dtype: str | None = "float32") -> Hello:
    loaded = load(str(folder), weights="random", dtype=dtype, device="cpu", say=lambda line: None)
    events: list = []
    build_engine(loaded, {"num_blocks": 8}, events.append, kernels)
    return next(e for e in events if isinstance(e, Hello))


def test_the_hello_says_what_computes(kernels, monkeypatch, tiny_folder):
    monkeypatch.setattr(kernels_module, "cpu_has_bf16", native.multiplies_bfloat16)  # as where both know it, or neither
    both = hello(tiny_folder, Kernels())
    assert both.model.notes[-1] == "packed weights, fused layers, native paged attention: compiled here for this CPU"
    neither = hello(tiny_folder, Kernels("reference", "plain"))
    assert neither.model.notes[-1] == "reference kernels: as asked for"
    assert hello(tiny_folder, Kernels("native", "plain")).model.notes[-1].startswith("native paged attention: compiled")
    packed = hello(tiny_folder, Kernels("reference", "packed", "plain"))
    assert packed.model.notes[-1].startswith("packed weights: compiled")
    assert both.model.parameters == neither.model.parameters
    assert both.model.step_weight_bytes == neither.model.step_weight_bytes
    half = hello(tiny_folder, Kernels(), "float16").model.notes[-1]
    assert half.startswith("reference kernels: the compiled kernels are for float32 and bfloat16")
    narrow = hello(tiny_folder, Kernels(), "bfloat16")
    assert narrow.model.notes[-1].startswith("packed bfloat16 weights, fused layers, native paged attention")
    assert narrow.model.kv_bytes_per_token == both.model.kv_bytes_per_token // 2
    plain = hello(tiny_folder, Kernels(linear="plain"), "bfloat16")
    assert plain.model.notes[-1].startswith("reference kernels: bfloat16 is widened to float32 in packed layers only")


def test_where_the_cpu_multiplies_bfloat16_and_they_do_not_torch_does(kernels, monkeypatch, tiny_folder):
    monkeypatch.setattr(kernels_module, "cpu_has_bf16", lambda: True)
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    said = hello(tiny_folder, Kernels(), "bfloat16").model.notes[-1]
    assert said.startswith("reference kernels: this CPU multiplies bfloat16 in a way that they do not know")
    assert hello(tiny_folder, Kernels(), "float32").model.notes[-1].startswith("packed weights")


def test_a_dtype_that_is_left_to_us_halves_the_bytes_where_the_kernels_can(kernels, monkeypatch, tiny_folder):
    monkeypatch.setattr(dtypes, "cpu_has_bf16", lambda: False)
    monkeypatch.setattr(kernels_module, "cpu_has_bf16", lambda: False)
    monkeypatch.setattr(native, "multiplies_bfloat16", lambda: False)
    said = hello(tiny_folder, Kernels(), dtype=None).model
    assert said.dtype == "bfloat16" and "computed in float32" in said.notes[0]
    assert said.kv_bytes_per_token * 2 == hello(tiny_folder, Kernels(), dtype="float32").model.kv_bytes_per_token
    for wanted in (Kernels(linear="plain"), Kernels("reference", "plain", "plain")):
        assert hello(tiny_folder, wanted, dtype=None).model.dtype == "float32"
    monkeypatch.setattr(native, "load", lambda: "no compiler was found")
    assert hello(tiny_folder, Kernels(), dtype=None).model.dtype == "float32"


def test_without_them_the_engine_serves_and_says_why(monkeypatch, tiny_folder):
    monkeypatch.setattr(native, "load", lambda: "no C++ compiler was found; `make run` builds them with g++")
    assert hello(tiny_folder, Kernels()).model.notes[-1].startswith("reference kernels: no C++ compiler was found")
    loaded = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    for wanted in (Kernels(attention="native"), Kernels(linear="packed"), Kernels(fusion="fused")):
        with pytest.raises(ConfigError, match="cannot be had: no C.. compiler was found; `make run`"):
            choose(wanted, loaded)
    with pytest.raises(ConfigError, match="attention 'fast': one of auto, native, triton, reference"):
        choose(Kernels(attention="fast"), loaded)


@pytest.fixture
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "_loaded", False)
    return tmp_path


@pytest.mark.skipif(build.sys.platform != "linux", reason="the kernels are built on Linux only")
class TestBuilding:
    def compiler(self, monkeypatch, folder, script: str) -> None:
        path = folder / "c++"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))

    def test_not_built_yet(self, empty_cache, monkeypatch):
        self.compiler(monkeypatch, empty_cache, "echo 1.0")
        assert "python -m backend.engine.native" in native.load()

    def test_no_compiler(self, empty_cache, monkeypatch, capsys):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", str(empty_cache))
        assert native.load().startswith("no C++ compiler was found; `make run`")
        assert command.main() == 1
        assert "note: no compiled CPU kernels: no C++ compiler was found" in capsys.readouterr().err

    def test_a_failing_compiler(self, empty_cache, monkeypatch):
        script = '[ "$1" = --version ] && exit; echo in file: >&2; echo fatal error: no such header >&2; exit 1'
        self.compiler(monkeypatch, empty_cache, script)
        with pytest.raises(build.BuildError, match=r"c\+\+ failed: fatal error: no such header"):
            build.build()
        assert list((empty_cache / "kvscope" / "native").iterdir()) == []

    def test_a_damaged_library(self, empty_cache, monkeypatch):
        self.compiler(monkeypatch, empty_cache, "echo 1.0")
        build.path().parent.mkdir(parents=True)
        build.path().write_bytes(b"no library")
        assert "cannot be loaded" in native.load()

    def test_another_compiler_another_library(self, empty_cache, monkeypatch):
        self.compiler(monkeypatch, empty_cache, "echo 1.0")
        first = build.path()
        assert build.path() == first
        self.compiler(monkeypatch, empty_cache, "echo 2.0")
        assert build.path() != first
