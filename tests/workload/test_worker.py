"""The load client's process: it ends when told, and when it ends by itself that is said."""

from __future__ import annotations

import pytest

from backend.workload.arrivals import LoadError
from backend.workload.job import Job, Target, Tick
from backend.workload.worker import Worker

LONG = Job(target=Target(url="http://127.0.0.1:9", model="nobody"), requests=[(0.0, 5, 5), (600.0, 5, 5)])


def test_a_process_that_dies_is_told_and_one_that_is_closed_ends_its_run():
    dying, closed = Worker(), Worker()
    for worker in (dying, closed):
        said = worker.run(LONG)
        next(one for one in said if isinstance(one, Tick))
        if worker is dying:
            worker._process.kill()
            with pytest.raises(LoadError, match="ended by itself"):
                list(said)
            with pytest.raises(LoadError, match="has ended"):
                worker.stop()
        worker.close()
        assert worker._process.poll() is not None
    closed.close()  # harmless
