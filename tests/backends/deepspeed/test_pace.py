"""`communication.max_rate` on engines: results have the same bits, and the sending rate does not exceed the cap."""

import time
from typing import Any

import pytest

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, engines, run, weights

pytestmark = pytest.mark.sampled(4)

RATE = 160_000
"""Bits per second of a host with two processes. Each process may send 10,000 bytes per second."""
SECTION = {"gradients": {"bits": 8, "block_size": 32}}
CAP = {"communication": {"max_rate": f"{RATE / 1000:g} kbit/s"}}


def train(rank: int, *jobs: Job) -> list[tuple[dict[str, Any], int, float]]:
    """Return weights, bytes sent and seconds of each job."""
    found = []
    for job, engine in engines(*jobs):
        sent: list[int] = []
        engine.compression.subscribe(lambda step, sent=sent: sent.append(step.bytes_sent))
        begin = time.monotonic()
        run(engine, data(rank, job))
        found.append((weights(engine), sum(sent), time.monotonic() - begin))
    return found


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_bits_are_the_same_and_the_rate_is_the_cap(stage: int) -> None:
    free = Job(stage, SECTION, {"reduce_bucket_size": 600}, steps=30)
    capped = Job(stage, {**SECTION, **CAP}, {"reduce_bucket_size": 600}, steps=30)
    results = run_forks(2, train, free, capped)
    assert all(capped[0] == free[0] for free, capped in results)
    # Only the first rank reports. A slow machine takes longer than that, and the last message is not paced.
    _, sent, seconds = results[0][1]
    assert sent
    assert sent / seconds < RATE / 8 / 2 * 1.1
