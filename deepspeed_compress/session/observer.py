"""Figures of a step over all ranks: the mean loss, the residual norm, and how long each rank was busy.

They are small and few. "All ranks" are those of a process group, the ranks that decide alike; the whole job if it is
None.
"""

import contextlib
import math
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.utils._pytree import tree_leaves

from deepspeed_compress.collectives.objects import of_first


class _Late:
    """Sums over ranks that are computed while the next step runs, so they are known one step late."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self._waits: list[Callable[[], object]] = []
        # A reduction that is still running when the interpreter exits may abort it.
        weakref.finalize(self, _wait, self._waits)
        self._under_way: tuple[torch.Tensor, Callable[[], object]] | None = None
        """Numbers (on the host) that are still being reduced, and what waits for them."""

    def saved(self) -> list[float] | None:
        """Return the sums of the last step, which a resumed run needs too; None before the first."""
        if self._under_way is None:
            return None
        numbers, wait = self._under_way
        wait()
        return list(numbers.tolist())

    def _exchange(self, sums: torch.Tensor) -> list[float] | None:
        """Return the previous sums, None for the first call, and begin to sum over all ranks. Collective.

        On a GPU the stream waits: NCCL does not guarantee that two communicators can work at once, so this sum is done
        before the next step uses the communicator of the gradients. The host waits one step later, for a copy that has
        arrived long before.
        """
        former = self.saved()
        if sums.device.type == "cpu":
            self._under_way = sums, dist.all_reduce(sums, group=self._group, async_op=True).wait
        else:
            dist.all_reduce(sums, group=self._group)
            copy, copied = sums.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._under_way = copy, copied.synchronize
        self._waits[:] = [self._under_way[1]]
        return former


class Losses(_Late):
    """Mean loss over ranks and micro-steps."""

    def __init__(self, device: Any, group: ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._sums = torch.zeros(6, dtype=torch.float64, device=device)

    def record(self, loss: Any) -> None:
        """Add the loss of a micro-step: a number, or a tensor, of which the mean is taken."""
        self._add(0, loss)

    def wait(self) -> None:
        """Wait until no reduction is running."""
        _wait(self._waits)

    def _add(self, place: int, value: Any) -> None:
        # A number is passed with the kernel launch; for a tensor the host would wait until it is copied.
        number = isinstance(value, int | float)
        self._sums[place] += value if number else torch.as_tensor(value).detach().mean().to(self._sums)
        self._sums[place + 1] += 1

    def report(self, metric: float) -> None:
        """Judge training by `metric` (less is better) instead of the loss of this step."""
        self._add(2, float(metric))

    def next(self, step_ms: float | None) -> tuple[float | None, float | None]:
        """Return the means of the previous step, and begin to sum those of the step that has just ended. Collective.

        Args:
            step_ms: milliseconds that the step has taken; None to leave it out.

        Returns:
            The mean loss (or the metric in its place) and the mean milliseconds; None if unknown.
        """
        if step_ms is not None:
            self._add(4, step_ms)
        sums, self._sums = self._sums, torch.zeros_like(self._sums)
        former = self._exchange(sums)
        if former is None:
            return None, None
        # The sums of losses, metrics and milliseconds, each followed by its count.
        loss, losses, metric, metrics, milliseconds, times = former
        judged = metric / metrics if metrics else loss / losses if losses else None
        return judged, milliseconds / times if times else None

    def load(self, saved: list[float] | None) -> None:
        """Restore the sums that `saved` returned."""
        self._under_way = None if saved is None else (torch.tensor(saved, dtype=torch.float64), lambda: None)


class BusyTimes(_Late):
    """Milliseconds for which each rank was busy in a measured step. An observing rank never waits for a late one."""

    def __init__(self, device: torch.device, group: ProcessGroup | None = None) -> None:
        super().__init__(group)
        self._device = device

    def next(self, milliseconds: float | None) -> list[float]:
        """Return the busy times of the previous measured step, and begin to gather those of this one. Collective.

        Args:
            milliseconds: busy time of this rank in this step; None if unknown.

        Returns:
            Milliseconds in order of ranks; empty if any is unknown.
        """
        every = torch.zeros(dist.get_world_size(self._group), dtype=torch.float64, device=self._device)
        # A number is passed with the kernel launch; a tensor would make the host wait for the GPU.
        every.narrow(0, dist.get_rank(self._group), 1).fill_(-1.0 if milliseconds is None else milliseconds)
        former = self._exchange(every)
        return former if former and min(former) >= 0 else []


def _wait(waits: list[Callable[[], object]]) -> None:
    # Another rank may be gone, and then nothing can be done about it.
    with contextlib.suppress(RuntimeError):
        for wait in waits:
            wait()


def largest_of_all(values: Sequence[float], device: Any, group: ProcessGroup | None = None) -> list[float]:
    """Return the largest of all ranks of each of `values`, inf if one is NaN. Collective."""
    known = [float("inf") if math.isnan(value) else value for value in values]
    found = torch.tensor(known, dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
    return list(found.tolist())


def new_run(group: ProcessGroup | None = None) -> str:
    """Return a unique name for a run, the same on all ranks of `group`, or of the job if None. Collective."""
    return of_first(uuid.uuid4().hex[:8], group)


class StepWatch:
    """Stopwatch of the running step, and the shapes of its batches.

    It runs from the beginning of each forward pass to the end of its backward pass, and during the optimizer step, so
    evaluations and a slow data loader are left out. On a GPU, it measures the time of the current stream, and the host
    waits for it only if the time is asked for.

    Args:
        device: the device of the model.
        clock: returns seconds.
    """

    def __init__(self, device: torch.device, clock: Callable[[], float] = time.perf_counter) -> None:
        self._on_gpu, self._clock = device.type == "cuda", clock
        self._started: Any = None
        self._parts: list[tuple[Any, Any]] = []
        self._shapes: list[Any] = []

    def start(self) -> None:
        """Run on, if it does not already."""
        if self._started is None:
            self._started = self._now()

    def stop(self) -> None:
        """Stop until `start`."""
        if self._started is not None:
            self._parts.append((self._started, self._now()))
            self._started = None

    def note_batch(self, batch: Any) -> None:
        """Note the shapes of the tensors in `batch`, nested in lists and dictionaries."""
        tensors = (leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor))
        self._shapes.append(tuple(tuple(tensor.shape) for tensor in tensors))

    def finish(self, timed: bool) -> tuple[float, Any]:
        """End the step. Return its milliseconds, NaN unless `timed`, and the shapes of its batches."""
        self.stop()
        parts, shapes = self._parts, tuple(self._shapes)
        self._parts, self._shapes = [], []
        if not timed:
            return float("nan"), shapes
        if not self._on_gpu:
            return 1e3 * sum(end - begin for begin, end in parts), shapes
        for _, end in parts[-1:]:
            end.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in parts), shapes

    def _now(self) -> Any:
        """Return the time, or an event on the current stream of a GPU."""
        if not self._on_gpu:
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
