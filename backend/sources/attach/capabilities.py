"""What each picture can be drawn from at a foreign engine, and which of its flags would make it better."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import msgspec

from backend.events import View
from backend.sources.attach.profiles import profiles

KV_FLAG = '--kv-events-config \'{"enable_kv_cache_events":true,"publisher":"zmq"}\''
SGLANG_KV_FLAG = '--kv-events-config \'{"publisher":"zmq"}\''
OURS = "of an engine of our own only"
TELLS_IDS = ("vllm", "kvscope")  # know return_token_ids, or ignore it


def views(kind: str, samples: Set[str], *, kv_events: bool, api: bool) -> list[View]:
    """`samples`: names in its metrics. `kv_events`: it publishes them. `api`: its OpenAI API can be used."""
    profile = profiles().get(kind)
    title = profile.title if profile else "this server"

    def has(name: str) -> bool:
        candidates = profile.metrics.get(name, []) if profile else []
        return any(sample in samples for candidate in candidates for sample in candidate.samples)

    metrics_flag = profile.metrics_flag if profile and not samples else ""
    return [
        *_blocks(kind, title, has("kv_usage"), kv_events, metrics_flag),
        _requests(title, has("running"), api, metrics_flag),
        _roofline(kind, title, has("flops") and has("read_bytes")),
        _batching(title, has("tokens_per_step"), has("running"), metrics_flag),
        _latency(title, has("ttft") or has("e2e"), api, metrics_flag),
        _preemption(title, has("preemptions"), profile.absent.get("preemptions", "") if profile else "", metrics_flag),
        View(
            view="hardware",
            quality="none",
            why=f"sensors are read {OURS}; the page Fleet shows what a DCGM exporter there says (dcgm=ADDRESS)",
        ),
        View(view="switches", quality="none", why=f"{title} is configured where it is started"),
    ]


def with_kv(told: list[View], kv: Any) -> list[View]:
    """The same, by how its KV events are really followed. `kv`: `kv_events.KvEvents`, None: they are not."""
    state, words = (kv.state, kv.words) if kv is not None else ("off", "its KV events are not followed here")
    if state == "live":
        return told
    found = []
    for view in told:
        if view.view == "prefix_tree" and view.quality == "exact":
            view = msgspec.structs.replace(view, quality="none" if state == "off" else "derived", why=words)
        elif view.view == "block_map" and kv is not None:
            view = msgspec.structs.replace(view, why=words)
        found.append(view)
    return found


def _blocks(kind: str, title: str, usage: bool, kv_events: bool, metrics_flag: str) -> list[View]:
    flag = {"vllm": KV_FLAG, "sglang": SGLANG_KV_FLAG}.get(kind, "")
    if kv_events:
        map_why = "cached blocks, from its KV events; places are ours, and which request holds a block is not told"
        map_why += ": for ours it is inferred from their tokens" if kind in TELLS_IDS else ""
        tree_why = "every cached block and its parent, from its KV events"
        return [
            View(view="block_map", quality="derived", why=map_why),
            View(view="prefix_tree", quality="exact", why=tree_why),
        ]
    if kind == "llamacpp":
        none = "llama.cpp has a context in one piece for each slot, no blocks"
        return [View(view=view, quality="none", why=none) for view in ("block_map", "prefix_tree")]
    only = f"only how full the cache is: {title} tells nothing of single blocks" if usage else f"{title} tells nothing"
    map_view = View(view="block_map", quality="derived" if usage else "none", why=only, flag=flag or metrics_flag)
    tree = View(view="prefix_tree", quality="none", why=f"{title} publishes no KV events here", flag=flag)
    return [map_view, tree]


def _requests(title: str, gauges: bool, api: bool, flag: str) -> View:
    if gauges and api:
        why = "those sent from here one by one, as their client hears them; all others as a number"
        return View(view="requests", quality="derived", why=why)
    if api:
        why = f"only those sent from here: {title} tells nothing of others"
        return View(view="requests", quality="derived", why=why, flag=flag)
    return View(view="requests", quality="derived" if gauges else "none", why="how many there are", flag=flag)


def _roofline(kind: str, title: str, told: bool) -> View:
    if told:
        why = f"FLOPs and bytes as {title} estimates them, of whole steps; prefill and decode are not told apart"
        return View(view="roofline", quality="estimated", why=why)
    flag = "--enable-mfu-metrics" if kind == "vllm" else ""
    return View(view="roofline", quality="none", why=f"{title} exports no FLOPs and bytes", flag=flag)


def _batching(title: str, steps: bool, gauges: bool, flag: str) -> View:
    if steps:
        return View(view="batching", quality="derived", why="tokens a step, mean of each window, and how many run")
    if gauges:
        return View(view="batching", quality="inferred", why=f"how many run; {title} does not tell tokens a step")
    return View(view="batching", quality="none", why=f"{title} tells nothing of its batch", flag=flag)


def _latency(title: str, told: bool, api: bool, flag: str) -> View:
    if told:
        why = "quantiles from its histograms, with the bucket's bounds; exact for requests sent from here"
        return View(view="latency", quality="derived", why=why)
    if api:
        return View(view="latency", quality="exact", why="of requests sent from here only", flag=flag)
    return View(view="latency", quality="none", why=f"{title} exports no latencies", flag=flag)


def _preemption(title: str, told: bool, why: str, flag: str) -> View:
    if told:
        return View(view="preemption", quality="derived", why="how many there were; of which request is not told")
    return View(view="preemption", quality="none", why=why or f"{title} exports no count of them", flag=flag)
