"""Number of functions between DeepSpeed's seam and the wire. It must stay small enough to read at once."""

import sys
from types import FrameType
from typing import Any

import pytest

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start

MOST_FUNCTIONS, MOST_FILES = 20, 8
Function = tuple[str, str]
"""File below the package, and qualified name."""


class Trace:
    """Functions of the package on the stack when a message is encoded, and when it is sent."""

    def __init__(self) -> None:
        self.way: dict[Function, None] = {}
        self.sent = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.sent:
            return
        encodes = event == "call" and frame.f_code.co_qualname == "TopK.compress_with_feedback"
        self.sent = event == "c_call" and argument.__name__ in ("send", "alltoall")
        if encodes or self.sent:
            self.way |= dict.fromkeys(reversed(list(stack(frame))))


def stack(frame: FrameType | None) -> Any:
    """Yield the running functions of the package, innermost first. Comprehensions belong to their function."""
    while frame is not None:
        _, found, file = frame.f_code.co_filename.rpartition("/deepspeed_compress/")
        name = frame.f_code.co_qualname.partition(".<locals>")[0]
        if found and "site-packages" not in frame.f_code.co_filename:
            yield file, name
        frame = frame.f_back


def way_to_the_wire(rank: int, stage: int) -> list[Function]:
    """Return the functions of the first message of a step after some others, with overlapped reductions."""
    section = {"gradients": {"method": "topk", "density": 0.1}}
    job, trace = Job(stage=stage, section=section, steps=5), Trace()
    engine, batches = start(job), data(rank, job)
    run(engine, batches[:4])
    sys.setprofile(trace)
    try:
        run(engine, batches[4:])
    finally:
        sys.setprofile(None)
    engine.destroy()
    return list(trace.way)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_way_to_the_wire_is_short(stage: int) -> None:
    [way, _] = run_forks(2, way_to_the_wire, stage)
    assert way[0][0].startswith("backends/deepspeed/")
    assert [name for _, name in way][-2:] == ["Link.start_split", "_point_to_point"]
    assert len(way) <= MOST_FUNCTIONS
    assert len({file for file, _ in way}) <= MOST_FILES
