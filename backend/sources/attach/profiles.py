"""What engines call their numbers: `assets/catalogue/foreign_metrics.json` as objects.

An engine's entry lists, for each name of ours, the series it may be read from, in order; the first that is there is
taken, because names change with versions. `extends` takes over another entry, `aliases` are other spellings of its
prefix (Ray Serve writes `ray_vllm_` and, in some versions, counters without `_total`).
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

FILE = Path(__file__).resolve().parents[3] / "assets" / "catalogue" / "foreign_metrics.json"


class Candidate(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str  # of the sample; of a histogram without _bucket
    read: Literal["gauge", "counter", "histogram", "label"] = "gauge"
    label: str = ""  # with "label": whose value is the number
    where: dict[str, list[str]] = {}  # only series with one of these values
    quality: str = "measured"
    note: str = ""

    @property
    def samples(self) -> tuple[str, ...]:
        if self.read != "histogram":
            return (self.name,)
        return tuple(f"{self.name}_{part}" for part in ("bucket", "sum", "count"))


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str = ""
    title: str
    prefix: str
    aliases: list[str] = []
    extends: str = ""
    null_blocks: int = 0  # blocks that an engine counts and never gives out
    one_rank: list[str] = []  # labels of ranks that all tell the same: only the lowest one is read
    metrics_flag: str = ""  # what makes it export metrics, where it does not by itself
    metrics: dict[str, list[Candidate]] = {}
    absent: dict[str, str] = {}  # why a number may be missing

    @property
    def samples(self) -> frozenset[str]:
        """Names of all samples that may be read."""
        return frozenset(sample for candidates in self.metrics.values() for c in candidates for sample in c.samples)

    @property
    def counters(self) -> frozenset[str]:
        """Those of them that only grow while the engine lives."""
        return frozenset(
            sample
            for candidates in self.metrics.values()
            for candidate in candidates
            if candidate.read in ("counter", "histogram")
            for sample in candidate.samples
        )


@cache
def profiles() -> dict[str, Profile]:
    """By kind. Raises msgspec.ValidationError when the file is not what this module says."""
    told = msgspec.json.decode(FILE.read_bytes(), type=dict[str, Profile])
    found: dict[str, Profile] = {}
    for kind, profile in told.items():
        metrics, absent, aliases = profile.metrics, profile.absent, profile.aliases
        if profile.extends:
            base = told[profile.extends]
            metrics, absent = base.metrics | metrics, base.absent | absent
        spelled = {name: _spelled(profile, candidates) for name, candidates in metrics.items()}
        found[kind] = msgspec.structs.replace(profile, kind=kind, metrics=spelled, absent=absent, aliases=aliases)
    return found


@cache
def nothing(kind: str, title: str) -> Profile:
    """Of a server whose metrics, if it has any, nobody mapped."""
    return Profile(kind=kind, title=title, prefix="")


def recognise(names: set[str]) -> Profile | None:
    """Whose metrics these are: the entry that knows most of them; None: nobody's. Earlier entries win a tie."""
    best, most = None, 0
    for profile in profiles().values():
        if profile.extends and not any(name.startswith(profile.prefix) for name in names):
            continue
        known = len(profile.samples & names)
        if known > most:
            best, most = profile, known
    return best


def _spelled(profile: Profile, candidates: list[Candidate]) -> list[Candidate]:
    """Each candidate under each spelling of the prefix."""
    found = list(candidates)
    for alias in profile.aliases:
        for candidate in candidates:
            name = alias + candidate.name.removeprefix(profile.prefix)
            found.append(msgspec.structs.replace(candidate, name=name))
            if candidate.read == "counter":
                found.append(msgspec.structs.replace(candidate, name=name.removesuffix("_total")))
    return found
