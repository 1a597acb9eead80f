"""Two servers, the same load: the same arrivals, lengths and prompts, to one after the other, so that neither takes the
machine from the other. What `load` measures of one server, side by side."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import replace

import pandas as pd

from backend.experiments import Experiment, ExperimentError, Partial, Progress, Result
from backend.experiments.load import Server, Settings, sweep
from backend.workload.arrivals import LoadError
from backend.workload.target import find

NAME = "compare"
SIDE_BY_SIDE = (
    "achieved_rate_per_s",
    "output_tokens_per_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "tpot_p50_s",
    "tpot_p95_s",
    "e2e_p50_s",
    "e2e_p95_s",
)
RULE = (
    "Both were asked the same words at the same times, one server after the other. Tokens are as each server counts "
    "them: with other models or tokenizers the same words are not the same work."
)


def compare(servers: Sequence[tuple[str, Server]], settings: Settings) -> Experiment:
    """`table`: one row a server and rate, the server's name as `source`. `tables["ratio"]`: second ÷ first."""
    if len({name for name, _ in servers}) != len(servers):
        raise ExperimentError("two servers of one name could not be told apart")
    salt = secrets.token_hex(8)  # the same prompts, which neither has seen before
    found: list[Result] = []
    for place, (name, server) in enumerate(servers):
        yield Progress(place, len(servers), None, f"asking {name} for its model")
        try:
            target = find(server.url, headers=server.headers, model=server.model, extra=settings.extra)
        except LoadError as error:
            raise ExperimentError(f"{name}: {error}") from None
        run = sweep(target, settings, salt=salt)
        try:
            while True:
                try:
                    report = next(run)
                except StopIteration as end:
                    found.append(_named(name, end.value))
                    break
                if isinstance(report, Partial):
                    yield Partial(joined([*found, _named(name, report.result)], settings, complete=False))
                else:
                    share = place + report.share
                    yield Progress(share, len(servers), report.left_s, f"{name}: {report.note}")
        finally:
            run.close()
    return joined(found, settings, complete=True)


def _named(name: str, result: Result) -> Result:
    return replace(result, table=result.table.assign(source=name) if len(result.table) else result.table)


def joined(found: Sequence[Result], settings: Settings, *, complete: bool) -> Result:
    tables = [result.table for result in found if len(result.table)]
    table = pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()
    notes = [RULE]
    for result in found:
        if len(result.table) and (first := result.notes[:1]) and first[0].startswith("Ended"):
            notes.append(f"{result.table['source'].iloc[0]}: {first[0]}")
    machine = {
        f"{result.table['source'].iloc[0]}": f"{result.machine['model']} at {result.machine['url']}"
        for result in found
        if len(result.table)
    }
    return Result(
        NAME, table, [], notes, {"ratio": ratio(table)}, settings.as_dict(), machine, complete=complete
    )  # fmt: skip


def ratio(table: pd.DataFrame) -> pd.DataFrame:
    """One row a rate that both were asked at: each measure of both, and second ÷ first."""
    if table.empty or table["source"].nunique() != 2:
        return pd.DataFrame()
    first, second = table["source"].unique()
    rows = []
    for rate, both in table.groupby("offered_rate_per_s"):
        if len(both) != 2:
            continue
        one, two = (both[both["source"] == name].iloc[0] for name in (first, second))
        for measure in SIDE_BY_SIDE:
            a, b = one[measure], two[measure]
            known = pd.notna(a) and pd.notna(b) and a
            rows.append(
                {
                    "offered_rate_per_s": rate,
                    "measure": measure,
                    first: a,
                    second: b,
                    f"{second} ÷ {first}": b / a if known else None,
                }
            )
    return pd.DataFrame(rows)
