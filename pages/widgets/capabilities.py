"""What can be known of an attached engine, and what would have to be turned on to know more."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import streamlit as st

from backend.events import View
from backend.fold import State
from backend.sources.attach.profiles import profiles
from pages.widgets import service
from pages.widgets.format import plain

QUALITIES = {
    "exact": ("●", "as the engine tells it"),
    "derived": ("◕", "computed from what it tells"),
    "estimated": ("◑", "its own estimate, or ours from few numbers"),
    "inferred": ("◔", "concluded from what our own requests saw"),
    "none": ("○", "cannot be known here"),
}
NAMES = {
    "block_map": "Block map",
    "prefix_tree": "Prefix tree",
    "requests": "Requests",
    "roofline": "Roofline",
    "batching": "Batching",
    "latency": "Latency",
    "preemption": "Preemption",
    "hardware": "Hardware",
    "switches": "Engine switches",
}


def title(kind: str) -> str:
    """How the makers write it."""
    known = profiles().get(kind)
    return known.title if known else "OpenAI-compatible server" if kind == "openai" else kind


def of(state: State, view: str) -> View | None:
    """What is said of one view; None for a source that shows all there is, such as our own engine."""
    said = state.capabilities
    return next((found for found in said.views if found.view == view), None)


def missing(view: str) -> View | None:
    """The reason why the source that is shown has nothing for `view`; None when it has."""
    found = service.get().hub.read(lambda state: of(state, view))
    return found if found is not None and found.quality == "none" else None


def reason(view: View, *, code: bool = True) -> str:
    """One sentence, or two, as Markdown. `code`: not in captions, where its colour cannot be read."""
    flag = f" Start it with {f'`{view.flag}`' if code else plain(view.flag)}." if view.flag else ""
    why = view.why if view.why[1:2].isupper() else f"{view.why[:1].upper()}{view.why[1:]}"  # vLLM is a name
    return f"{plain(why)}{'' if why.endswith(('.', '!', '?')) else '.'}{flag}"


def explain(view: str) -> bool:
    """Says why something cannot be shown, and True; else how well it is known of an attached engine."""
    found = service.get().hub.read(lambda state: of(state, view))
    if found is None:
        return False
    name = NAMES.get(view, view)
    if found.quality == "none":
        st.info(reason(found), title=f"{name}: not available from this source", icon=":material/visibility_off:")
        return True
    st.caption(f":material/info: {name}, {found.quality}: {reason(found, code=False)}")
    return False


def frame(views: Sequence[View]) -> pd.DataFrame:
    """One row a view, as Markdown."""
    return pd.DataFrame(
        {
            "view": [NAMES.get(view.view, view.view) for view in views],
            "quality": [f"{QUALITIES.get(view.quality, ('', ''))[0]} {view.quality}".strip() for view in views],
            "why": [plain(view.why) + (f"; turned on by `{view.flag}`" if view.flag else "") for view in views],
        }
    )


def table(views: Sequence[View]) -> None:
    st.table(frame(views).set_index("view"))
    st.caption(" · ".join(f"{glyph} {name}: {words}" for name, (glyph, words) in QUALITIES.items()))


def panel() -> None:
    """On every page of an attached engine: what its pictures rest on."""
    found = service.get()
    if not found.attached:
        return
    said, scrape = found.hub.read(lambda state: (state.capabilities, state.scrape))
    if not said.kind:
        return
    with st.popover("What it tells", icon=":material/rule:", type="tertiary", key="capabilities"):
        table(said.views)
        if scrape is not None:
            st.caption(
                f"Read every {scrape.window_s:.1f} s, which takes {1e3 * scrape.scrape_s:.0f} ms. "
                f"{scrape.restarts} restarts seen. {scrape.unknown} series that no mapping knows."
            )
        if unknown := found.source.unknown:
            with st.expander("Series that no mapping knows", icon=":material/list:", type="compact"):
                st.code("\n".join(f"{name}  ({count})" for name, count in unknown.items()), language=None, height=200)
