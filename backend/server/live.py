"""The live WebSocket: events for the browser, on the page's own origin. The UI's server mounts it and knows the hub.

    server -> browser   a JSON array of events; the first of a connection begins with a snapshot
    browser -> server   {"watch": [requests]}, {"block": n}, {"table": request}; the answers come in the same arrays:
                        {"type": "text", …}, {"type": "block", …}, {"type": "table", …}
                        a table that no engine tells, but its request's tokens do, has "inferred": true
                        {"tree": n}: {"type": "tree", …} once, for each n anew
                        {"phases": true}: {"type": "phases", …} comes for the next LEASE_S, at most 4 times a second
                        {"fleet": key of a replica or ""}: {"type": "fleet", …} the same way, with details of that one
                        {"telemetry": [panels]}: sensors are read for some seconds more
    Unasked comes {"type": "pulse", "pulse": text}, first and whenever it is another one: the page around the pictures
    was drawn from something that has changed since. When `get_hub` gives another hub, its snapshot follows on the same
    connection: the browser starts over with it.

A browser that reads slowly gets fewer and longer arrays: nothing is queued for it. WebSockets are not covered by CORS,
so this route checks Origin and a token by itself.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Collection
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from backend.hub import Hub
from backend.texts import Heard

PATH = "/api/live"
INTERVAL_S = 1 / 60  # between two sends: a screen shows no more
MAX_MESSAGE = 4096  # characters that a browser may send at once
MAX_WATCHED = 16
MAX_VIEWERS = 256
LEASE_S = 10.0  # what is asked for by lease ends by itself when the page has changed
PHASES_S = 0.25
PULSE_S = 0.5  # between two looks at the pulse

POLICY_VIOLATION, UNSUPPORTED_DATA, MESSAGE_TOO_BIG, TRY_LATER = 1008, 1003, 1009, 1013  # RFC 6455 and its registry


class _Message(msgspec.Struct):
    watch: Annotated[list[int], msgspec.Meta(max_length=MAX_WATCHED)] | None = None
    block: int | None = None
    table: int | None = None
    tree: int | None = None
    phases: bool | None = None
    fleet: Annotated[str, msgspec.Meta(max_length=600)] | None = None
    telemetry: Annotated[list[Annotated[str, msgspec.Meta(max_length=20)]], msgspec.Meta(max_length=8)] | None = None


class Extras(msgspec.Struct):
    """What comes beside the events: phases and sensors cost something and come only while they are asked for."""

    phases: Callable[[], str] = lambda: ""  # the newest message, encoded; "": none
    fleet: Callable[[str], str] = lambda chosen: ""  # the same
    watch_telemetry: Callable[[list[str]], None] = lambda panels: None
    pulse: Callable[[], str] = lambda: ""  # "": none
    inferred: Callable[[int], list[int] | None] = lambda request: None  # its blocks, where the engine tells none


_decode = msgspec.json.Decoder(_Message).decode
_encode = msgspec.json.Encoder().encode


def routes(
    get_hub: Callable[[], Hub],
    prefix: str = "",
    *,
    token: str,
    allowed_origins: Collection[str] = (),
    get_extras: Callable[[], Extras] = Extras,
) -> list[WebSocketRoute]:
    """The route, below `prefix` ("" or "/base"). `allowed_origins`: origins beside the page's own, as `https://host:port`."""
    viewers = 0

    async def live(ws: WebSocket) -> None:
        nonlocal viewers
        if not _allowed(ws, token, allowed_origins):
            await ws.close(POLICY_VIOLATION)  # before accept: the browser sees HTTP 403
            return
        await ws.accept()
        if viewers >= MAX_VIEWERS:
            await ws.close(TRY_LATER, f"{MAX_VIEWERS} pages watch already")
            return
        viewers += 1
        try:
            await _Viewer(ws, get_hub, get_extras).run()
        finally:
            viewers -= 1

    return [WebSocketRoute(prefix + PATH, live)]


def _allowed(ws: WebSocket, token: str, allowed_origins: Collection[str]) -> bool:
    if not hmac.compare_digest(ws.query_params.get("token", "").encode(), token.encode()):
        return False
    origin = ws.headers.get("origin")
    if origin is None:  # not a browser: nobody else's page can be behind it
        return True
    return origin in allowed_origins or urlsplit(origin).netloc.lower() == ws.headers.get("host", "").lower()


class _Viewer:
    """One connection. What it asks for is kept as the latest of its kind, so that it can ask for no backlog."""

    def __init__(self, ws: WebSocket, get_hub: Callable[[], Hub], get_extras: Callable[[], Extras]):
        self.ws, self.get_hub, self.get_extras = ws, get_hub, get_extras
        self.hub, self.extras = get_hub(), get_extras()
        self.changed = asyncio.Event()
        self.reading: dict[int, Heard] = {}
        self.block: int | None = None
        self.table: int | None = None
        self.tree = False
        self.phases_until = self.fleet_until = 0.0  # on the event loop's clock
        self.phases_said = self.fleet_said = self.chosen = ""
        self.pulse_due = 0.0
        self.pulse_said = ""
        self.alarm: asyncio.TimerHandle | None = None

    async def run(self) -> None:
        tasks = asyncio.create_task(self._listen()), asyncio.create_task(self._follow())
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        farewell, broken = await asyncio.gather(*tasks, return_exceptions=True)
        if isinstance(farewell, tuple):
            await self.ws.close(*farewell)
        if isinstance(broken, Exception) and not isinstance(broken, WebSocketDisconnect):
            raise broken

    async def _follow(self) -> None:
        """One hub after the other: when the page's source is another one, the browser starts over with its snapshot."""
        while True:
            with self.hub.listening() as self.changed:
                await self._tell()
            self._silence()  # it would wake this hub's listener
            self.hub, self.extras = self.get_hub(), self.get_extras()
            self.reading = {request: Heard() for request in self.reading}
            self.phases_said = self.fleet_said = self.pulse_said = ""

    async def _tell(self) -> None:
        """Until the source is another one, which is seen at the next pulse at the latest."""
        clock = asyncio.get_running_loop().time
        cursor: int | None = None
        not_before = 0.0
        while self.get_hub() is self.hub:
            self.changed.clear()
            cursor, frame = self.hub.delta(cursor, self.reading)
            frame = self._with_answers(frame)
            if frame:
                not_before = clock() + INTERVAL_S
                await self.ws.send_text(frame)  # waits while the browser is slow; then more comes at once
            await self._wait()
            if (early := not_before - clock()) > 0:
                await asyncio.sleep(early)

    async def _wait(self) -> None:
        """Until there is something to tell. Some things change in silence and are looked at again after a while: one
        alarm serves many steps."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        at_latest = now + (PHASES_S if now < max(self.phases_until, self.fleet_until) else PULSE_S)
        if not self.alarm or not now < self.alarm.when() <= at_latest:
            self._silence()
            self.alarm = loop.call_at(at_latest, self.changed.set)
        await self.changed.wait()

    def _silence(self) -> None:
        if self.alarm:
            self.alarm.cancel()
        self.alarm = None

    def _with_answers(self, frame: str) -> str:
        answers = []
        if self.block is not None:
            answers.append(self.hub.block(self.block))
        if self.table is not None:
            answers.append(self.hub.table(self.table, self.extras.inferred(self.table)))
        if self.tree:
            answers.append(self.hub.tree())
        self.block, self.table, self.tree = None, None, False
        parts = [_encode(answer).decode() for answer in answers if answer is not None]
        now = asyncio.get_running_loop().time()
        if now < self.phases_until:
            newest = self.extras.phases()
            if newest != self.phases_said:
                self.phases_said = newest
                parts.append(newest)
        if now < self.fleet_until:
            newest = self.extras.fleet(self.chosen)
            if newest != self.fleet_said:
                self.fleet_said = newest
                parts.append(newest)
        if now >= self.pulse_due:
            self.pulse_due = now + PULSE_S
            pulse = self.extras.pulse()
            if pulse != self.pulse_said:
                self.pulse_said = pulse
                parts.append(_encode({"type": "pulse", "pulse": pulse}).decode())
        told = ",".join(filter(None, parts))
        if not told:
            return frame
        return f"{frame[:-1]},{told}]" if frame else f"[{told}]"

    async def _listen(self) -> tuple[int, str] | None:
        """Until the browser is gone (None) or says something that it may not (what to close the connection with)."""
        while True:
            try:
                text = await self.ws.receive_text()
            except WebSocketDisconnect:
                return None
            except KeyError:
                return UNSUPPORTED_DATA, "text frames only"
            if len(text) > MAX_MESSAGE:
                return MESSAGE_TOO_BIG, f"at most {MAX_MESSAGE} characters"
            try:
                message = _decode(text)
            except msgspec.DecodeError as error:
                return UNSUPPORTED_DATA, str(error)[:100]
            if message.watch is not None:
                self.reading = {request: self.reading.get(request, Heard()) for request in message.watch}
            self.block = self.block if message.block is None else message.block
            self.table = self.table if message.table is None else message.table
            self.tree = self.tree or message.tree is not None
            if message.phases is not None:
                self.phases_until = asyncio.get_running_loop().time() + LEASE_S if message.phases else 0.0
            if message.fleet is not None:
                self.fleet_until, self.chosen = asyncio.get_running_loop().time() + LEASE_S, message.fleet
            if message.telemetry is not None:
                self.extras.watch_telemetry(message.telemetry)
            self.changed.set()
