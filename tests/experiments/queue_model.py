"""A queue with `places` servers, computed: what a load client would have seen of it."""

from __future__ import annotations

import heapq
import random

from backend.workload.arrivals import Arrivals, times
from backend.workload.job import Answer, Tick


def play(
    rate: float, count: int, places: int, service_s: float, seed: int, *, even: bool = False
) -> tuple[list[Answer], list[Tick], float]:
    """Poisson arrivals, first come first served, exponential service (`even`: all the same).

    (answers, ticks, last arrival)
    """
    lots = random.Random(seed)
    arrivals = times(Arrivals.poisson, rate, count, seed)
    free = [0.0] * places
    answers = []
    for number, at in enumerate(arrivals):
        begin = max(at, heapq.heappop(free))
        end = begin + (service_s if even else lots.expovariate(1 / service_s))
        heapq.heappush(free, end)
        answers.append(
            Answer(
                number=number,
                arrival_s=at,
                sent_s=at,
                end_s=end,
                state="ok",
                times_s=[begin + 0.01, end],
                wanted_input=10,
                wanted_output=2,
                input_tokens=10,
                output_tokens=2,
            )
        )
    last = max(answer.end_s for answer in answers)
    moves = sorted([(a.arrival_s, 1) for a in answers] + [(a.end_s, -1) for a in answers])
    ticks, arrived, left, place = [], 0, 0, 0
    for step in range(1, int(last * 10) + 2):
        while place < len(moves) and moves[place][0] <= step / 10:
            arrived, left = (arrived + 1, left) if moves[place][1] > 0 else (arrived, left + 1)
            place += 1
        ticks.append(Tick(t=step / 10, arrived=arrived, left=left, in_flight=arrived - left))
    return answers, ticks, arrivals[-1]
