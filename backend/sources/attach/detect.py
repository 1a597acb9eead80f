"""What is at an address: which engine, which model, where its metrics are, what can be shown of it."""

from __future__ import annotations

import asyncio
from typing import Any
from urllib.parse import urlsplit

import msgspec

from backend.events import View
from backend.sources.attach import exposition, profiles
from backend.sources.attach.address import join
from backend.sources.attach.capabilities import views
from backend.sources.attach.kv_sources import Endpoint, of_sglang, of_vllm
from backend.sources.attach.target import TargetConfig, Unreachable
from backend.sources.attach.web import Answer, Web

METRICS_PATHS = ("/metrics", "/prometheus/metrics")  # the second is TensorRT-LLM's
PROBE_S = 4.8  # a person waits for it
MAX_ANSWER = 4 * 2**20
FLAGS = {"sglang": "--enable-metrics", "llamacpp": "--metrics", "trtllm": "return_perf_metrics: true"}


class Found(msgspec.Struct, kw_only=True):
    kind: str  # kvscope | vllm | sglang | trtllm | llamacpp | tgi | dynamo | openai
    title: str  # the same for the screen
    base_url: str
    version: str = ""
    model: str = ""  # "": it names none, or wants a key to say
    models: list[str] = []
    max_model_len: int = 0  # 0: not told
    chat: bool = True  # takes messages; False only where it said that its model has no chat template
    metrics_url: str = ""  # "": it has none that could be read
    capabilities: list[View] = []
    problems: list[str] = []  # what is missing, in plain words, with what would turn it on
    kv_endpoints: list[Endpoint] = []  # where it publishes KV events, one a data-parallel rank
    samples: list[str] = []  # names of the metrics


async def probe(config: TargetConfig) -> Found:
    """Raises Unreachable, with what is wrong and what to do, within five seconds."""
    web = Web(config)
    try:
        async with asyncio.timeout(PROBE_S):
            return await examine(web)
    except TimeoutError:
        raise Unreachable(f"{web.where} answers too slowly: not all was said within {PROBE_S:.0f} s") from None
    finally:
        await web.close()


async def examine(web: Web) -> Found:
    """`probe` with a connection that stays."""
    problems: list[str] = []
    metrics_url, body = await _metrics(web, problems)
    names = exposition.names(body)
    profile = profiles.recognise(names)
    version, models, infos = await _ask_around(web)
    kind = profile.kind if profile else _kind_by_api(models, infos, version)
    if not kind:
        raise Unreachable(_nobody(web, metrics_url, names, problems))
    title = profiles.profiles()[kind].title if kind in profiles.profiles() else "OpenAI-compatible server"
    if profile is None and metrics_url:
        problems.append("there are metrics, but no number in them is known here")
    if profile is None and not metrics_url and kind in FLAGS:
        problems.append(f"{title} exports no metrics: start it with {FLAGS[kind]}")
    rows = models.get("data", []) if isinstance(models, dict) else []
    named = [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
    if models == 401:
        problems.append("the API wants a key: numbers can be read, requests cannot be sent")
    first = next((row for row in rows if isinstance(row, dict)), {})
    longest = first.get("max_model_len") or (first.get("meta") or {}).get("n_ctx_train") or 0
    endpoints = await _kv_endpoints(web, kind, infos)
    return Found(
        kind=kind,
        title=title,
        base_url=web.base,
        version=_version(version, infos),
        model=named[0] if named else _model_of(infos),
        models=named,
        max_model_len=longest if isinstance(longest, int) else 0,
        chat=await _chats(web, named) if kind in ("vllm", "kvscope") else True,
        metrics_url=metrics_url if profile else "",
        capabilities=views(kind, names, kv_events=bool(endpoints), api=bool(named)),
        problems=problems,
        kv_endpoints=endpoints,
        samples=sorted(names),
    )


async def _metrics(web: Web, problems: list[str]) -> tuple[str, bytes]:
    """(URL, body) of the first place that has metrics, or ("", b""). Raises Unreachable when nothing answers."""
    own = [web.config.metrics_path] if web.config.metrics_path else list(METRICS_PATHS)
    root = web.base[: len(web.base) - len(urlsplit(web.base).path)]
    places = list(dict.fromkeys([*(join(web.base, path) for path in own), *(join(root, path) for path in own)]))
    why, page = "", False
    for place in places:
        answer = await web.get(place)
        if answer.status in (401, 403):
            raise Unreachable(_no_entry(web, answer))
        if answer.ok and not answer.is_page and exposition.is_metrics(answer.body):
            return place, answer.body
        page = page or (answer.ok and answer.is_page)
        if not why:
            why = _what(answer)
    path = urlsplit(places[0]).path
    if page:
        problems.append(f"a web page answers at {path} instead of metrics")
    else:
        problems.append(f"no metrics at {path}: {why}")
    return "", b""


async def _ask_around(web: Web) -> tuple[Any, Any, dict[str, Any]]:
    """(/version, /v1/models or 401, other answers by path); None where there is no such answer."""
    paths = ("/version", "/v1/models", "/server_info", "/get_server_info", "/props", "/info")
    version, models, *rest = await asyncio.gather(*(_json(web, path) for path in paths))
    return version, models, {path: told for path, told in zip(paths[2:], rest, strict=True) if isinstance(told, dict)}


async def _json(web: Web, path: str) -> Any:
    try:
        answer = await web.get(path, limit=MAX_ANSWER)
    except Unreachable:
        return None
    if answer.status in (401, 403):
        return 401
    if not answer.ok or answer.is_page:
        return None
    try:
        return msgspec.json.decode(answer.body)
    except msgspec.DecodeError:
        return None


async def _chats(web: Web, models: list[str]) -> bool:
    """Whether messages can be tokenized: a base model has no chat template, and says so."""
    if not models:
        return True
    try:
        answer = await web.post("/tokenize", {"model": models[0], "messages": [{"role": "user", "content": "a"}]})
    except Unreachable:
        return True
    return not (answer.status in (400, 422) and b"template" in answer.body)


def _kind_by_api(models: Any, infos: dict[str, Any], version: Any) -> str:
    """Of a server without metrics: who it says it is; "" when it speaks no API that we know."""
    owners = {str(row.get("owned_by")) for row in _rows(models)}
    if "/props" in infos and "default_generation_settings" in infos["/props"]:
        return "llamacpp"
    if "sglang" in owners or any(path in infos and "internal_states" in infos[path] for path in infos):
        return "sglang"
    if "/info" in infos and "model_id" in infos["/info"]:
        return "tgi"
    if "llamacpp" in owners:
        return "llamacpp"
    if "vllm" in owners and isinstance(version, dict):
        return "vllm"
    return "openai" if _rows(models) or models == 401 else ""


def _rows(models: Any) -> list[dict[str, Any]]:
    rows = models.get("data") if isinstance(models, dict) else None
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []


def _version(version: Any, infos: dict[str, Any]) -> str:
    if isinstance(version, dict) and isinstance(version.get("version"), str):
        return version["version"][:40]
    for path, field in (
        ("/server_info", "version"), ("/get_server_info", "version"), ("/props", "build_info"), ("/info", "version"),
    ):  # fmt: skip
        if isinstance(infos.get(path, {}).get(field), str):
            return infos[path][field][:40]
    return ""


def _model_of(infos: dict[str, Any]) -> str:
    told = infos.get("/server_info", infos.get("/get_server_info", {})).get("served_model_name")
    told = told or infos.get("/info", {}).get("model_id")
    return told if isinstance(told, str) else ""


async def _kv_endpoints(web: Web, kind: str, infos: dict[str, Any]) -> list[Endpoint]:
    if kind == "sglang":
        return of_sglang(infos.get("/server_info") or infos.get("/get_server_info"), web.base)[0]
    return of_vllm(await _json(web, "/kv_event_sources"), web.base) if kind in ("vllm", "kvscope") else []


def _no_entry(web: Web, answer: Answer) -> str:
    if web.headers:
        return f"{web.where} does not accept the key (HTTP {answer.status})"
    return f"{web.where} wants a key for its metrics (HTTP {answer.status}): give it one"


def _what(answer: Answer) -> str:
    if not answer.ok:
        return f"HTTP {answer.status}"
    if answer.body.lstrip()[:1] in (b"{", b"["):
        return "JSON is no metrics text"
    return "what answers is no metrics text" if answer.body.strip() else "the answer is empty"


def _nobody(web: Web, metrics_url: str, names: set[str], problems: list[str]) -> str:
    if metrics_url:
        some = ", ".join(sorted({name.split("_")[0].split(":")[0] for name in names})[:3])
        return f"{web.where} has metrics, but of no engine that is known here ({some} …), and no OpenAI API"
    return f"{web.where} answers, but not as an inference server: {problems[-1]}, and no models at /v1/models"
