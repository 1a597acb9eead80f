"""Everything the planner refuses, under one name, so that a page can catch exactly that."""

from __future__ import annotations


class PlannerError(ValueError):
    """The question cannot be answered; the message says why and what to change."""


class UnsupportedDtype(PlannerError):
    """The accelerator has no rate for this number format."""


class UnknownName(PlannerError):
    """No catalogue row goes by this name; the message names near ones."""


class CatalogueError(PlannerError):
    """A catalogue file breaks a rule; the message names file, row and rule."""
