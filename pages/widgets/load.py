"""The load page: choose a load, run it in the background, see where it becomes too much."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from backend.experiments import ExperimentError, Number, Result, imports, load
from backend.experiments.job import Job
from backend.experiments.latency import METRICS, Slo, goodput
from backend.experiments.load_run import NAME, knee_of
from backend.workload.arrivals import LoadError
from pages.widgets import load_charts, load_compare, load_form, load_little, modelled, progress, service
from pages.widgets.format import duration, figures, plain, seconds
from pages.widgets.theme import tokens

SLOS = {"ttft": "ttft_s", "tpot": "tpot_s", "e2e": "e2e_s"}


def show() -> None:
    st.subheader("Load: how much can it accept?", anchor=False)
    server = settings = None
    problem = ""
    try:
        server, settings = load_form.show()
        plan = settings.plan()
    except (ExperimentError, LoadError) as error:
        problem = str(error)
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small", key="load_run"):
        slo = load_form.slo()
        _buttons(server, settings, problem)
        imported = _imports()
    if problem:
        st.caption(f":material/info: {plain(problem)}")
    else:
        count, lasts_s = sum(count for _, count in plan), sum(count / rate for rate, count in plan)
        what = f"{count:,} real requests to {server.url} over {duration(lasts_s, 1)}"
        foreign = ":material/warning: Real load for a server that is not ours. " if service.get().attached else ""
        st.caption(foreign + plain(f"Sends {what}; ends early when it is too much."))
    _progress()
    job = service.get().lab.last(NAME)
    if job is not None:
        _outcome(job)
    _pictures(job, slo, imported)
    load_compare.show(server, None if problem else settings)


def _buttons(server: load.Server | None, settings: load.Settings | None, problem: str) -> None:
    running = service.get().lab.running
    if running is not None:
        st.button("Stop", key="load_stop", icon=":material/stop:", on_click=running.stop)
        return
    st.button(
        "Run",
        key="load_start",
        icon=":material/play_arrow:",
        disabled=bool(problem),
        help="Requests go out when they are due, whether or not the ones before were answered (an open loop).",
        on_click=_start,
        args=(server, settings),
    )


def _start(server: load.Server, settings: load.Settings) -> None:
    try:
        service.get().lab.start(NAME, load.drive(server, settings))
    except ExperimentError as error:
        st.toast(plain(str(error)), icon=":material/error:", duration="long")


def _imports() -> list[imports.Imported]:
    """Results of other tools, to be shown beside ours."""
    with st.popover("Import results", icon=":material/upload_file:", type="tertiary", width=180):
        files = st.file_uploader(
            "JSON of vllm bench serve, guidellm or aiperf", type=["json"], accept_multiple_files=True,
            key="load_imports", max_upload_size=64,
        )  # fmt: skip
        found = []
        for file in files:
            try:
                found.append(imports.read(file.getvalue(), file.name))
            except ExperimentError as error:
                st.error(plain(str(error)), icon=":material/error:")
    return found


def _progress() -> None:
    job = service.get().lab.running
    if job is None:
        return

    def numbers() -> None:
        if job.name == NAME and job.result is not None:
            _numbers(job.result)

    progress.bar(job, lambda job: progress.words(job, 1), numbers)


def _outcome(job: Job) -> None:
    kept = "What was measured until then is below." if job.result is not None else "Nothing was measured yet."
    if job.state == "failed":
        st.error(plain(f"{job.error}. {kept}"), title="It could not go on", icon=":material/error:")
    elif job.state == "stopped":
        st.info(kept, title="Stopped", icon=":material/stop_circle:")
    if job.running or job.result is None or job.result.table.empty:
        return
    if job.state == "done" and job.result.notes[0].startswith("Ended"):
        st.warning(plain(job.result.notes[0]), icon=":material/speed:")
    _numbers(job.result)


def _numbers(result: Result) -> None:
    modelled.stamp(result)
    with st.container(horizontal=True, gap="small", key="load_numbers"):
        for number in result.numbers:
            _number(number)


def _number(number: Number) -> None:
    missing = number.value is None or pd.isna(number.value)
    value = (
        "–" if missing else seconds(number.value) if number.unit == "s" else f"{figures(number.value)} {number.unit}"
    )
    st.metric(
        number.name, value, help=plain(f"{number.evidence}: {number.source}"), border=True,
        delta=(number.beside or "not reached") if missing else number.conditions, delta_color="off", delta_arrow="off",
    )  # fmt: skip


def _pictures(job: Job | None, slo: Slo, imported: list[imports.Imported]) -> None:
    result = job.result if job is not None and job.result is not None and not job.result.table.empty else None
    colours = tokens()["dark" if st.context.theme.type == "dark" else "light"]
    if job is not None and job.running:
        st.caption("The pictures are drawn when the run ends.")
        return
    ours = result.table if result else pd.DataFrame()
    table = pd.concat([ours, *(one.table for one in imported)], ignore_index=True) if imported else ours
    if len(table):
        _curves(result, table, imported, slo, colours)
    else:
        st.caption("Run a load, or import results: latency, goodput, distributions and the queue are drawn here.")
    rate = _one_rate(result, colours) if result else None
    law = _of(result, "little", rate) if result else pd.DataFrame()
    row = next((row for row in ours.to_dict("records") if row["offered_rate_per_s"] == rate), None)
    load_little.show(row, law, colours)
    if result:
        with st.expander("Rules and conditions", icon=":material/rule:", type="compact"):
            for note in [*result.notes, _conditions(result)]:
                st.caption(plain(note))


def _curves(
    result: Result | None, table: pd.DataFrame, imported: list[imports.Imported], slo: Slo, colours: dict[str, str]
) -> None:
    metric = st.segmented_control(
        "Latency", METRICS, default="ttft", required=True, key="load_metric", format_func=str.upper,
        bind="query-params",
        label_visibility="collapsed",
    )  # fmt: skip
    limit = getattr(slo, SLOS[metric]) if metric in SLOS else None
    knee = knee_of(result.table) if result else None
    good = goodput(result.table, result.tables["requests"], slo) if result else pd.DataFrame()
    left, middle, right = st.columns(3, gap="small")
    with left:
        st.markdown(f"**{metric.upper()} against achieved rate**")
        _chart(load_charts.latency(table, metric, knee, limit, colours), "latency", f"{metric.upper()} by rate")
    with middle:
        st.markdown(f"**{metric.upper()}, all samples (CDF)**")
        samples = _samples(result, imported, metric)
        if samples:
            _chart(
                load_charts.distribution(samples, metric, limit, colours), "cdf", f"Distribution of {metric.upper()}"
            )
        else:
            st.caption("The imported files hold no single samples of this.")
    with right:
        st.markdown("**Goodput: answers that kept every SLO**" if slo.given else "**Goodput: no SLO given, all count**")
        if len(good):
            _chart(load_charts.goodput(good, colours), "goodput", "Goodput by offered rate")
        else:
            st.caption("Goodput is counted from single requests, which only a run of this page has.")
    if len(good):
        columns = ["offered_rate_per_s", "goodput_per_s", "good_share"]
        table = table.merge(good[columns], on="offered_rate_per_s", how="left")
        table.loc[table["source"] != "this client", columns[1:]] = None
    box = st.expander("Table: the sweep", icon=":material/table:", type="compact", on_change="rerun", key="load_sweep")
    if box.open:
        box.dataframe(table, hide_index=True, height=240, alt="One row a rate")
    with st.container(horizontal=True, gap="small"):
        _download("Sweep as CSV", table, "load-sweep.csv")
        if result:
            _download("Requests as CSV", result.tables["requests"], "load-requests.csv")


def _one_rate(result: Result, colours: dict[str, str]) -> float:
    rates = list(result.table["offered_rate_per_s"])
    rate = st.segmented_control(
        "One rate over time (requests/s)", rates, default=rates[-1], required=True, key=f"load_rate_{len(rates)}",
        format_func=lambda rate: f"{rate:.3g}",
    )  # fmt: skip
    looks = _of(result, "queue", rate)
    if len(looks):
        _chart(load_charts.queue(looks, colours), "queue", "Requests in flight over time")
        if looks["server_waiting"].isna().all():
            st.caption("The server's own queue is not shown: its /metrics has no vllm: or sglang: gauges of it.")
        box = st.expander("Table: queue", icon=":material/table:", type="compact", on_change="rerun", key="load_queue")
        if box.open:
            box.dataframe(looks, hide_index=True, height=240, alt="Requests in flight over time")
    return rate


def _samples(result: Result | None, imported: list[imports.Imported], metric: str) -> dict[str, list[float]]:
    found = {}
    if result:
        table = result.tables["gaps" if metric == "itl" else "requests"]
        good = table if metric == "itl" else table[table["state"] == "ok"]
        for rate, rows in good.groupby("offered_rate_per_s"):
            found[f"{rate:.3g} req/s"] = rows[f"{metric}_s"].dropna().tolist()
    for one in imported:
        for place, samples in enumerate(one.samples):
            if samples.get(metric):
                found[f"{one.table['source'].iloc[place]}"] = samples[metric]
    return {name: values for name, values in found.items() if values}


def _of(result: Result, name: str, rate: float | None) -> pd.DataFrame:
    table = result.tables[name]
    return table[table["offered_rate_per_s"] == rate] if "offered_rate_per_s" in table else table


def _chart(figure, key: str, alt: str) -> None:
    st.plotly_chart(
        figure, key=f"load_chart_{key}", config={"displaylogo": False}, alt=f"{alt}: the table has its numbers"
    )


def _download(label: str, table: pd.DataFrame, name: str) -> None:
    st.download_button(
        label, lambda: table.to_csv(index=False), name, "text/csv", key=f"download_{name}", on_click="ignore",
        icon=":material/download:", type="tertiary",
    )  # fmt: skip


def _conditions(result: Result) -> str:
    machine, settings = result.machine, result.settings
    said = {name: value for name, value in settings.items() if name not in ("extra", "trace") or value}
    return f"{machine['model']} at {machine['url']}{machine['endpoint']}; client on {machine['client']}; " + ", ".join(
        f"{name.replace('_', ' ')} {value}" for name, value in said.items()
    )
