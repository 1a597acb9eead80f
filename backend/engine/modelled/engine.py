"""The engine behind a server that is modelled: requests have come some way when it hears of them."""

from __future__ import annotations

from backend.engine.engine import Engine
from backend.engine.request import Request, SamplingParams


class ModelledEngine(Engine):
    """`front_s`: what HTTP, tokenising and handing over take of each request. No step waits for it, and TTFT has it.

    Through the server, which knows when a request arrived, this time passes; who submits directly comes at its end.
    """

    front_s = 0.0

    def submit(
        self, tokens: list[int], params: SamplingParams, *, arrived: float | None = None, **more
    ) -> list[Request]:
        if arrived is None:
            arrived = max(0.0, self.now() - self.front_s)
        return super().submit(tokens, params, arrived=arrived, **more)
