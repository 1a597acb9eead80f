"""Everything the planner answers to one question."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from backend.planner import cost, estimates, kvcache, napkin, prefix, queueing, speculative
from backend.planner import roofline as roof
from backend.planner import weights as weighing
from backend.planner.arch import Architecture
from backend.planner.capacity import concurrency, memory_budget, sequence_bytes
from backend.planner.results import Result, Term, count
from backend.planner.setup import Setup
from backend.planner.units import GIB


@dataclass(frozen=True, kw_only=True)
class Plan:
    setup: Setup
    running: int  # sequences in the batch that is planned: those asked for, or as many as fit
    results: dict[str, Result]
    notes: tuple[str, ...]

    def __getitem__(self, name: str) -> Result:
        return self.results[name]

    @property
    def fits(self) -> bool:
        return bool(self["concurrency"].value)

    def memory_parts(self) -> dict[str, float]:
        """Bytes of the fullest GPU by what holds them. They add up to its memory; `missing`, the part of the weights
        that has no room, comes on top."""
        budget = {term.name: term.value for term in self["memory"].terms}
        left = self["memory"].value
        missing = min(max(-left, 0.0), -budget["weights"])
        taken = min(self.running * self["kv_per_sequence_per_gpu"].value, left) if self.fits else 0.0
        return {
            "weights": -budget["weights"] - missing,
            "activations": -budget["activations"],
            "graphs and context": -budget["CUDA graphs"] - budget["other"],
            "KV of the batch": taken,
            "KV, free": max(left - taken, 0.0),
            "kept back": self.setup.accelerator.memory_bytes - budget["usable"],
            "missing": missing,
        }


def cached_prefix(setup: Setup) -> int:
    """Tokens of each prompt that come from the cache."""
    return prefix.cached_tokens(setup.prompt, setup.shared_prefix, setup.reserve.block_size).value


def room(setup: Setup) -> Result:
    """How many sequences fit at once; a shared prefix is stored once."""
    budget = memory_budget(setup.arch, setup.weights, setup.accelerator, setup.reserve, tp=setup.tp, pp=setup.pp).value
    model = kvcache.kv_model(setup.arch, setup.kv, setup.tp, setup.pp)
    shared = cached_prefix(setup)
    if not shared or any(window is not None for window, _ in model.grouped) or model.state_bytes:
        return concurrency(budget, model, setup.context, setup.reserve.block_size)
    once = sequence_bytes(model, shared, setup.reserve.block_size)
    found = concurrency(budget - once, model, setup.context - shared, setup.reserve.block_size)
    return dataclasses.replace(found, note=found.note or f"{shared:,} tokens are shared and stored once")


def decode(setup: Setup, batch: int, tokens_each: int = 1) -> Result:
    return roof.decode_step(
        setup.arch, setup.weights, setup.kv, setup.accelerator,
        batch=batch, context=setup.context, tp=setup.tp, pp=setup.pp, tokens_each=tokens_each,
    )  # fmt: skip


def decode_band(setup: Setup, batch: int) -> estimates.Band:
    measured = setup.accelerator.kind == "measured"
    return estimates.decode_band(bool(setup.arch.mixtures), batch, setup.tp, measured=measured)


def prefill_band(setup: Setup) -> estimates.Band:
    return estimates.prefill_band(measured=setup.accelerator.kind == "measured")


def speculation(setup: Setup, batch: int) -> Result:
    """Gain of a draft at this batch: the step that checks γ + 1 tokens for each may compute more than it reads."""
    plain = decode(setup, batch).value
    check = decode(setup, batch, setup.gamma + 1).value
    return speculative.speedup(setup.accept, setup.gamma, setup.draft_cost, max(1.0, check / plain))


def make(setup: Setup) -> Plan:
    """Raises PlannerError where the question has no answer at all."""
    arch, form, kv, where = setup.arch, setup.weights, setup.kv, setup.accelerator
    fit = room(setup)
    running = min(setup.batch, int(fit.value)) if fit.value else setup.batch
    notes = list(arch.notes)
    if not fit.value:
        notes.append(f"{fit.note}; speeds are those of a machine with more memory")
    elif running < setup.batch:
        notes.append(f"{setup.batch:,} at once do not fit: {running:,} run, the others wait")
    dtype, rate = roof.arithmetic(where, form)
    if dtype not in form.math[:1]:
        notes.append(f"{form.name} weights are computed in {dtype}" if rate else "no rate of arithmetic is known")
    if arch.context and setup.context > arch.context:
        notes.append(f"the model was made for {arch.context:,} tokens")

    step = decode(setup, running)
    band = decode_band(setup, running)
    ceiling = Result(
        running / step.value, "tok/s", "bound", step.terms, f"{running} / {step.value * 1e3:.4g} ms", step.note
    )
    rate_estimate = estimates.rate_estimate(ceiling, band)
    ttft = roof.prefill_time(arch, form, where, tokens=setup.prompt, cached=cached_prefix(setup), tp=setup.tp)
    ttft_estimate = estimates.time_estimate(ttft, prefill_band(setup))
    results = {
        "parameters": Result(arch.parameters, "parameters", "exact", _parts(arch)),
        "active_parameters": Result(arch.active_parameters, "parameters", "exact", formula="met by one token"),
        "checkpoint": weighing.checkpoint(arch, form),
        "weights_per_gpu": weighing.per_gpu(arch, form, setup.tp, setup.pp),
        "weights_read": weighing.step_read(arch, form, -(-running // setup.pp)),
        "kv_per_token": kvcache.per_token(arch, kv),
        "kv_per_sequence": kvcache.per_sequence(arch, kv, setup.context),
        "kv_per_sequence_per_gpu": _per_gpu(setup),
        "memory": memory_budget(arch, form, where, setup.reserve, tp=setup.tp, pp=setup.pp),
        "concurrency": fit,
        "step": step,
        "step_estimate": estimates.time_estimate(step, band),
        "ceiling": ceiling,
        "rate": rate_estimate,
        "per_user": dataclasses.replace(ceiling, value=1 / step.value, formula=f"1 / {step.value * 1e3:.4g} ms"),
        "ttft": ttft,
        "ttft_estimate": ttft_estimate,
        "decode_flops": roof.decode_flops(arch, running, setup.context),
        "prefill_flops": roof.prefill_flops(arch, setup.prompt, cached_prefix(setup)),
        "crossover": roof.crossover_batch(arch, form, kv, where, context=setup.context, tp=setup.tp),
        "cost_bound": cost.per_million(setup.usd_per_gpu_hour, setup.gpus, ceiling.value, "bound"),
        "cost": _priced(setup, rate_estimate),
        "joules": cost.joules_per_token(where, setup.gpus, rate_estimate.value),
        **_input_prices(setup, ttft_estimate),
        **_prefill_in_steps(setup, running),
    }
    if rate:
        results["ridge"] = Result(
            rate / where.bandwidth_bytes_per_s, "FLOP/B", "exact",
            formula=f"{count(rate)} FLOP/s ({dtype}) / {count(where.bandwidth_bytes_per_s)} B/s",
        )  # fmt: skip
    results["cache_equals_weights"] = _break_even(results)
    if where.pcie_bytes_per_s:
        each = results["kv_per_sequence_per_gpu"].value
        results["offload"] = napkin.transfer_time(each, where.pcie_bytes_per_s)
    if setup.tp > 1 and where.link_bytes_per_s:
        results["exchange"] = _exchange(setup, running)
    if setup.accept:
        results["speculation"] = speculation(setup, running)
    if setup.arrivals_per_s:
        results["at_work"] = queueing.fixed_point(
            setup.arrivals_per_s,
            setup.output,
            ttft_estimate.value,
            lambda many: estimates.time_estimate(decode(setup, many), decode_band(setup, many)).value,
            int(fit.value) if fit.value is not None else None,
        )
    return Plan(setup=setup, running=running, results=results, notes=tuple(notes))


def _parts(arch: Architecture) -> tuple[Term, ...]:
    return tuple(Term(part, value, "parameters") for part, value in arch.elements.items() if value)


def _per_gpu(setup: Setup) -> Result:
    model = kvcache.kv_model(setup.arch, setup.kv, setup.tp, setup.pp)
    value = sequence_bytes(model, setup.context, setup.reserve.block_size)
    logical = kvcache.kv_model(setup.arch, setup.kv).bytes(setup.context)
    copies = value * setup.gpus / logical if logical else 1.0
    note = f"the group stores {copies:.2f} × the logical cache" if copies > 1.01 else ""
    formula = f"whole blocks of {setup.reserve.block_size} tokens, on the fullest of {setup.gpus} GPUs"
    return Result(value, "B", "exact", formula=formula, note=note)


def _priced(setup: Setup, rate: Result) -> Result:
    """Output tokens alone: what the GPUs cost while they decode."""
    found = cost.per_million(setup.usd_per_gpu_hour, setup.gpus, rate.value)
    low = cost.per_million(setup.usd_per_gpu_hour, setup.gpus, rate.high).value
    high = cost.per_million(setup.usd_per_gpu_hour, setup.gpus, rate.low).value
    return dataclasses.replace(found, low=low, high=high, note="output tokens, decode only")


def _input_prices(setup: Setup, ttft: Result) -> dict[str, Result]:
    """Input tokens by the time of a prompt; a cached one costs what reading it, and attending to it, takes."""
    per_s = setup.usd_per_gpu_hour * setup.gpus / 3600
    arch, form, where, tp = setup.arch, setup.weights, setup.accelerator, setup.tp
    band = prefill_band(setup)
    whole = estimates.time_estimate(roof.prefill_time(arch, form, where, tokens=setup.prompt, tp=tp), band).value
    old = setup.prompt - max(1, setup.prompt // 10)
    new = setup.prompt - old
    _, rate = roof.arithmetic(where, form)
    pairs = roof.attention_flops(arch, new, old) - roof.attention_flops(arch, new)
    attend_s = pairs / tp / rate if rate else 0.0
    read_s = kvcache.kv_model(arch, setup.kv, tp).kv_bytes(old) / where.bandwidth_bytes_per_s
    added = band.median * max(attend_s, read_s)
    plain_formula = f"{per_s:.4g} $/s × {whole:.4g} s / {setup.prompt:,} × 1e6"
    cached_formula = f"{per_s:.4g} $/s × {added:.4g} s that {old:,} cached tokens add / {old:,} × 1e6"
    return {
        "cost_input": Result(per_s * whole / setup.prompt * 1e6, "$/M tokens", "estimate", formula=plain_formula),
        "cost_cached": Result(
            per_s * added / old * 1e6 if old else None, "$/M tokens", "estimate", formula=cached_formula
        ),
    }


def _prefill_in_steps(setup: Setup, running: int) -> dict[str, Result]:
    """A prompt in chunks beside `running` decodes: their ITL meanwhile, and the prompt's TTFT."""
    chunk = min(setup.chunk, setup.prompt)
    steps = prefix.chunks(setup.prompt, chunk)
    plain = decode(setup, running)
    whole = roof.prefill_time(setup.arch, setup.weights, setup.accelerator, tokens=chunk, tp=setup.tp)
    memory = plain.terms[0].value + plain.terms[1].value
    arithmetic = plain.terms[2].value + whole.terms[2].value
    step = Result(
        max(memory, arithmetic),
        "s",
        "bound",
        (Term("weights and KV", memory, "s"), Term("arithmetic", arithmetic, "s")),
        f"max of both: {chunk:,} prompt tokens beside {running:,} decodes",
    )
    ttft = Result(
        steps * step.value, "s", "bound", formula=f"{steps} steps × {step.value * 1e3:.4g} ms",
        note=f"weights are read {steps} times, {prefix.reread_kv_tokens(setup.prompt, chunk):,} cached tokens again",
    )  # fmt: skip
    return {"chunked_step": step, "chunked_ttft": ttft}


def _break_even(results: dict[str, Result]) -> Result:
    weights, each = results["weights_read"].value, results["kv_per_token"].value
    if not each:
        return Result(None, "tokens", "exact", note="its cache does not grow with the context")
    return napkin.cache_equals_weights(weights, each)


def _exchange(setup: Setup, running: int) -> Result:
    return napkin.all_reduce_time(
        layers=len(setup.arch.layers), hidden=setup.arch.hidden, tokens=running, gpus=setup.tp,
        bytes_per_s=setup.accelerator.link_bytes_per_s, latency_s=8e-6,
    )  # fmt: skip


def unusable(setup: Setup) -> str:
    """Why nothing runs here, "" where something does: for tables that must stay short."""
    budget = memory_budget(setup.arch, setup.weights, setup.accelerator, setup.reserve, tp=setup.tp, pp=setup.pp)
    if budget.value < 0:
        return f"{-budget.value / GIB:,.1f} GiB too large"
    return "" if room(setup).value else "no sequence fits"
