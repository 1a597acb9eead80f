"""The measured ceilings of the engine's device, as pages know them: asked once an epoch, measured again on request."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import msgspec

from backend.sources.background import Background
from backend.sources.remote import EngineClient, EngineError

AGAIN_S = 5.0  # until an engine is asked again that could not say
PROGRESS_S = 0.3


class Roofs(msgspec.Struct, kw_only=True, frozen=True):
    """state: unknown (not asked, or no answer: `text` says why), none (never measured here), measuring (`share` done),
    measured."""

    state: str = "unknown"
    text: str = ""
    share: float = 0.0
    ceilings: dict[str, Any] | None = None


class RoofKeeper:
    """From any thread; nothing here waits for the engine."""

    def __init__(self, client: EngineClient, background: Background):
        self._client, self._background = client, background
        self._lock = threading.Lock()
        self._now = Roofs()
        self._epoch, self._not_before, self._busy = "", 0.0, False

    def known(self, epoch: str) -> dict[str, Any]:
        """What is known now, as the browser gets it. Asks in the background when nothing is known of this `epoch`."""
        with self._lock:
            if epoch != self._epoch and self._busy:
                return {"state": "unknown", "text": "", "share": 0.0}  # what is known is of an engine before this one
            if epoch != self._epoch:
                self._epoch, self._now, self._not_before = epoch, Roofs(), 0.0
            if epoch and self._now.state == "unknown" and not self._busy and time.monotonic() >= self._not_before:
                self._start(self._ask())
            return {k: v for k, v in msgspec.structs.asdict(self._now).items() if v is not None}

    def measure(self) -> None:
        """Measures again, if the engine is idle; what `known` says then tells how it goes."""
        with self._lock:
            if not self._busy:
                self._now = msgspec.structs.replace(self._now, state="measuring", share=0.0, text="")
                self._start(self._measure())

    def _start(self, work) -> None:
        self._busy = True  # before it can end
        try:
            self._background.run(work)
        except RuntimeError:  # everything is being closed
            self._now, self._busy = Roofs(text="closed"), False

    async def _ask(self) -> None:
        try:
            found = await asyncio.to_thread(self._client.ceilings)
            self._now = Roofs(state="measured", ceilings=found) if found else Roofs(state="none")
        except EngineError as error:
            self._now = Roofs(text=str(error))
        finally:
            self._end()

    async def _measure(self) -> None:
        before = self._now.ceilings
        watching = asyncio.create_task(self._watch())
        try:
            found = await asyncio.to_thread(self._client.measure_ceilings)
            self._now = Roofs(state="measured", ceilings=found)
        except EngineError as error:
            self._now = Roofs(state="measured" if before else "none", ceilings=before, text=str(error))
        finally:
            watching.cancel()
            self._end()

    async def _watch(self) -> None:
        """While it is measured: how far it is. An engine that cannot say is no reason to stop."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            try:
                said = await asyncio.to_thread(self._client.ceilings_progress)
            except EngineError:
                continue
            if self._now.state == "measuring":
                share, text = float(said.get("share") or 0.0), str(said.get("text") or "")
                self._now = msgspec.structs.replace(self._now, share=share, text=text)

    def _end(self) -> None:
        self._busy, self._not_before = False, time.monotonic() + AGAIN_S
