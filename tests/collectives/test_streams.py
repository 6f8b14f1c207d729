"""Messages on GPUs: their buffers stay allocated until they have been used, whichever stream waits for them."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.collectives.buckets import even_partition
from deepspeed_compress.collectives.exchange import Link, _Collective
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.collectives.two_level import HierarchicalReducer
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Blockwise
from deepspeed_compress.compression.feedback import ErrorFeedback
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.monitor import Meter
from tests.support.forks import run_forks
from tests.support.streams import Device, Event, Stream

SAMPLED = pytest.mark.sampled(3)

NUMEL = 400


def residuals_in_another_layout(rank: int) -> list[str]:
    """Return the races of a message that dissolves another one on a stream of its own."""
    from tests.support.cuda_paths import on_streams

    store, cpu = Residuals("fp32", transactional=True), torch.device("cpu")
    with on_streams() as gpu, patch.object(Tensor, "is_cuda", True):
        store.write([Segment("weight", 0, 8, 0, 0)], torch.ones(8))
        side = gpu.stream()
        side.wait_stream(gpu.default)
        with gpu.using(side):
            store.read([Segment("weight", 0, 4, 0, 0)], cpu)
        torch.zeros(8)
    return list(gpu.problems)


def test_residuals_of_a_dissolved_layout_are_freed_after_their_last_use() -> None:
    assert run_forks(1, residuals_in_another_layout) == [[]]


def make_reducer(group: dist.ProcessGroup) -> PayloadReducer:
    """Return a reducer of 4-bit messages in three rounds, with error feedback in both directions."""
    codec, feedback = Codec(Blockwise(4, 32)), [ErrorFeedback(Residuals("bf16", transactional=True)) for _ in range(2)]
    messages = Messages((Channel(codec, *feedback),))
    return PayloadReducer(Link(group), messages, Run(StepClock(), Meter(timed=False)), NUMEL // 3)


def make_hierarchy() -> HierarchicalReducer:
    """Return a reducer for two nodes of two ranks."""
    rank = dist.get_rank()
    groups = {ranks: dist.new_group(ranks) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    node, across = (group for ranks, group in groups.items() if rank in ranks)
    return HierarchicalReducer(dist.group.WORLD, make_reducer(node), make_reducer(across))


def find_races(rank: int, operation: str, fault: Callable[[], Any] = nullcontext) -> list[str]:
    from tests.support.cuda_paths import on_streams

    dist.init_process_group("gloo")
    group = dist.group.WORLD
    reducer = make_hierarchy() if group.size() == 4 else make_reducer(group)
    with on_streams() as gpu, fault():
        side = gpu.stream("side")
        for _ in range(3):
            bucket = torch.randn(NUMEL)
            side.wait_stream(gpu.default)
            OPERATIONS[operation](gpu, side, reducer, bucket)
            bucket.mul_(2)
    dist.destroy_process_group()
    return list(gpu.problems)


def on_side(gpu: Device, side: Stream, work: Callable[[], None]) -> None:
    with gpu.using(side):
        work()
    gpu.default.wait_stream(side)


def wait_on_another_stream(gpu: Device, side: Stream, reducer: PayloadReducer, bucket: torch.Tensor) -> None:
    """Wait on another stream, as DeepSpeed does for prefetched weights that it does not use."""
    with gpu.using(side):
        pending = reducer.start_all_gather(bucket, partition(reducer))
    gpu.default.wait_stream(side)
    pending.wait()
    del pending
    with gpu.using(side):
        torch.ones(3)


def partition(reducer: Any) -> Any:
    return even_partition([("weight", 300), ("bias", NUMEL - 300)], reducer.group.size())


OPERATIONS: dict[str, Callable[[Any, Stream, Any, torch.Tensor], None]] = {
    "reduce_scatter": lambda gpu, side, reducer, bucket: on_side(
        gpu, side, lambda: reducer.reduce_scatter(bucket, partition(reducer), 0.5)
    ),
    "all_reduce": lambda gpu, side, reducer, bucket: on_side(
        gpu, side, lambda: reducer.all_reduce(bucket, partition(reducer), 0.5)
    ),
    "all_gather": lambda gpu, side, reducer, bucket: on_side(
        gpu, side, lambda: reducer.all_gather(bucket, partition(reducer))
    ),
    "wait_elsewhere": wait_on_another_stream,
}


@SAMPLED
@pytest.mark.parametrize("operation", OPERATIONS)
def test_messages_stay_allocated_until_they_are_used(operation: str) -> None:
    assert run_forks(2, find_races, operation) == [[], []]


@SAMPLED
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce"])
def test_the_levels_of_a_hierarchy_wait_for_each_other(operation: str) -> None:
    assert run_forks(4, find_races, operation) == [[]] * 4


def without_record_stream() -> Any:
    return patch.object(_Collective, "wait", lambda self: self.work.wait())


def test_a_missing_record_stream_is_detected() -> None:
    found = "memory of aten.empty.memory_format on side is reused while default uses it"
    assert all(found in problems for problems in run_forks(2, find_races, "wait_elsewhere", without_record_stream))


REUSED = "memory of aten.add.Tensor on default is reused while side uses it"


def use_and_free(device: Device, side: Stream, wait: Callable[[], None], record: bool = False) -> None:
    """Use a tensor of the default stream on `side`, free it, call `wait`, and allocate again."""
    x = torch.ones(3) + 1
    side.wait_stream(device.default)
    with device.using(side):
        x.mul(2)
    if record:
        device.record(x, side)
    del x
    wait()
    torch.zeros(3)


def test_memory_may_be_reused_only_after_its_last_use() -> None:
    for options, found in [({}, [REUSED]), ({"record": True}, [])]:
        with Device() as device:
            use_and_free(device, device.stream("side"), lambda: None, **options)
        assert list(device.problems) == found
    with Device() as device:
        side = device.stream("side")
        use_and_free(device, side, lambda: device.default.wait_stream(side))
    assert not device.problems


READ = "aten.add.Tensor reads on default, which does not wait for side"


def by_event(device: Device, side: Stream, early: bool) -> None:
    event = Event(device)
    if early:
        event.record(side)
    with device.using(side):
        x = torch.ones(3)
    if not early:
        event.record(side)
    device.default.wait_event(event)
    x + 1


def by_host(device: Device, side: Stream, early: bool) -> None:
    with device.using(side):
        x = torch.ones(3)
    (device.default if early else side).synchronize()
    x + 1


def by_third(device: Device, side: Stream, early: bool) -> None:
    """Waiting for a stream includes everything that the stream has waited for so far."""
    third = device.stream("third")
    with device.using(side):
        x = torch.ones(3)
    for stream, other in ((device.default, third), (third, side))[:: 1 if early else -1]:
        stream.wait_stream(other)
    x + 1


@pytest.mark.parametrize("how", [by_event, by_host, by_third])
def test_a_reader_must_wait_for_the_last_writer(how: Callable[[Device, Stream, bool], None]) -> None:
    for early, found in ((True, [READ]), (False, [])):
        with Device() as device:
            how(device, device.stream("side"), early)
        assert list(device.problems) == found


def test_a_writer_must_wait_for_readers() -> None:
    with Device() as device:
        side, x = device.stream("side"), torch.ones(3)
        side.wait_stream(device.default)
        with device.using(side):
            x.sum()
        x.zero_()
    assert list(device.problems) == [
        "aten.zero_.default overwrites data being read on default, which does not wait for side"
    ]
