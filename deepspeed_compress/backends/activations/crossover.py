"""Compressed messages of activations compared with plain ones, on the link at hand.

Encoding and decoding cost time that fewer bytes must save. They take the same time on any link, so a measurement on one
link tells from which rate on compression costs more than it saves.
"""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.messages import (
    ActivationMessages,
    AllToAllCall,
    CompressedAllToAll,
    activation_codec,
    gradient_codec,
)
from deepspeed_compress.backends.activations.sums import compressed_sum
from deepspeed_compress.backends.activations.tokens import Route, make_leg
from deepspeed_compress.collectives.exchange import exchange
from deepspeed_compress.collectives.probes import seconds_of
from deepspeed_compress.collectives.reducer import Run, StepClock, chunk_numel
from deepspeed_compress.config import Activations
from deepspeed_compress.config.numbers import size
from deepspeed_compress.config.problems import value_at
from deepspeed_compress.monitor import Event, Meter

Kind = Literal["tensor", "pipeline", "experts", "sequence"]
NUMEL: Mapping[str, int] = {"cpu": 2**18, "cuda": 2**22}
"""Elements of the messages that are measured at the start, by type of device."""
WIDTH = 1024
"""Largest number of elements of a token."""
CALLS = 4
"""Calls of each form, of which the first connects and compiles, and is not counted."""


@dataclass(frozen=True)
class Crossover:
    """Times of one message, on the slowest rank of a group.

    Attributes:
        kind: kind of parallelism.
        bits: bits per element of the compressed message, one number for each way that it takes.
        numel: number of elements on each way.
        plain: seconds of the uncompressed message.
        compressed: seconds of the compressed message, with encoding and decoding.
        coding: seconds of encoding and decoding.
        sent: bytes that a rank sends, compressed.
        saved: bytes that compression saves.
    """

    kind: Kind
    bits: Sequence[int]
    numel: int
    plain: float
    compressed: float
    coding: float
    sent: float
    saved: float

    @property
    def pays(self) -> bool:
        """Return True if compression saves time on this link."""
        return self.compressed < self.plain

    @property
    def rate(self) -> float:
        """Return the bytes per second of a rank's link at which encoding takes the time that fewer bytes save."""
        return max(0.0, self.saved) / self.coding if self.coding else float("inf")

    @property
    def figures(self) -> dict[str, float]:
        """Return the figures of an event."""
        return {
            "compressed_ms": 1e3 * self.compressed,
            "uncompressed_ms": 1e3 * self.plain,
            "pays_below_gbit_per_s": 8e-9 * self.rate,
        }

    def event(self, step: int) -> Event:
        """Return the event that compression costs time on this link."""
        return Event(step, f"crossover_{self.kind}", str(self), self.figures, "", "")

    def __str__(self) -> str:
        figures = self.figures
        verdict = "" if self.pays else f", so bits of activations.{self.kind} cost time on this link"
        bits = " and ".join(map(str, self.bits))
        return (
            f"{_MESSAGES[self.kind].name} of {self.numel:,} elements in {bits} bits sends {size(self.sent)}, "
            f"uncompressed {size(self.sent + self.saved)}, and takes {figures['compressed_ms']:.3g} ms, uncompressed "
            f"{figures['uncompressed_ms']:.3g}{verdict}; it saves time below about "
            f"{figures['pays_below_gbit_per_s']:.2g} Gbit/s per rank"
        )


_Forms = tuple[Callable[[], object], Callable[[], object]]
"""Functions that transfer a message uncompressed, and compressed."""


def _sums(group: ProcessGroup, x: Tensor, bits: int, run: Run) -> _Forms:
    total = compressed_sum(group, activation_codec(bits), run)
    return lambda: group.allreduce([x]).wait(), lambda: total(x)


def _shifts(group: ProcessGroup, x: Tensor, bits: int, run: Run) -> _Forms:
    """Let every rank send a message to the next one, and the last one to the first."""
    messages, received = ActivationMessages(gradient_codec(bits), run.meter), torch.empty_like(x)

    plain = partial(_shift, group, x.view(torch.uint8), received.view(torch.uint8))
    return plain, partial(_compressed_shift, group, messages, x, received)


def _compressed_shift(group: ProcessGroup, messages: ActivationMessages, x: Tensor, received: Tensor) -> None:
    payload, arrived = messages.encode(x), messages.payload(x)
    _shift(group, payload, arrived)
    messages.decode(received, arrived)


def _shift(group: ProcessGroup, sent: Tensor, received: Tensor) -> None:
    nothing = sent.new_empty(0)
    outgoing, incoming = [nothing] * group.size(), [nothing] * group.size()
    outgoing[(group.rank() + 1) % group.size()] = sent
    incoming[(group.rank() - 1) % group.size()] = received
    exchange(group, outgoing, incoming)


def _all_to_alls(group: ProcessGroup, x: Tensor, bits: int, run: Run) -> _Forms:
    call = AllToAllCall(torch.empty_like(x), x, group=group)
    messages = ActivationMessages(activation_codec(bits), run.meter, "bytes_sequence_saved")
    compressed = CompressedAllToAll(group, messages)
    return lambda: group.alltoall_base(call.output, x, [], []).wait(), lambda: compressed.start(call).wait()


def _exchanges(group: ProcessGroup, x: Tensor, bits: int, run: Run) -> _Forms:
    width = _token_width(x.numel(), group.size())
    equal = [x.numel() // width // group.size()] * group.size()
    route, received = Route(group, tuple(equal), tuple(equal)), torch.empty_like(x)
    compressed = partial(make_leg(bits, run.meter).tokens, x.view(-1, width), route)
    return lambda: group.alltoall_base(received, x, [], []).wait(), compressed


def _token_width(numel: int, ranks: int) -> int:
    """Return the number of elements of a token, if each of some ranks gets one or more of `numel` elements."""
    return max(1, min(WIDTH, numel // ranks))


@dataclass(frozen=True)
class _Message:
    """A kind of message.

    Attributes:
        name: name in texts.
        paths: places of its bits in `activations`, one for each way that it takes.
        forms: returns both forms of one way.
    """

    name: str
    paths: Sequence[tuple[str, ...]]
    forms: Callable[[ProcessGroup, Tensor, int, Run], _Forms]


_MESSAGES: Mapping[Kind, _Message] = {
    "tensor": _Message("a sum of tensor parallelism", [("tensor", "bits"), ("tensor", "backward_bits")], _sums),
    "pipeline": _Message("a message between stages", [("pipeline", "bits")], _shifts),
    "experts": _Message(
        "an exchange of tokens", [("experts", "dispatch", "bits"), ("experts", "combine", "bits")], _exchanges
    ),
    "sequence": _Message("an all-to-all", [("sequence", "bits")], _all_to_alls),
}


def measure(
    group: ProcessGroup, kind: Kind, bits: Sequence[int], numel: int, dtype: torch.dtype, device: torch.device
) -> Crossover:
    """Measure both forms of a message. Collective; waits for the GPU.

    Args:
        group: the ranks that share layers, experts or sequences, or the stages of a pipeline.
        kind: kind of parallelism.
        bits: bits per element of the compressed message, one number for each way that it takes.
        numel: number of elements on each way, which is rounded to equal numbers of tokens for all ranks.
        dtype: type of the activations.
        device: device of the activations.
    """
    unit = _token_width(numel, group.size()) * group.size()
    numel = max(1, numel // unit) * unit
    x = torch.linspace(-1, 1, numel, device=device).to(dtype)
    run = Run(StepClock(), Meter(), chunk_numel=chunk_numel(device))
    ways = [_MESSAGES[kind].forms(group, x, one, run) for one in bits]
    plain, compressed = (partial(_call_all, calls) for calls in zip(*ways, strict=True))
    calls = [_timed(compressed, group, run.meter, device) for _ in range(CALLS)][1:]
    sizes = run.meter.sizes()
    seconds = [[seconds_of(plain, group, device) for _ in range(CALLS)][1:], *zip(*calls, strict=True)]
    slowest = torch.tensor([statistics.median(one) for one in seconds], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    times = dict(zip(("plain", "compressed", "coding"), slowest.tolist(), strict=True))
    saved = sizes[f"bytes_{kind}_saved"]
    # Messages between stages are counted where they are sent.
    sent = sizes[f"bytes_{kind}"] or len(bits) * x.nbytes - saved
    return Crossover(kind, bits, numel, **times, sent=sent, saved=saved)


def measure_kinds(
    activations: Activations, groups: Mapping[Kind, ProcessGroup], dtype: torch.dtype, device: torch.device
) -> list[Crossover]:
    """Measure every kind that compresses messages, on the `groups` that this rank belongs to; see `measure`."""
    settings, found = activations.model_dump(), []
    for kind, group in groups.items():
        ways = [value_at(settings, path) for path in _MESSAGES[kind].paths]
        bits = [one for one in ways if one is not None]
        if bits and group.size() > 1:
            found.append(measure(group, kind, bits, NUMEL[device.type], dtype, device))
    return found


def _call_all(calls: Iterable[Callable[[], object]]) -> None:
    for call in calls:
        call()


def _timed(call: Callable[[], object], group: ProcessGroup, meter: Meter, device: torch.device) -> tuple[float, float]:
    """Return the seconds of a call, and those of them that it encodes and decodes."""
    meter.reset(timed=True)
    seconds, phases = seconds_of(call, group, device), meter.milliseconds()
    return seconds, (phases["compress"] + phases["decompress"]) / 1e3
