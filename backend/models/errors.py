"""The one error of this package. Apart from `loader`, so that catching it does not import torch."""

from __future__ import annotations


class ModelError(Exception):
    """A model that cannot be found, fetched, loaded or trusted. Plain words: names the thing and the fix."""


def first_line(error: BaseException, limit: int = 300) -> str:
    """The first line of an error's text that says something, for use inside a ModelError."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:limit]
