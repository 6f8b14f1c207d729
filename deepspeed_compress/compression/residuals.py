"""Error-feedback buffers: values that a sender keeps between messages for every element of every parameter.

Buckets differ from run to run (DeepSpeed learns the order of gradients during the first steps), so values are addressed
by parameter ranges. They are stored contiguously per message layout, in the basis in which the message was written.
Access in another basis converts them. Values that move to another layout are converted to elements of parameters.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from deepspeed_compress.compression.codec import Batch
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.kernels.arguments import FIRST
from deepspeed_compress.compression.segments import (
    Layout,
    LayoutIndex,
    Range,
    Segment,
    cuts,
    layout_of,
    numel_of,
    placed,
    segments_of,
)
from deepspeed_compress.compression.transforms import Identity, Transform

ELEMENTS = Identity()
"""The basis of plain, untransformed elements."""

STORAGE: Mapping[str, Compressor] = {
    "fp32": Cast(torch.float32),
    "bf16": Cast(torch.bfloat16),
    "int8": Blockwise(8, 256),
}
"""Storage formats, with 4, 2 or about 1 bytes per element (LoCo, arXiv:2407.04480, uses 8 bits)."""


@dataclass
class _Buffer:
    """The values of one message in `basis`, encoded by the store's compressor."""

    payload: Tensor
    basis: Transform = ELEMENTS


@dataclass(eq=False)
class _Slot:
    """The buffers of one message, or of the messages of a batch, which are written together.

    `places` holds the first and the last byte, exclusive, of each message.
    """

    applied: _Buffer
    places: dict[Layout, tuple[int, int]]
    running: _Buffer | None = None
    written: bool = False

    @property
    def current(self) -> _Buffer:
        return self.running if self.written and self.running is not None else self.applied

    @property
    def is_joint(self) -> bool:
        """Return True if the buffers hold more than one message alone: other messages, or padding."""
        (first, *others) = self.places.values()
        return bool(others) or first != (0, self.applied.payload.numel())

    def payload(self, layout: Layout, of: _Buffer) -> Tensor:
        """Return the bytes of one message in a buffer of this slot."""
        return of.payload.narrow(0, self.places[layout][0], self.places[layout][1] - self.places[layout][0])

    def alone(self, layout: Layout) -> "_Slot":
        """Return a slot of one message that shares the memory of this one."""
        applied = _Buffer(self.payload(layout, self.applied), self.applied.basis)
        running = None if self.running is None else _Buffer(self.payload(layout, self.running), self.running.basis)
        return _Slot(applied, {layout: (0, applied.payload.numel())}, running, self.written)


class Residuals:
    """Store of one number per element that a rank sends: its residual, or a momentum.

    The optimizer may skip a step (non-finite gradients). If `transactional`, every write goes to a second buffer until
    `commit`, and `rollback` discards it. This doubles the memory but needs no copies. Otherwise, writes take effect at
    once.

    Args:
        dtype: storage format, a key of `STORAGE`.
        transactional: support `rollback`.
        on_host: keep everything in pinned host memory. Messages are copied one at a time in stream order; the host
            waits only when it reads the values itself.
        scaled: values have the units of the gradients and must follow the loss scale.
    """

    def __init__(self, dtype: str, transactional: bool, on_host: bool = False, scaled: bool = True) -> None:
        self.dtype = dtype
        self.storage = STORAGE[dtype]
        self.transactional = transactional
        self.on_host = on_host
        self.scaled = scaled
        self._slots: dict[Layout, _Slot] = {}
        self._homes = LayoutIndex()
        self._joint: WeakKeyDictionary[Batch, _Slot] = WeakKeyDictionary()

    def read(self, segments: Sequence[Segment], device: torch.device, basis: Transform = ELEMENTS) -> Tensor:
        """Return the values of the message made of `segments` in `basis`: a new flat fp32 tensor, initially zeros."""
        values = torch.zeros(sum(segment.numel for segment in segments), device=device)
        self.add_to(values, segments, 1.0, basis)
        return values

    def add_to(self, x: Tensor, segments: Sequence[Segment], factor: float, basis: Transform = ELEMENTS) -> None:
        """Add `factor` times the values of the message to `x` (flat fp32, of `segments` in `basis`), in place.

        Values stored in another basis are converted, but remain stored as they are, so that a skipped step adds no
        rounding.
        """
        held = self._slot(layout_of(segments), x.device).current
        if held.basis == basis.of(segments):
            self.storage.decompress_add(_on(x.device, held.payload), x, factor)
            return
        x.add_(basis.forward(self._elements(held, segments, x.device), segments), alpha=factor)

    def write(self, segments: Sequence[Segment], values: Tensor, basis: Transform = ELEMENTS) -> None:
        """Replace the values of the message by flat fp32 `values` in `basis`."""
        payload = self._target(self._slot(layout_of(segments), values.device), basis.of(segments)).payload
        payload.copy_(self._encoded(values), non_blocking=True)

    def _target(self, slot: _Slot, basis: Transform) -> _Buffer:
        """Return the buffer for the running step's new values of `slot`, in `basis`."""
        slot.written = True
        if self.transactional and slot.running is None:
            room = slot.applied.payload
            slot.running = _Buffer(torch.zeros_like(room, pin_memory=room.is_pinned()))
        slot.current.basis = basis
        return slot.current

    def buffers(
        self, segments: Sequence[Segment], device: torch.device, basis: Transform = ELEMENTS
    ) -> tuple[Tensor, Tensor] | None:
        """Return the message's values and the buffer for its new values, as an alternative to `write`.

        Both are flat fp32 or bf16, in `basis`, and may be the same tensor. Returns None if values are stored in another
        format or basis, or not on `device`.
        """
        if not isinstance(self.storage, Cast) or (self.on_host and device.type != "cpu"):
            return None
        slot, numel = self._slot(layout_of(segments), device), sum(segment.numel for segment in segments)
        own = basis.of(segments)
        if slot.current.basis != own:
            return None
        before = self.storage.elements(slot.current.payload, numel)
        return before, self.storage.elements(self._target(slot, own).payload, numel)

    def joint_buffers(self, batch: Batch, device: torch.device, basis: Transform) -> tuple[Tensor, Tensor] | None:
        """Return what `buffers` returns for all messages of `batch`, whose elements lie as in its flat tensor."""
        if not isinstance(self.storage, Cast) or (self.on_host and device.type != "cpu"):
            return None
        slot = self._joint.get(batch)
        if slot is None or slot.current.basis != basis:
            slot = self._join(batch, device, basis, self.storage.dtype.itemsize)
            if slot is None:
                return None
            self._joint[batch] = slot
        before = self.storage.elements(slot.current.payload, batch.numel)
        return before, self.storage.elements(self._target(slot, basis).payload, batch.numel)

    def _join(self, batch: Batch, device: torch.device, basis: Transform, itemsize: int) -> _Slot | None:
        """Return the slot of the messages of `batch`, or None if some are stored in another basis than `basis`."""
        layouts = [layout_of(part.segments) for part in batch.parts]
        begins = [row[FIRST] * itemsize for row in batch.table.values]
        ends = [begin + self.storage.payload_bytes(part.numel) for begin, part in zip(begins, batch.parts, strict=True)]
        places = dict(zip(layouts, zip(begins, ends, strict=True), strict=True))
        known = self._slots.get(layouts[0]) if layouts else None
        if known is not None and known.places == places and known.applied.payload.numel() == batch.numel * itemsize:
            return known if known.applied.basis == known.current.basis == basis else None
        slots = [self._slot(layout, device) for layout in layouts]
        if any(one.basis != basis for slot in slots for one in (slot.applied, slot.current)):
            return None
        room = torch.zeros(batch.numel * itemsize, dtype=torch.uint8, device=device)
        joint = _Slot(_Buffer(room, basis), places, written=any(slot.written for slot in slots))
        if joint.written and self.transactional:
            joint.running = _Buffer(torch.zeros_like(room), basis)
        for layout, slot in zip(layouts, slots, strict=True):
            joint.payload(layout, joint.applied).copy_(slot.applied.payload)
            if joint.running is not None:
                joint.payload(layout, joint.running).copy_(slot.current.payload)
            _record_use(slot)
            self._slots[layout] = joint
        return joint

    def holds(self, segments: Sequence[Segment]) -> bool:
        """Return True if any elements of `segments` were ever written."""
        return bool(self._homes.touching(layout_of(segments)))

    def written(self, segments: Sequence[Segment]) -> bool:
        """Return True if the running step has written the message made of `segments`."""
        slot = self._slots.get(layout_of(segments))
        return slot is not None and slot.written

    def _encoded(self, values: Tensor) -> Tensor:
        payload = torch.empty(self.storage.payload_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        self.storage.compress(values, payload, 0)
        return payload

    def _decoded(self, payload: Tensor, numel: int) -> Tensor:
        values = torch.zeros(numel, device=payload.device)
        self.storage.decompress_add(payload, values, 1.0)
        return values

    def _elements(self, held: _Buffer, segments: Sequence[Segment], device: torch.device) -> Tensor:
        """Return the values of the message made of `segments` as elements of parameters, flat fp32 on `device`."""
        payload = _on(device, held.payload)
        return held.basis.inverse(self._decoded(payload, sum(segment.numel for segment in segments)), segments)

    def _slot(self, layout: Layout, device: torch.device) -> _Slot:
        """Return the slot of this message alone, which leaves its batch."""
        slot = self._slots.get(layout)
        if slot is None:
            return self._adopt(layout, device)
        if slot.is_joint:
            self._slots.update({one: slot.alone(one) for one in slot.places})
            self._forget_batches(slot)
        return self._slots[layout]

    def _forget_batches(self, slot: _Slot) -> None:
        for batch in [batch for batch, joint in self._joint.items() if joint is slot]:
            del self._joint[batch]

    def _adopt(self, layout: Layout, device: torch.device) -> _Slot:
        """Create a slot for a new layout from the values that its elements had in other layouts.

        Those layouts are dissolved. Elements that the new layout does not contain become messages of single ranges.
        """
        self._wait_for_copies()
        fresh = torch.zeros(1, numel_of(layout), device=device)
        for home in self._homes.touching(layout):
            values = self._remove(home, device)
            for (name, begin, _), start, first, last, target in cuts(home, layout):
                part = values[:, start + first - begin : start + last - begin]
                if target is None:
                    self._settle(((name, first, last - first),), part)
                    continue
                # As soon as this step has written a part, the whole message is read from the values of this step.
                fresh = fresh.repeat(2, 1) if len(part) > len(fresh) else fresh
                fresh[:, target : target + last - first] = part
        return self._settle(layout, fresh)

    def _remove(self, layout: Layout, device: torch.device) -> Tensor:
        """Drop a message, and return its elements: fp32 [1, numel], or [2, numel] if the running step has written any.

        The first row holds those after the last applied step, the second those of the running step.
        """
        slot, segments = self._slot(layout, device), segments_of(layout)
        del self._slots[layout]
        self._forget_batches(slot)
        self._homes.remove(layout)
        buffers = [slot.applied, slot.current] if slot.written and self.transactional else [slot.applied]
        values = torch.stack([self._elements(buffer, segments, device) for buffer in buffers])
        _record_use(slot)
        return values

    def _settle(self, layout: Layout, values: Tensor) -> _Slot:
        """Create a slot with `values`, as `_remove` returns them, and register it for the ranges of `layout`."""
        buffers = [_Buffer(self._stored(self._encoded(row))) for row in values]
        applied, running = buffers[0], buffers[1] if len(buffers) > 1 else None
        slot = _Slot(applied, {layout: (0, applied.payload.numel())}, running, running is not None)
        self._register(layout, slot)
        return slot

    def _stored(self, payload: Tensor) -> Tensor:
        return payload.to("cpu", non_blocking=True) if self.on_host else payload

    def _wait_for_copies(self) -> None:
        """Wait for pending copies from a GPU to the host."""
        if self.on_host and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _register(self, layout: Layout, slot: _Slot) -> None:
        self._slots[layout] = slot
        self._homes.add(layout)

    def commit(self) -> None:
        """Keep the values that the running step wrote, because the optimizer applied the step."""
        for slot in dict.fromkeys(self._slots.values()):
            if slot.written and slot.running is not None:
                slot.applied, slot.running = slot.running, slot.applied
            slot.written = False

    def rollback(self) -> None:
        """Discard the values of the running step, because it was skipped."""
        for slot in self._slots.values():
            slot.written = False

    def prune(self) -> None:
        """Drop the messages that the running step has not written: after loading, those that other ranks own."""
        for layout in [layout for layout, slot in self._slots.items() if not slot.written]:
            del self._slots[layout]
            self._homes.remove(layout)
        self._joint.clear()

    def scale(self, factor: float) -> None:
        """Multiply the values by `factor` if they follow the loss scale."""
        self._wait_for_copies()
        for layout, slot in self._slots.items() if self.scaled else ():
            payload = slot.payload(layout, slot.applied)
            payload.copy_(self._encoded(self._decoded(payload, numel_of(layout)).mul_(factor)))

    def clear(self) -> None:
        """Drop all values."""
        self._slots.clear()
        self._homes.clear()
        self._joint.clear()

    def square_norms(self) -> list[Tensor]:
        """Return one sum of squares (fp64 []) per message of this rank, including those that the running step wrote.

        Waits for the GPU if residuals are in host memory.
        """
        self._wait_for_copies()
        # Uncompressed formats are read in place, without decoding.
        read = self.storage.elements if isinstance(self.storage, Cast) else self._decoded
        payloads = [(slot.payload(layout, slot.current), numel_of(layout)) for layout, slot in self._slots.items()]
        return [for_device(one.device).square_norm(read(one, numel)) for one, numel in payloads]

    def items(self) -> Iterator[tuple[Range, Tensor]]:
        """Yield every range with its applied values, flat fp32."""
        self._wait_for_copies()
        for layout, slot in self._slots.items():
            held = _Buffer(slot.payload(layout, slot.applied), slot.applied.basis)
            values = self._elements(held, segments_of(layout), held.payload.device)
            for piece, position in placed(layout):
                yield piece, values[position : position + piece[2]]

    def payloads(self) -> Iterator[tuple[Layout, Tensor]]:
        """Yield every message layout with its applied values as they are stored (uint8), for `restore`."""
        self._wait_for_copies()
        for layout, slot in self._slots.items():
            yield layout, slot.payload(layout, slot.applied)

    def bases(self) -> dict[Layout, Transform]:
        """Return the basis of the applied values of every message layout, in the order of `payloads`."""
        return {layout: slot.applied.basis for layout, slot in self._slots.items()}

    def restore(
        self,
        payloads: Mapping[Layout, Tensor],
        device: torch.device,
        bases: Mapping[Layout, Transform] = MappingProxyType({}),
    ) -> None:
        """Replace all values by the `payloads` of a store with the same storage format, bit for bit.

        `bases` has the basis of every payload that does not hold plain elements.
        """
        self.clear()
        for layout, payload in payloads.items():
            kept = _Buffer(self._stored(payload.to(device, copy=True)), bases.get(layout, ELEMENTS))
            self._register(layout, _Slot(kept, {layout: (0, payload.numel())}))

    def add(self, values: Iterable[tuple[Range, Tensor]], device: torch.device, factor: float = 1.0) -> None:
        """Replace the applied values of the given ranges by `factor` times themselves plus flat fp32 `values`.

        Must be called outside of a step. With a `factor` of 0, `values` replace them.
        """
        for (name, begin, numel), more in values:
            segments, total = (Segment(name, begin, numel, 0, 0),), more.to(device, torch.float32, copy=True)
            self.add_to(total, segments, factor)
            self.write(segments, total)
        self.commit()


def _record_use(slot: _Slot) -> None:
    """Keep the memory of `slot`, which this stream reads while it is freed, possibly allocated on another stream."""
    for buffer in (slot.applied, slot.running):
        if buffer is not None and buffer.payload.is_cuda:
            buffer.payload.record_stream(torch.cuda.current_stream(buffer.payload.device))


def _on(device: torch.device, payload: Tensor) -> Tensor:
    """Return `payload` on `device`. The host waits for values that it reads itself."""
    return payload.to(device, non_blocking=device.type != "cpu")
