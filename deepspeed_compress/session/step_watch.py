"""Time that the running optimizer step takes by itself, without what a program does between steps and micro-steps."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


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
        tensors = (one for one in tree_leaves(batch) if isinstance(one, torch.Tensor))
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
