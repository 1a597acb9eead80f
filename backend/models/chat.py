"""Messages to token ids, by the template that the model brings."""

from __future__ import annotations

from typing import Any

import jinja2

from backend.models.errors import ModelError, first_line


def encode_chat(tokenizer: Any, messages: list[dict[str, str]], name: str) -> list[int]:
    """Token ids of a conversation, ending where the assistant begins to speak.

    Raises ModelError when there is no template, or when the template refuses (many insist on alternating roles).
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ModelError(
            f"{name} has no chat template, so it was not trained for conversations. "
            "Send a plain prompt to /v1/completions, or load an instruct model."
        )
    try:
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except (jinja2.TemplateError, TypeError, ValueError) as error:
        raise ModelError(f"the chat template of {name} refuses these messages: {first_line(error)}") from error
    return list(ids)
