"""Counters and clocks of one optimizer step, and the bytes that ring algorithms send.

torch is imported only where it is needed, so names can be used without it.
"""

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock, get_ident
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PHASES = ("compress", "communicate", "decompress")
_PARTS = ("sent", "weights", "pipeline", "tied", "tensor", "experts", "sequence", "islands")
KINDS = tuple(f"bytes_{part}" for part in _PARTS)
"""Kinds of bytes that leave a rank: gradients, weights, activations and their gradients between pipeline stages,
gradients of tied weights, collectives of tensor-parallel layers, exchanges between ranks that share experts,
all-to-alls of sequence parallelism, and exchanges between islands. They do not overlap."""
SAVED = tuple(f"bytes_{part}_saved" for part in ("weights", "pipeline", "tensor", "experts", "sequence"))
"""Bytes that DeepSpeed alone would have sent in addition to those of a kind."""


@dataclass
class Meter:
    """Sums over the messages of one step on this rank; `reset` begins the next step. Other threads may count bytes too.

    Bytes are payload bytes that leave the rank, by the `KINDS`. Times are wall-clock milliseconds on the CPU, of the
    thread that begins the steps, because training does not wait for others. On a GPU, they are elapsed stream time,
    taken only in `timed` steps and read by `milliseconds`, which waits for the stream.

    Attributes:
        timed: the step is reported.
        bytes_raw: the uncompressed part of `bytes_sent`.
        bytes_uncompressed: bytes that DeepSpeed alone would have sent in place of `bytes_sent`.
        bytes_weights_saved: bytes that uncompressed weights would have taken in addition to `bytes_weights`.
        bytes_exact: bytes of weights that were made exact between steps, for a checkpoint; none of the `KINDS`, because
            no step needs them.
        bytes_pipeline_saved: bytes that DeepSpeed alone would have sent in addition to `bytes_pipeline`.
        bytes_tensor_saved: bytes that DeepSpeed alone would have sent in addition to `bytes_tensor`.
        bytes_experts_saved: bytes that DeepSpeed alone would have sent in addition to `bytes_experts`.
        bytes_sequence_saved: bytes that DeepSpeed alone would have sent in addition to `bytes_sequence`.
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
    bytes_experts: int = 0
    bytes_sequence: int = 0
    bytes_islands: int = 0
    bytes_exact: int = 0
    bytes_pipeline_saved: int = 0
    bytes_tensor_saved: int = 0
    bytes_experts_saved: int = 0
    bytes_sequence_saved: int = 0
    cosine: Callable[[], float] | None = None
    """Returns the sampled cosine; the call waits for the GPU."""
    islands_cosine: Callable[[], float] | None = None
    """Returns the cosine of the exchange between islands after the previous step."""
    _elapsed: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    _events: "list[tuple[str, torch.cuda.Event, torch.cuda.Event]]" = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)
    _thread: int = field(default_factory=get_ident, repr=False, compare=False)

    def count(self, kind: str, size: int) -> None:
        """Add `size` to the bytes of `kind`, one of `KINDS`."""
        with self._lock:
            setattr(self, kind, getattr(self, kind) + size)

    def count_engine_reduction(self, size: int) -> None:
        """Add `size` bytes of gradients that the engine reduces itself: sent, and uncompressed."""
        self.bytes_uncompressed += size
        self.bytes_sent = self.bytes_uncompressed

    @contextmanager
    def counting_exact_weights(self) -> Iterator[None]:
        """Count weights that are sent in a block as `bytes_exact`, and leave out its times."""
        weights, elapsed, events = self.bytes_weights, dict(self._elapsed), list(self._events)
        yield
        self.bytes_exact += self.bytes_weights - weights
        self.bytes_weights, self._elapsed, self._events = weights, elapsed, events

    @contextmanager
    def phase(self, name: str, device: "torch.device") -> Iterator[None]:
        """Time a block as `name`, one of `PHASES`, and record it in torch's profiler."""
        import torch

        with torch.profiler.record_function(f"deepspeed_compress.{name}"):
            if device.type != "cuda":
                begin = time.perf_counter()
                yield
                if get_ident() == self._thread:
                    self._elapsed[name] += 1e3 * (time.perf_counter() - begin)
            elif self.timed:
                first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                first.record()
                yield
                last.record()
                self._events.append((name, first, last))
            else:
                yield

    def sizes(self) -> dict[str, int]:
        """Return all byte counters by field name."""
        return {name: value for name, value in vars(self).items() if name.startswith("bytes_")}

    def milliseconds(self) -> dict[str, float]:
        """Return the elapsed milliseconds by phase."""
        for name, first, last in self._events:
            # Skip the synchronization if the event has completed.
            if not last.query():  # type: ignore[no-untyped-call]
                last.synchronize()
            self._elapsed[name] += first.elapsed_time(last)
        self._events.clear()
        return dict(self._elapsed)

    def reset(self, timed: bool) -> None:
        """Begin a step, with or without GPU times."""
        self.__dict__.update(vars(Meter(timed=timed)))


def ring_reduce_scatter(size: int, ranks: int) -> int:
    """Return the bytes that each of `ranks` sends to reduce-scatter a buffer of `size` bytes, as gloo and NCCL do."""
    return size * (ranks - 1) // ranks


ring_all_gather = ring_reduce_scatter
"""Return the bytes that each rank sends to all-gather a buffer of `size` bytes, of which it has its share."""


def ring_all_reduce(size: int, ranks: int) -> int:
    """Return the bytes of a reduce-scatter followed by an all-gather."""
    return 2 * ring_reduce_scatter(size, ranks)


def peak_memory(device: "torch.device") -> int:
    """Return the peak memory so far in bytes: allocated on a GPU, resident on the CPU."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    # ru_maxrss is in kilobytes, except on macOS.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
