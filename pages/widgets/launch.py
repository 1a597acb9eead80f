"""Running a model on vLLM: the command to copy, and where vLLM is installed a button that starts it and turns to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import streamlit as st

from backend.models import cache, find
from backend.models.catalogue import CATALOGUE
from backend.models.errors import ModelError
from backend.sources import SourceError, vllm_command
from backend.sources.attach.target import TargetConfig
from backend.sources.launch import LaunchStatus, VllmLaunch
from backend.sources.vllm_command import LaunchError, Options
from pages.widgets import service
from pages.widgets.format import plain

REFRESH_S = 0.5
INSTALL = "https://docs.vllm.ai/en/latest/getting_started/installation/"
BUNDLED = "smollm2-135m"
PLACES = ("This machine", "Docker", "Ray cluster", "Several machines")

_lock = threading.Lock()
_launch: VllmLaunch | None = None
_said = ""  # why what serves was not turned to


def launch() -> VllmLaunch:
    """The one of this process; it ends with it."""
    global _launch
    with _lock:
        if _launch is None:
            _launch = VllmLaunch(changed=_changed)
        return _launch


def panel() -> None:
    """The form, and what runs."""
    if launch().running:
        _running()
        return
    program = vllm_command.find()
    options, problem = _form()
    place = st.segmented_control(
        "Where", PLACES, default=PLACES[0], required=True, key="launch_place", label_visibility="collapsed"
    )
    if problem:
        st.error(plain(problem), icon=":material/error:")
        return
    if place != PLACES[0]:
        st.caption("Start it there, then connect to its address.")
    elif program is None:
        st.info(
            f"vLLM is not installed here: no program vllm on the path, and {vllm_command.VLLM} names none. "
            f"[How to install it]({INSTALL}), or copy the command.",
            icon=":material/download:",
        )
    else:
        _start(options)
    st.code(_command(place, options, program), language="bash", wrap_lines=True)
    _ended(launch().status)


def _form() -> tuple[Options, str]:
    """What to start, and what is wrong with it in words."""
    left, right = st.columns([3, 2])
    model = left.text_input("Model", _served(), key="launch_model", persist_state="session",
                            help="A folder, a Hugging Face id, or a name of the catalogue.")  # fmt: skip
    extra = right.text_input("Further flags", "", key="launch_extra", persist_state="session",
                             placeholder="--max-num-seqs 64")  # fmt: skip
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        tp, pp, dp = (
            st.number_input(label, 1, 1024, 1, key=f"launch_{name}", width=90, persist_state="session", help=words)
            for label, name, words in (
                ("TP", "tp", "Tensor parallel: so many GPUs share every layer."),
                ("PP", "pp", "Pipeline parallel: so many stages of layers."),
                ("DP", "dp", "Data parallel: so many engines behind one address."),
            )
        )
        length = st.number_input("Context (tokens)", 0, 10_000_000, 0, key="launch_length", width=130,
                                 persist_state="session", help="At most. 0: the model's own.")  # fmt: skip
        blocks = st.number_input("KV blocks", 0, 10_000_000, 0, key="launch_blocks", width=110,
                                 persist_state="session",
                                 help="0: what fits. Few make preemption and eviction easy to see.")  # fmt: skip
        eager = st.toggle("Start fast", key="launch_eager", persist_state="session",
                          help="--enforce-eager: nothing is compiled; decoding is slower.")  # fmt: skip
        events = st.toggle("KV events", True, key="launch_events", persist_state="session",
                           help="The map of cached blocks and the prefix tree. On this machine they go through a file "
                           "that only you can read; in other places, everybody who reaches the port can.")  # fmt: skip
        mfu = st.toggle("Roofline", True, key="launch_mfu", persist_state="session",
                        help="--enable-mfu-metrics: vLLM's own estimates of FLOPs and bytes.")  # fmt: skip
    name = model.strip()
    try:
        where = _folder(name)
        options = Options(
            model=where,
            name=name.rstrip("/").rpartition("/")[2] if name.lower() in CATALOGUE or name[:1] in "/.~" else "",
            tensor_parallel=tp,
            pipeline_parallel=pp,
            data_parallel=dp,
            max_model_len=length or None,
            num_blocks=blocks or None,
            enforce_eager=eager,
            kv_events=events,
            mfu=mfu,
            extra=extra,
        )
        vllm_command.flags(options)
    except (LaunchError, ModelError) as error:
        return Options(model=name), str(error)
    return options, ""


def _folder(name: str) -> str:
    """Of a model of the catalogue, once it is there; other names are vLLM's to find."""
    if name.lower() in CATALOGUE and any((cache.root() / "models").glob(f"{name.lower()}-*")):
        return str(find.path(name))
    return name


def _served() -> str:
    """The model that runs here now, or the bundled one."""
    model = service.get().hub.read(lambda state: state.model.name)
    return model or BUNDLED


def _command(place: str | None, options: Options, program: str | None) -> str:
    cpu = vllm_command.on_cpu()
    made: dict[str, Callable[[], str]] = {
        "Docker": lambda: vllm_command.docker(options, cpu=cpu),
        "Ray cluster": lambda: vllm_command.ray(options),
        "Several machines": lambda: vllm_command.multi_node(options),
    }
    return made.get(place or "", lambda: vllm_command.preview(options, program or "vllm"))()


def _start(options: Options) -> None:
    own = service.get().own
    frees = own is not None and own.engine is not None
    with st.container(horizontal=True, vertical_alignment="center", gap="small"):
        stop_own = frees and st.toggle(
            "Stop our own engine first", True, key="launch_stop_own", persist_state="session",
            help="Two engines would share cores and memory. It starts again on the way back.",
        )  # fmt: skip
        if not st.button("Start vLLM", key="launch_start", type="primary", icon=":material/rocket_launch:"):
            return
    global _said
    _said = ""
    try:
        if running := service.get().lab.running:
            raise LaunchError(f"'{running.name}' is running here: stop it or wait for its end")
        if options.model.lower() in CATALOGUE:
            with st.spinner("Fetching the model", show_time=True):
                options = replace(options, model=str(find.path(options.model)))
        launch().start(options)
    except (LaunchError, ModelError, OSError) as error:
        st.error(plain(str(error)), icon=":material/error:")
        return
    if stop_own:
        own.engine.stop()
    st.rerun()


def _running() -> None:
    @st.fragment(run_every=REFRESH_S)
    def moving() -> None:
        status = launch().status
        if not launch().running:
            st.rerun()
        if status.phase == "ready":
            st.success(plain(_said or f"vLLM is {status.words}; all pages show it."), icon=":material/check_circle:")
        else:
            st.progress(status.share, text=plain(status.words))
        with (
            st.expander("Its log", key="launch_log", type="compact"),
            st.container(height=236, border=False, autoscroll=True),
        ):
            st.code("\n".join(status.lines), language=None)

    moving()
    with st.expander("Its command", key="launch_command", type="compact"):
        st.code(launch().shown, language="bash", wrap_lines=True)
    st.button("Stop vLLM", key="launch_stop", icon=":material/stop:", on_click=stop)


def stop() -> None:
    """Back to our own engine when the pages show this vLLM; then nothing of it is left."""
    url = launch().url
    found = service.get()
    if found.attached and url.endswith(f"//{found.where}"):
        try:
            found.detach()
        except (SourceError, OSError) as error:
            st.toast(plain(str(error)), icon=":material/error:")
    launch().stop()


def _ended(status: LaunchStatus) -> None:
    if status.phase != "failed":
        return
    st.error(plain(status.words), title="vLLM did not keep running", icon=":material/error:")
    with st.expander("Last lines of its log", key="launch_last"):
        st.code("\n".join(status.lines), language=None, height=220)


def _changed() -> None:
    """In a thread of the launch: what serves is turned to, whether or not the dialog is still open."""
    global _said
    status = launch().status
    if status.phase != "ready":
        return
    try:
        service.get().attach(TargetConfig(url=status.url, name="vLLM here"))
        _said = ""
    except (SourceError, OSError) as error:
        _said = f"vLLM is {status.words}, but was not turned to: {error}. Connect to it."
