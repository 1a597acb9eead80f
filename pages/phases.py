"""What limits this phase?"""

import msgspec
import streamlit as st

from pages.widgets import caches, capabilities, controls, live, phases, service, tables

units = st.session_state.units

live.view(
    "phase_numbers",
    title="Phases: what limits this phase?",
    show=["mbu", "mfu", "ridge", "ratio"],
    units=units,
)
controls.workload()
phases.roofline(units)

attached = service.get().attached
if attached:
    capabilities.explain("roofline")
    st.caption(
        ":material/info: Where the time of a step went, and the shapes of its scores, are known of an engine of our "
        "own only: a server that is attached to exports sums, not steps."
    )
else:
    with st.container(gap="xsmall"):
        live.view("parts", title="Where the time of a step went")
        tables.table(
            "phases",
            lambda state: phases.phases_table(msgspec.json.decode(service.get().phases.message())),
            alt="The newest steps by phase",
        )

shapes, groups = (None, st.container()) if attached else st.columns([3, 2], gap="medium")
if not attached:
    with shapes:
        live.view("scores", title="The same attention, two shapes")
with groups:
    found = service.get().hub.read(phases.grouping)
    st.markdown("**Attention in decode: 2 · Hq ÷ (Hkv · P)**")
    if found:
        formula, table = found
        st.markdown(formula + " with this model's heads, whatever the batch and the context.")
        st.dataframe(
            table,
            hide_index=True,
            key="groupings",
            alt="Attention intensity by grouping",
            column_config={name: st.column_config.NumberColumn(width=80) for name in ("FLOP/byte", "KV heads")},
        )
    else:
        st.caption("The server does not tell the heads of its model." if attached else "No model was heard of yet.")

if not attached:
    caches.show()
