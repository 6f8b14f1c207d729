"""Counters and clocks of one optimizer step. torch is imported where it is used: names of figures need none."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["KINDS", "PHASES", "Meter"]

PHASES = ("compress", "communicate", "decompress")
KINDS = ("bytes_sent", "bytes_weights", "bytes_pipeline", "bytes_tied", "bytes_tensor", "bytes_islands")
"""The bytes that leave a rank, by kind of traffic: gradients, weights, activations and their gradients between stages,
gradients of tied weights, collectives of split layers, exchanges between islands. No two overlap."""


@dataclass
class Meter:
    """Sums over the messages of one step on this rank; `reset` begins the next step.

    Bytes are payload bytes that leave the rank, of the `KINDS`; `bytes_raw` is a part of `bytes_sent`, and
    `bytes_uncompressed` what would have been sent in its place; `bytes_weights_saved` would have been sent for weights
    besides. `timed` is set in steps that are reported. Times are
    wall-clock milliseconds on CPU and elapsed stream time on GPU, where they are taken only in such steps and read in
    `milliseconds`, which waits for the stream.
    """

    timed: bool = True
    bytes_sent: int = 0
    bytes_raw: int = 0
    bytes_uncompressed: int = 0
    bytes_weights: int = 0
    bytes_weights_saved: int = 0
    bytes_pipeline: int = 0
    bytes_tied: int = 0
    bytes_tensor: int = 0
    bytes_islands: int = 0
    cosine: Callable[[], float] | None = None
    """Gives it, and waits for a GPU then."""
    islands_cosine: Callable[[], float] | None = None
    """The same of the exchange between islands after the step before."""
    _elapsed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _events: "list[tuple[str, torch.cuda.Event, torch.cuda.Event]]" = field(default_factory=list)

    def count(self, kind: str, size: int) -> None:
        """Add `size` to the bytes of `kind`, one of `KINDS`."""
        setattr(self, kind, getattr(self, kind) + size)

    @contextmanager
    def phase(self, name: str, device: "torch.device") -> Iterator[None]:
        """Time a block as `name`, one of `PHASES`, and show it to torch's profiler."""
        import torch

        with torch.profiler.record_function(f"deepspeed_compress.{name}"), self._timed(name, device):
            yield

    @contextmanager
    def _timed(self, name: str, device: "torch.device") -> Iterator[None]:
        if device.type != "cuda":
            begin = time.perf_counter()
            yield
            self._elapsed[name] += 1e3 * (time.perf_counter() - begin)
            return
        if not self.timed:
            yield
            return
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        yield
        last.record()
        self._events.append((name, first, last))

    def sizes(self) -> dict[str, int]:
        """All bytes, by field."""
        return {name: value for name, value in vars(self).items() if name.startswith("bytes_")}

    def milliseconds(self) -> dict[str, float]:
        """Elapsed time by phase."""
        for name, first, last in self._events:
            # What has been waited for elsewhere need not be waited for again.
            if not last.query():  # type: ignore[no-untyped-call]
                last.synchronize()
            self._elapsed[name] += first.elapsed_time(last)
        self._events.clear()
        return dict(self._elapsed)

    def reset(self, timed: bool) -> None:
        """Begin a step, with or without times on GPU."""
        fresh = Meter(timed=timed)
        self.__dict__.update(fresh.__dict__)
