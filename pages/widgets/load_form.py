"""What load to make, and where it goes."""

from __future__ import annotations

import streamlit as st

from backend.experiments import ExperimentError, load
from backend.experiments.latency import Slo
from backend.sources.remote import EngineError
from backend.workload import trace
from backend.workload.arrivals import Arrivals, LoadError
from backend.workload.lengths import Lengths
from backend.workload.target import address
from pages.widgets import modelled, service

HERE, ELSEWHERE = "This engine", "Another server"  # this: the one that the pages show, attached or our own
TRACE = "trace file"
ARRIVALS = {
    Arrivals.poisson: "Independent arrivals: gaps are exponential.",
    Arrivals.constant: "A metronome.",
    Arrivals.bursty: "Gamma-distributed gaps of shape 0.25: crowds and pauses.",
    TRACE: "Arrival times and lengths from a file.",
}
LENGTHS = {
    Lengths.fixed: "All the same.",
    Lengths.uniform: "From one token to twice as long, so that these are the means.",
    Lengths.sharegpt: "First questions and answers of ShareGPT conversations (means 238 and 217 tokens), cut at these.",
}


def show() -> tuple[load.Server, load.Settings]:
    """The widgets, in two rows. Raises ExperimentError for what cannot be run, in words."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small", key="load_target"):
        kind = st.segmented_control(
            "Target", [HERE, ELSEWHERE], default=HERE, required=True, key="load_kind", persist_state="session",
            help="Any server that speaks OpenAI's API and streams.",
        )  # fmt: skip
        elsewhere = _elsewhere() if kind == ELSEWHERE else None
        how = st.selectbox(
            "Arrivals", list(ARRIVALS), key="load_arrivals", width=125, persist_state="session",
            help=" ".join(f"{name}: {what}" for name, what in ARRIVALS.items()),
        )  # fmt: skip
        if how == TRACE:
            playing = _trace()
        else:
            rates = st.text_input(
                "Rates (requests/s)", "1, 2, 4, 8, 16", key="load_rates", width=165, persist_state="session",
                help="One run each, lowest first, until it is too much.",
            )  # fmt: skip
            requests = st.number_input(
                "Requests a rate", 10, 20_000, 40, key="load_requests", width=125, persist_state="session",
                help="More at rates at which these would all come within 15 s. Little's law wants 200.",
            )  # fmt: skip
            lengths = st.selectbox(
                "Lengths", list(LENGTHS), key="load_lengths", width=110, persist_state="session",
                help=" ".join(f"{name}: {what}" for name, what in LENGTHS.items()),
            )  # fmt: skip
            most = "At most." if lengths is Lengths.sharegpt else None
            prompt = st.number_input(
                "Prompt tokens", 1, 131_072, 64, key="load_input", width=120, persist_state="session", help=most
            )
            answer = st.number_input(
                "Answer tokens", 1, 131_072, 32, key="load_output", width=120, persist_state="session", help=most
            )
    server = elsewhere or _here()
    if how == TRACE:
        return server, load.Settings(trace=playing)
    settings = load.Settings(
        rates=_rates(rates),
        requests=int(requests),
        arrivals=how,
        lengths=lengths,
        input_tokens=int(prompt),
        output_tokens=int(answer),
    )
    return server, settings


def slo() -> Slo:
    """Three boxes; an empty one does not matter. They count at once, for what was measured before, too."""
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small", key="load_slo"):
        ttft = _box("SLO TTFT (ms)", "load_slo_ttft", 1000, "Time to first token, at most.")
        tpot = _box(
            "SLO TPOT (ms)", "load_slo_tpot", 200, "Time per output token. Reading is 5 to 10 tokens/s: 100–200."
        )
        e2e = _box("SLO E2E (ms)", "load_slo_e2e", None, "End-to-end latency, at most.")
    return Slo(*(None if limit is None else limit / 1000 for limit in (ttft, tpot, e2e)))


def _box(label: str, key: str, value: float | None, help: str) -> float | None:
    return st.number_input(label, 0.0, 1e7, value if value is None else float(value), 50.0, "%g", key=key, width=150,
                           help=help, placeholder="any", persist_state="session")  # fmt: skip


def _here() -> load.Server:
    client = service.get().client
    try:
        return load.Server(client.url, client.headers, modelled=modelled.words(by_client=True))
    except EngineError as error:
        raise ExperimentError(f"{error}: start it, or choose another server") from None


def _elsewhere() -> load.Server:
    url = st.text_input("Address", "http://127.0.0.1:8000", key="load_url", width=240, persist_state="session")
    model = st.text_input(
        "Model", "", key="load_model", width=150, placeholder="the first one", persist_state="session"
    )
    key = st.text_input("Key", "", key="load_key", width=120, type="password", placeholder="none",
                        help="Sent as Bearer token, and kept in this tab only.")  # fmt: skip
    if key and not (key.isascii() and key.isprintable()):
        raise ExperimentError("the key must be printable ASCII")
    try:
        return load.Server(address(url), {"authorization": f"Bearer {key}"} if key else {}, model.strip())
    except LoadError as error:
        raise ExperimentError(str(error)) from None


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.replace(";", ",").split(",") if part.strip()]
    except ValueError:
        raise ExperimentError(f"the rates '{text[:60]}' are no numbers: write them like 1, 2, 4") from None
    return rates


def _trace() -> list[tuple[float, int, int]]:
    file = st.file_uploader(
        "Trace (CSV or JSON lines)", type=["csv", "json", "jsonl", "txt"], key="load_trace", max_upload_size=32,
        width=360,
        help="Columns time_s, input_tokens, output_tokens, or their names in Azure's, Mooncake's and Vidur's traces.",
    )  # fmt: skip
    speed = st.number_input("Speed", 0.001, 1000.0, 1.0, key="load_speed", width=110, help="2: twice as fast.")
    if file is None:
        raise ExperimentError("choose a trace file")
    try:
        return trace.parse(file.getvalue(), speed=float(speed))
    except LoadError as error:
        raise ExperimentError(str(error)) from None
