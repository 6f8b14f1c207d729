"""Buckets on a stream of their own on GPUs: no data race, no memory freed too early, and no wait on the host."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from deepspeed_compress.backends.deepspeed.gradients.zero_12 import _Buckets
from deepspeed_compress.checkpointing.deepspeed.writer_queue import StreamCopies, copies_for_device
from deepspeed_compress.collectives.exchange import PendingExchange, _Collective
from deepspeed_compress.collectives.payload import PayloadReducer
from tests.support.forks import run_forks
from tests.support.jobs import WIDTH, Job, data, make_engine, run, start
from tests.support.streams import Device

pytestmark = pytest.mark.sampled(4)

ZERO = {"reduce_bucket_size": 200, "overlap_comm": True}
"""ZeRO settings with a bucket size below the 31 x 12 and 31 x 17 elements of gradients."""
INT4 = {"bits": 4, "block_size": 32}
TOPK = {"method": "topk", "density": 0.1, "block_size": 64}
POWERSGD = {"method": "powersgd", "rank": 2}
WEIGHTS = {"bits": 8, "block_size": 64}
ARRIVING = {**WEIGHTS, "overlap": True}


def job(stage: int, gradients: dict[str, Any], zero: dict[str, Any] | None = None, **section: Any) -> Job:
    return Job(stage, {"gradients": gradients, **section}, {**ZERO, **(zero or {})}, steps=3)


JOBS = {
    0: [job(0, TOPK), job(0, POWERSGD)],
    1: [job(1, INT4, weights=WEIGHTS), job(1, INT4, weights=ARRIVING)],
    2: [
        job(2, TOPK, guard={}),
        job(2, POWERSGD),
        job(2, INT4, weights=ARRIVING),
    ],
    3: [job(3, TOPK), job(3, INT4, weights=WEIGHTS)],
}


def races(rank: int, jobs: list[Job], fault: Callable[[], Any] = nullcontext) -> list[str]:
    from tests.support.cuda_paths import on_streams

    with on_streams() as gpu, fault():
        for one in jobs:
            engine = start(one)
            run(engine, data(rank, one))
            engine.destroy()
            assert one.section is None or all(stream.clock[stream] for stream in gpu.streams), "a stream has no work"
    return list(gpu.problems)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_streams_wait_for_each_other(stage: int) -> None:
    assert run_forks(2, races, JOBS[stage]) == [[], []]


def test_zero_3_has_no_races_except_those_of_deepspeed() -> None:
    """DeepSpeed gathers weights on a stream that does not wait for the optimizer's.

    Programs that read the loss wait on the host.
    """
    assert run_forks(2, races, JOBS[3]) == [[GATHER], [GATHER]]


@pytest.mark.slow
def test_the_race_of_deepspeed_is_there_without_us() -> None:
    assert all(GATHER in found for found in run_forks(2, races, [replace(job(3, INT4), section=None)]))


GATHER = "aten.cat.out reads on side, which does not wait for default"


def unrecorded() -> Any:
    return patch.object(_Buckets, "_keep", lambda self, tensor: None)


def freed() -> Any:
    """Drop the references to the buffers of a message while it is being sent."""
    begin = PayloadReducer._send_parts

    def forgetful(*args: Any) -> Any:
        sent = begin(*args)
        bare = PendingExchange([arrival.work for arrival in sent.exchange.receives])
        return replace(sent, outgoing=(), exchange=bare)

    return patch.object(PayloadReducer, "_send_parts", forgetful)


def unfinished() -> Any:
    return patch.object(_Collective, "wait", lambda self: None)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (unrecorded, "memory of aten.mm.default on default is reused while side uses it"),
        (freed, "memory of aten.empty.memory_format on side is reused while NCCL uses it"),
        (unfinished, "aten.mul.Tensor reads on side, which does not wait for NCCL"),
    ],
)
def test_missing_synchronization_is_detected(fault: Callable[[], Any], found: str) -> None:
    assert all(found in problems for problems in run_forks(2, races, [job(2, INT4)], fault))


def test_weights_that_are_not_awaited_are_detected() -> None:
    found = "on default, which does not wait for NCCL"
    for problems in run_forks(2, races, [job(1, INT4, weights=ARRIVING)], unfinished):
        assert any(found in problem for problem in problems)


class Branches(nn.Module):
    """Two layers, the second of which computes on a stream of its own. As a list, they wait one by one."""

    def __init__(self, gpu: Device) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 1)])
        self._gpu, self._side = gpu, gpu.stream("branch")

    def forward(self, x: Tensor) -> Tensor:
        self._side.wait_stream(self._gpu.default)
        first = self.layers[0](x)
        with self._gpu.using(self._side):
            second = self.layers[1](x)
        self._gpu.default.wait_stream(self._side)
        sums: Tensor = first + second
        return sums


def in_branches(rank: int, one: Job) -> list[str]:
    from tests.support.cuda_paths import on_streams

    with on_streams() as gpu:
        engine = make_engine(Branches(gpu), one.config())
        run(engine, data(rank, one))
        engine.destroy()
    return list(gpu.problems)


@pytest.mark.parametrize("stage", [1, 2])
def test_every_stream_of_a_model_waits_for_weights(stage: int) -> None:
    """The weights of both layers arrive in one message, for which the first layer waits."""
    assert run_forks(2, in_branches, job(stage, INT4, weights=ARRIVING)) == [[], []]


def saving(rank: int, stage: int, directory: str) -> list[str]:
    """Return the races of steps that change state while it is being saved."""
    from tests.support.cuda_paths import on_streams

    one = job(stage, INT4, checkpointing={"directory": f"{directory}/disk", "every": 1})
    with on_streams() as gpu:
        engine = start(one)
        run(engine, data(rank, one))
        engine.compression.saving.wait()
        engine.destroy()
    return list(gpu.problems)


def test_saving_brings_no_race(tmp_path: Path) -> None:
    assert run_forks(2, saving, 1, str(tmp_path)) == [[], []]


def copies_in_turn(rank: int) -> list[dict[str, None]]:
    """Return the races of writes after copies have started, with and without the wait for the copies."""
    from tests.support.cuda_paths import on_streams

    found = []
    with on_streams() as gpu:
        copies, source = copies_for_device(), torch.ones(4)
        for fault in (nullcontext(), patch.object(StreamCopies, "_hold_up")):
            with fault:
                copies.begin([(torch.zeros(4), source)])
            source.add_(1)
            found.append(dict(gpu.problems))
    return found


def test_a_tensor_may_change_while_its_copy_is_in_progress() -> None:
    [[ours, unheld]] = run_forks(1, copies_in_turn)
    assert not ours
    assert any("overwrites data being read on default, which does not wait for side" in problem for problem in unheld)


UNMEASURED = {"every": 100, "announce": False}
ALLOWED = {
    "backends/deepspeed/norms.py:_true: _local_scalar_dense": "the guard decides on the host, as DeepSpeed does",
    "backends/deepspeed/norms.py:_everywhere: _local_scalar_dense": "the same, where DeepSpeed has no norm",
    "session/observer.py:saved: tolist": "of a copy on the host, which a step before has begun",
}


def waiting(rank: int, jobs: list[Job], directory: str) -> list[set[str]]:
    """Return the waits in unmeasured steps.

    The first step is excluded, because it creates tables and buffers, and the second, in which weights of the first
    arrive if they overlap with forward, which creates theirs.
    """
    from tests.support.cuda_paths import on_streams
    from tests.support.host_waits import HostWaits

    found = []
    for one in jobs:
        section = {**one.section, "monitor": {**UNMEASURED, "path": f"{directory}/{len(found)}"}}
        with on_streams():
            engine = start(replace(one, section=section))
            batches = data(rank, one)
            begin = 2 * one.accumulation
            run(engine, batches[:begin])
            with HostWaits() as waits:
                run(engine, batches[begin:])
            assert batches[begin:]
            engine.destroy()
        found.append(waits.found)
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_no_host_waits_in_a_step_that_is_not_measured(stage: int, tmp_path: Path) -> None:
    jobs = [*JOBS[stage], job(stage, INT4, guard={})]
    allowed = [set(ALLOWED) if "guard" in one.section else set() for one in jobs]
    for found in run_forks(2, waiting, jobs, str(tmp_path)):
        assert [waits - excepted for waits, excepted in zip(found, allowed, strict=True)] == [set()] * len(jobs)


NORM = "session/residual_state.py:residual_norm: tolist"
COPY = "session/observer.py:saved: tolist"
"""Read of a copy on the host that the measured step before has started."""


def measured(rank: int, jobs: list[Job], directory: str) -> list[tuple[dict[str, int], int]]:
    """Return the waits in measured steps by place, except in the first two steps, and the number of these steps."""
    from tests.support.cuda_paths import on_streams
    from tests.support.host_waits import HostWaits

    found = []
    for one in jobs:
        section = {**one.section, "monitor": {"every": 1, "announce": False, "path": f"{directory}/{len(found)}"}}
        with on_streams():
            engine = start(replace(one, section=section))
            batches = data(rank, one)
            run(engine, batches[:2])
            with HostWaits() as waits:
                run(engine, batches[2:])
            engine.destroy()
        found.append((dict(waits.times), len(batches) - 2))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_measured_step_waits_once_on_the_rank_that_reports(stage: int, tmp_path: Path) -> None:
    """Residuals of weights and means cause no additional waits."""
    jobs = [one for one in JOBS[stage] if "guard" not in one.section]
    first, second = run_forks(2, measured, jobs, str(tmp_path))
    for (times, steps), (others, _) in zip(first, second, strict=True):
        assert times == {NORM: steps, COPY: steps}
        assert others == {COPY: steps}
