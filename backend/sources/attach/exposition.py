"""A body of metrics as series. The grammar is prometheus_client's; what is here keeps it cheap and unbreakable.

Only samples that somebody wants are parsed. A series' name and labels are the same text in each scrape: they are parsed
once. A line that cannot be parsed costs that line, never the scrape.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

MAX_BYTES = 8 * 2**20
MAX_SERIES = 50_000  # that are read
KEPT_UNKNOWN = 500  # names

WANTED, CREATED, UNKNOWN, IGNORED = range(1, 5)
EXEMPLAR = " # "

Labels = tuple[tuple[str, str], ...]  # sorted
Seen = tuple[int, str, Labels | None]  # what the line is for, name, labels; None: not looked at, or not to be parsed

_parsed: dict[frozenset[str], dict[str, Seen]] = {}  # by what is wanted: one a kind of engine


@dataclass(slots=True)
class Exposition:
    series: dict[str, dict[Labels, float]] = field(default_factory=dict)  # sample name -> labels -> value, no NaN
    created: dict[str, dict[Labels, float]] = field(default_factory=dict)  # the same of `…_created`: unix times
    unknown: Counter[str] = field(default_factory=Counter)  # sample name -> series that nobody wanted
    problems: list[str] = field(default_factory=list)  # plain words
    cut: bool = False  # it ended in the middle: something may be missing


class Reader:
    """Reads one server's bodies. `wanted`: sample names."""

    def __init__(self, wanted: Set[str]):
        self._wanted = wanted
        self._created = {_created(name) for name in wanted}
        # By the text of name and labels, shared by all readers that want the same: replicas tell the same series.
        self._parsed = _parsed.setdefault(frozenset(wanted), {})

    def read(self, body: bytes) -> Exposition:
        told, taken, bad, nan, doubled = Exposition(), 0, 0, 0, 0
        lines = body.decode("utf-8", "replace").split("\n")
        last = lines.pop()
        if last and not last.startswith("#"):
            told.cut = True
        known, unknown = self._parsed, told.unknown
        kinds = {WANTED: told.series, CREATED: told.created}
        for line in lines:
            if line[:1] == "#":
                continue
            end = line.rfind("}") + 1 or line.find(" ")
            seen, value = known.get(line[:end]), None
            if seen is None:
                seen, value = self._seen(line, line[:end])
                if seen is None:
                    continue
            kind, name, labels = seen
            into = kinds.get(kind)
            if into is None:
                if kind == UNKNOWN:
                    unknown[name] += 1
                continue
            taken += 1
            if taken > MAX_SERIES:
                break
            if value is None:
                value = _number(line[end:]) if labels is not None else None
                if value is None:
                    bad += 1
                    continue
            series = into.setdefault(name, {})
            if value != value:  # NaN
                nan += 1
                continue
            doubled += labels in series
            series[labels] = value
        said = told.problems
        if told.cut:
            said.append("the text ended in the middle of a line, which was left out")
        if taken > MAX_SERIES:
            said.append(f"more than {MAX_SERIES:,} series: the rest was left out")
        if bad:
            said.append(f"{bad} lines could not be read")
        if nan:
            said.append(f"{nan} series are NaN")
        if doubled:
            said.append(f"{doubled} series came twice: the last counts")
        if len(unknown) > KEPT_UNKNOWN:
            told.unknown = Counter(dict(unknown.most_common(KEPT_UNKNOWN)))
        return told

    def _seen(self, line: str, head: str) -> tuple[Seen | None, float | None]:
        """Of a line whose name and labels are new, with its value where it was looked at; None for an empty line."""
        name = _name(line)
        if not name:
            return None, None
        if name in self._wanted or name in self._created:
            kind, sample = (WANTED if name in self._wanted else CREATED), _parse(line)
            if sample is None:
                return (kind, name, None), None
            seen, value = (kind, *sample[:2]), sample[2]
        else:
            seen, value = (IGNORED if name.endswith("_created") else UNKNOWN, name, None), None
        if EXEMPLAR not in line:
            if len(self._parsed) > 2 * MAX_SERIES:  # labels that are new each time: forget the old
                self._parsed.clear()
            self._parsed[head] = seen
        return seen, value


def names(body: bytes) -> set[str]:
    """All sample names, without looking closer."""
    return {name for line in body.decode("utf-8", "replace").split("\n") if (name := _name(line))}


def is_metrics(body: bytes) -> bool:
    """Whether anything in it can be read."""
    for line in body[: 1 << 20].decode("utf-8", "replace").split("\n")[:2000]:
        if _name(line) and _parse(line) is not None:
            return True
    return body.lstrip().startswith(b"# HELP") or body.lstrip().startswith(b"# TYPE")


def _parse(line: str) -> tuple[str, Labels, float] | None:
    try:
        for family in text_string_to_metric_families(line + "\n"):
            for sample in family.samples:
                return sample.name, tuple(sorted(sample.labels.items())), float(sample.value)
    except Exception:  # the library promises nothing about what nonsense makes it raise
        pass
    return None


def _number(text: str) -> float | None:
    """What stands behind the labels: a number, and perhaps a time stamp, which is left out."""
    try:
        return float(text)
    except ValueError:
        pass
    try:
        return float(text.split(None, 1)[0])
    except (ValueError, IndexError):
        return None


def _name(line: str) -> str:
    """Of the sample in a line; "" for comments and what is none."""
    if not line or line[0] == "#":
        return ""
    end = line.find("{")
    if end < 0:
        end = line.find(" ")
        if end < 0:
            return ""
    return line[:end].strip()


def _created(name: str) -> str:
    for ending in ("_total", "_bucket", "_sum", "_count"):
        name = name.removesuffix(ending)
    return f"{name}_created"
