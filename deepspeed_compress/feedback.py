"""Error feedback: what compression left out of one message is added to the next one.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD" (arXiv:1901.09847, algorithm 1, without the step size):
p = g + e; send C(p); e = p - C(p). Residuals therefore live in the units of the gradients (the loss scale included).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_compress.buckets import Segment
from deepspeed_compress.compressors.base import Compressor

__all__ = ["Residuals", "WithFeedback", "WithoutFeedback"]

Range = tuple[str, int, int]
"""Elements of a parameter: (name, begin, numel)."""


@dataclass
class _Slot:
    """The residual of one message: what the last applied step left, and what the running step has written."""

    applied: Tensor
    running: Tensor | None = None
    written: bool = False

    @property
    def current(self) -> Tensor:
        return self.running if self.written and self.running is not None else self.applied

    def part(self, start: int, stop: int) -> "_Slot":
        """Elements `start` to `stop` - 1, as views."""
        running = self.running[start:stop] if self.running is not None else None
        return _Slot(self.applied[start:stop], running, self.written)


class Residuals:
    """Residuals by parameter range, kept contiguous for each message layout.

    A step may be skipped by the optimizer (non-finite gradients). With `transactional` every write goes to a second
    buffer until `commit`, and `rollback` forgets it: twice the memory, no copies. Without it writes are final.

    The first message of a layout allocates its buffer. When buckets form differently later (DeepSpeed learns the
    order of gradients during the first steps), the elements move to the new layout with their values, however the
    parameters were cut before.
    """

    def __init__(self, dtype: torch.dtype, transactional: bool) -> None:
        self.dtype = dtype
        self.transactional = transactional
        self._slots: dict[tuple[Range, ...], _Slot] = {}
        self._home: dict[str, dict[Range, tuple[tuple[Range, ...], int]]] = {}

    def read(self, segments: Sequence[Segment], device: torch.device) -> Tensor:
        """The residual of the message made of `segments`, flat, in `dtype`; zeros at first. Do not change it."""
        return self._slot(segments, device).current

    def write(self, segments: Sequence[Segment], values: Tensor) -> None:
        """Replace the residual of the message by flat `values`."""
        slot = self._slot(segments, values.device)
        if not self.transactional:
            slot.applied.copy_(values)
            return
        if slot.running is None:
            slot.running = torch.empty_like(slot.applied)
        slot.running.copy_(values)
        slot.written = True

    def _slot(self, segments: Sequence[Segment], device: torch.device) -> _Slot:
        layout = tuple((segment.parameter, segment.begin, segment.numel) for segment in segments)
        slot = self._slots.get(layout)
        return slot if slot is not None else self._adopt(layout, device)

    def _adopt(self, layout: tuple[Range, ...], device: torch.device) -> _Slot:
        """Make a slot for a new layout from the values that its elements had elsewhere.

        Layouts that lose elements are dissolved into single ranges, so that every element keeps one home.
        """
        size = sum(numel for _, _, numel in layout)
        slot = _Slot(torch.zeros(size, dtype=self.dtype, device=device))
        position = 0
        for piece in layout:
            for former in self._overlapping(piece):
                self._dissolve(self._home[former[0]][former][0])
                self._take(former, piece, slot, position)
            position += piece[2]
        self._settle(layout, slot)
        return slot

    def _overlapping(self, piece: Range) -> list[Range]:
        """The known ranges that share elements with `piece`."""
        name, begin, numel = piece
        return [known for known in self._home.get(name, {}) if known[1] < begin + numel and begin < known[1] + known[2]]

    def _settle(self, layout: tuple[Range, ...], slot: _Slot) -> None:
        """Make `slot` the home of the ranges of `layout`."""
        self._slots[layout] = slot
        position = 0
        for piece in layout:
            self._home.setdefault(piece[0], {})[piece] = (layout, position)
            position += piece[2]

    def _dissolve(self, layout: tuple[Range, ...]) -> None:
        slot = self._slots.pop(layout)
        position = 0
        for piece in layout:
            self._settle((piece,), slot.part(position, position + piece[2]))
            position += piece[2]

    def _take(self, former: Range, piece: Range, target: _Slot, position: int) -> None:
        """Move what `former`, a layout of its own, shares with `piece` into `target`, where `piece` is at `position`.

        What is left of `former` on either side becomes ranges of their own.
        """
        name, begin, numel = former
        end = begin + numel
        source = self._slots.pop((former,))
        del self._home[name][former]
        first, last = max(begin, piece[1]), min(end, piece[1] + piece[2])
        _copy_slot(source.part(first - begin, last - begin), target, position + first - piece[1])
        for start, stop in ((begin, first), (last, end)):
            if start < stop:
                self._settle(((name, start, stop - start),), source.part(start - begin, stop - begin))

    def commit(self) -> None:
        """The optimizer applied the step: what it wrote becomes the residual."""
        for slot in self._slots.values():
            if slot.written and slot.running is not None:
                slot.applied, slot.running = slot.running, slot.applied
            slot.written = False

    def rollback(self) -> None:
        """The optimizer skipped the step: as if it had not been."""
        for slot in self._slots.values():
            slot.written = False

    def scale(self, factor: float) -> None:
        """Follow a change of the loss scale: residuals are in scaled units."""
        for slot in self._slots.values():
            slot.applied.mul_(factor)

    def square_norm(self) -> float:
        """Sum of squares over this rank's residuals."""
        return sum(float(slot.current.float().square().sum()) for slot in self._slots.values())

    def items(self) -> Iterable[tuple[Range, Tensor]]:
        """Every range with its applied residual, as views."""
        for ranges in self._home.values():
            for piece, (layout, position) in ranges.items():
                yield piece, self._slots[layout].applied[position : position + piece[2]]

    def load(self, values: Mapping[Range, Tensor], device: torch.device) -> None:
        """Replace everything by `values`, one flat tensor a range."""
        self._slots.clear()
        self._home.clear()
        for piece, value in values.items():
            self._settle((piece,), _Slot(value.to(device, self.dtype, copy=True)))


def _copy_slot(source: _Slot, target: _Slot, position: int) -> None:
    """Move the elements of `source` into `target` at `position`, a running step included."""
    part = slice(position, position + source.applied.numel())
    target.applied[part] = source.applied
    if source.written and target.running is None:
        target.running, target.written = target.applied.clone(), True
    if target.running is not None:
        # Also where this step has not written yet: the whole slot is read from `running` from now on.
        target.running[part] = source.current


@dataclass(frozen=True)
class WithoutFeedback:
    """What the compressor leaves out is lost."""

    compressor: Compressor

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int) -> None:
        """Encode `x` (flat fp32, the elements of `segments`) into `out` (uint8)."""
        self.compressor.compress(x, out, key)


@dataclass(frozen=True)
class WithFeedback:
    """What the compressor leaves out is added to the next message of the same elements."""

    compressor: Compressor
    residuals: Residuals

    def encode(self, x: Tensor, segments: Sequence[Segment], out: Tensor, key: int) -> None:
        """Encode `x` (flat fp32, the elements of `segments`, overwritten) plus their residual into `out` (uint8).

        decoded + new residual == x + old residual to rounding, and exactly where the subtraction is exact.
        """
        x.add_(self.residuals.read(segments, x.device))
        self.compressor.compress(x, out, key)
        self.compressor.decompress_add(out, x, -1.0)
        self.residuals.write(segments, x)
