"""Finding out how to speak to a server, before any load is made."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from backend.sources.follow import reason
from backend.workload.arrivals import LoadError
from backend.workload.job import Endpoint, Target
from backend.workload.stream import Chunk
from backend.workload.words import WORDS

ANSWER_S = 60.0  # a first request may wait for others
CONNECT_S = 5.0
ROOM = 600  # tokens that counting our whole vocabulary may take


def address(url: str) -> str:
    """`url` without a slash or /v1 at its end. Raises LoadError."""
    url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and httpx.URL(url).host
    except (ValueError, httpx.InvalidURL):
        known = False
    if not known:
        raise LoadError(f"'{url[:80]}' is no address of a server: it must be like http://host:port")
    if parts.username or parts.password:
        raise LoadError("an address with a password would end up in logs and exports: give the key apart")
    return url


def find(
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    model: str = "",
    endpoint: Endpoint | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Target:
    """Asks for the models, then two questions: does it stream, does it count, what is a word worth?

    Raises LoadError, with what to do.
    """
    url = address(url)
    limits = httpx.Timeout(ANSWER_S, connect=CONNECT_S)
    try:
        with httpx.Client(timeout=limits, headers=dict(headers or {}), trust_env=False) as http:
            model, max_model_len = _model(http, url, model)
            target = Target(
                url=url,
                model=model,
                endpoint=endpoint or "completions",
                headers=dict(headers or {}),
                max_model_len=max_model_len,
            )
            if endpoint is None and _post(http, target, WORDS[:1], extra).status_code == 404:
                target = msgspec.structs.replace(target, endpoint="chat")
            return _measured(http, target, extra)
    except httpx.HTTPError as error:
        raise LoadError(
            f"cannot reach {url}: {str(error) or type(error).__name__}. Is the server running, and is this its port?"
        ) from None


def check_room(target: Target, pairs: list[tuple[int, int]]) -> None:
    """Raises LoadError when a request of this load can never fit the model's context."""
    longest = max(input_tokens + output_tokens for input_tokens, output_tokens in pairs)
    if target.max_model_len is not None and longest > target.max_model_len:
        raise LoadError(
            f"the longest request has {longest:,} tokens, prompt and answer together; {target.model} takes "
            f"{target.max_model_len:,}. Make prompts or answers shorter."
        )


def _model(http: httpx.Client, url: str, wanted: str) -> tuple[str, int | None]:
    response = http.get(f"{url}/v1/models")
    if response.status_code in (401, 403):
        raise LoadError(f"{url} does not let us in: {reason(response.status_code, response.content)}. Give its key.")
    if response.status_code == 503:
        raise LoadError(f"{url} is not ready: {reason(503, response.content)}")
    try:
        known = {str(card["id"]): card.get("max_model_len") for card in response.json()["data"]}
    except (ValueError, KeyError, TypeError, AttributeError):
        known = {}
    if not response.is_success or not known:
        if wanted:
            return wanted, None
        raise LoadError(f"{url}/v1/models does not tell a model: is this an OpenAI-compatible server? Name a model.")
    if wanted and wanted not in known:
        raise LoadError(f"{url} does not serve '{wanted[:80]}'; it serves {', '.join(list(known)[:5])}")
    chosen = wanted or next(iter(known))
    length = known[chosen]
    return chosen, length if isinstance(length, int) else None


def _post(http: httpx.Client, target: Target, words: Sequence[str], extra: Mapping[str, Any] | None) -> httpx.Response:
    prompt = " ".join(words)
    said = {"messages": [{"role": "user", "content": prompt}]} if target.endpoint == "chat" else {"prompt": prompt}
    wanted = {"model": target.model, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    return http.post(target.url + target.path, json={**said, **wanted, **(extra or {})})


def _measured(http: httpx.Client, target: Target, extra: Mapping[str, Any] | None) -> Target:
    """One word, then all that we use: the difference is free of what the server puts around a prompt."""
    counted = []
    every = WORDS[:: math.ceil(ROOM / target.max_model_len) if target.max_model_len else 1]
    for words in (every[:1], every):
        response = _post(http, target, words, extra)
        if response.status_code != 200:
            raise LoadError(
                f"{target.url} does not take a request like ours: {reason(response.status_code, response.content)}"
            )
        if not response.headers.get("content-type", "").startswith("text/event-stream"):
            raise LoadError(f"{target.url} does not stream its answers; without streams there is no time of a token")
        counted.append(_prompt_tokens(response.content))
    one, all_of_them = counted
    if one is None or all_of_them is None or all_of_them <= one:
        note = "the server reports no usage: pieces of the stream are counted as tokens, a word as 1.1 tokens"
        return msgspec.structs.replace(target, tokens_per_word=1.1, counts_tokens=False, notes=(note,))
    per_word = (all_of_them - one) / (len(every) - 1)
    return msgspec.structs.replace(target, tokens_per_word=per_word, overhead_tokens=max(0, round(one - per_word)))


def _prompt_tokens(stream: bytes) -> int | None:
    for line in stream.splitlines():
        if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
            try:
                chunk = msgspec.json.decode(line[5:], type=Chunk)
            except msgspec.DecodeError:
                continue
            if chunk.usage is not None and chunk.usage.prompt_tokens:
                return chunk.usage.prompt_tokens
    return None
