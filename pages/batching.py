"""What does a batch cost, and what does continuous batching buy?"""

import streamlit as st

from pages.widgets import batching, live

live.view(
    "numbers",
    title="Batching: what does a batch cost, and what does continuous batching buy?",
    show=["rate", "flight", "blocks", "ttft"],
    units=st.session_state.units,
)
batching.show()
