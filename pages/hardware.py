"""What does the chip report while each phase runs?"""

import streamlit as st

from pages.widgets import capabilities, controls, hardware, live, service, tables

units = st.session_state.units
on_gpu, has_gpu = service.get().hub.read(lambda state: (hardware.computes_on_gpu(state), hardware.has_gpu(state)))

if capabilities.explain("hardware"):
    st.stop()

live.view(
    "phase_numbers",
    title="Hardware: what does the chip report while each phase runs?",
    show=["computed", "power", "energy", "memory"] if on_gpu else ["computed", "load", "energy", "host_memory"],
    units=units,
    telemetry=True,
)
controls.workload()

live.view("devices", title="Devices", units=units)
live.view("bandwidth", title="Bandwidth of memory: computed and measured")
live.view("windows", title="The last 20 s by phase")

if not has_gpu:
    live.view("host_strips", title="What the machine reports", units=units)
live.view(
    "gpu_strips",
    title="What the GPU reports, shaded by phase: ▲ prefill orange, ● decode blue",
    units=units,
    empty="No GPU can be read here.",
)
live.view("processes", title="Processes on the GPU", units=units)
if has_gpu:
    live.view("host_strips", title="What the machine reports", units=units)
with st.container(gap="xsmall"):
    tables.table("readings", hardware.readings, alt="Every reading of every device with its label")
