"""From the bytes of a body to a checked request. Whatever is wrong is a 400 that names the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from backend.server import schema
from backend.server.errors import ApiError, bad_request
from backend.server.schema import MAX_SEQUENCES, Chat, Completion, Detokenize, Tokenize

Asked = TypeVar("Asked", Completion, Chat, Tokenize, Detokenize)
Neutral = dict[str, tuple[Any, ...]]  # option -> the values that ask for nothing

# Options that this engine does not have, with the values that ask for nothing. null always asks for nothing.
_UNSUPPORTED: Neutral = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "logits_processors": ([],),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "lora_request": (),
    "kv_transfer_params": (),
    "prompt_embeds": (),
    "stream_interval": (1,),
}
_UNSUPPORTED_COMPLETION = _UNSUPPORTED | {"suffix": ("",), "top_logprobs": (), "messages": ()}
_UNSUPPORTED_CHAT = _UNSUPPORTED | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "echo": (False,),
    "best_of": (1,),
    "prompt": (),
    "add_special_tokens": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "mm_processor_kwargs": ({},),
}
_UNSUPPORTED_TOKENIZE: Neutral = {
    name: _UNSUPPORTED_CHAT[name]
    for name in ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")
}
_UNSUPPORTED_MESSAGE: Neutral = {
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "audio": (),
    "prefix": (False,),
}

_AT = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


def completion(body: bytes) -> tuple[Completion, list[str]]:
    """The request, and the names of fields that are unknown here and therefore ignored."""
    _, asked, ignored = _parse(body, Completion, _UNSUPPORTED_COMPLETION)
    _check_generate(asked)
    if asked.prompt is None:
        raise bad_request("prompt is missing", "prompt")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise bad_request(f"best_of must equal n ({asked.n or 1})", "best_of", "unsupported_parameter")
    if asked.echo and asked.logprobs is not None:
        raise bad_request("logprobs of an echoed prompt are not supported", "logprobs", "unsupported_parameter")
    return asked, ignored


def chat(body: bytes) -> tuple[Chat, list[str]]:
    raw, asked, ignored = _parse(body, Chat, _UNSUPPORTED_CHAT)
    _check_generate(asked)
    if asked.top_logprobs is not None and not asked.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    return asked, ignored + _check_messages(raw["messages"])


def tokenize(body: bytes) -> tuple[Tokenize, list[str]]:
    raw, asked, ignored = _parse(body, Tokenize, _UNSUPPORTED_TOKENIZE)
    if (asked.prompt is None) == (asked.messages is None):
        raise bad_request("send either prompt or messages", "prompt")
    return asked, ignored + (_check_messages(raw["messages"]) if asked.messages is not None else [])


def detokenize(body: bytes) -> tuple[Detokenize, list[str]]:
    _, asked, ignored = _parse(body, Detokenize, {})
    return asked, ignored


def split_prompts(prompt: Any, max_model_len: int) -> list[str] | list[list[int]]:
    """The four forms of `prompt` as a list of prompts. Raises ApiError (400) that names the item."""
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise bad_request(
            "prompt must be a string, a list of strings, a list of token ids, or a list of those", "prompt"
        )
    if not prompt:
        raise bad_request("prompt is empty", "prompt")
    if type(prompt[0]) is int:
        return [_token_ids(prompt, "prompt", max_model_len)]
    if len(prompt) > MAX_SEQUENCES:
        raise bad_request(f"{len(prompt)} prompts in one request; at most {MAX_SEQUENCES}", "prompt")
    for i, item in enumerate(prompt):
        if type(item) is not type(prompt[0]) or not isinstance(item, str | list):
            raise bad_request(f"prompt[{i}] must be a string or a list of token ids, as its neighbours", f"prompt[{i}]")
    if isinstance(prompt[0], list):
        return [_token_ids(item, f"prompt[{i}]", max_model_len) for i, item in enumerate(prompt)]
    return prompt


def _token_ids(items: list[Any], where: str, max_model_len: int) -> list[int]:
    if not items:
        raise bad_request(f"{where} is empty", where)
    if len(items) > max_model_len:
        message = f"{where} has {len(items)} tokens; the context has {max_model_len}"
        raise bad_request(message, where, "context_length_exceeded")
    for i, item in enumerate(items):
        if type(item) is not int or item < 0:
            raise bad_request(f"{where}[{i}] must be a token id, an integer of at least 0", f"{where}[{i}]")
    return items


def decode_object(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError (400) for anything else, never another exception."""
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise bad_request(f"the body must be a JSON object: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise bad_request(f"the body is not valid JSON: {error}", code="invalid_json") from None
    except RecursionError:
        raise bad_request("the body is nested too deeply", code="invalid_json") from None


def _parse(body: bytes, kind: type[Asked], unsupported: Neutral) -> tuple[dict[str, Any], Asked, list[str]]:
    raw = decode_object(body)
    _refuse(raw, unsupported)
    asked = _convert(raw, kind)
    ignored = _unknown(raw, kind, unsupported)
    if isinstance(raw.get("stream_options"), dict):
        ignored += [f"stream_options.{name}" for name in _unknown(raw["stream_options"], schema.StreamOptions)]
    return raw, asked, ignored


def _convert(raw: dict[str, Any], kind: type[Asked]) -> Asked:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        message = str(error)
    if place := _AT.search(message):
        raise bad_request(f"{place[1]}: {message[: place.start()]}", place[1])
    missing = _MISSING.search(message)
    raise bad_request(message, missing[1] if missing else None)


def _refuse(raw: dict[str, Any], unsupported: Neutral, where: str = "") -> None:
    """Raises ApiError (400) for an option that would have to act and cannot."""
    for name, neutral in unsupported.items():
        value = raw.get(name)
        if value is None or any(value == v and isinstance(value, bool) == isinstance(v, bool) for v in neutral):
            continue
        only = f"; only {' or '.join(msgspec.json.encode(v).decode() for v in neutral)} is accepted" if neutral else ""
        message = f"{where}{name} is not supported by this server{only}"
        raise ApiError(400, message, param=where + name, code="unsupported_parameter")


def _unknown(raw: dict[str, Any], kind: type, unsupported: Neutral | None = None) -> list[str]:
    return [name for name in raw if name not in kind.__struct_fields__ and name not in (unsupported or {})]


def _check_generate(asked: schema.Generate) -> None:
    if asked.stream_options is not None and not asked.stream:
        raise bad_request("stream_options needs stream: true", "stream_options")
    if asked.max_tokens and asked.max_completion_tokens and asked.max_tokens != asked.max_completion_tokens:
        raise bad_request("max_tokens and max_completion_tokens disagree: send one", "max_completion_tokens")


def _check_messages(messages: list[dict[str, Any]]) -> list[str]:
    """The names of unknown fields in messages that have the right types already."""
    ignored: dict[str, None] = {}
    for i, message in enumerate(messages):
        _refuse(message, _UNSUPPORTED_MESSAGE, f"messages[{i}].")
        content = message.get("content")
        if content is None and message["role"] != "assistant":
            raise bad_request(f"messages[{i}].content is missing", f"messages[{i}].content")
        ignored |= {f"messages[].{name}": None for name in _unknown(message, schema.Message, _UNSUPPORTED_MESSAGE)}
        for part in content if isinstance(content, list) else []:
            ignored |= {f"messages[].content[].{name}": None for name in _unknown(part, schema.Part)}
    return list(ignored)
