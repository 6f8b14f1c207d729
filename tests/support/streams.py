"""Detection of races between the streams of a GPU, on a machine without one.

Operations run at once on the CPU, and are recorded as work of the current stream: what it reads, writes and frees. Each
stream has a vector clock, which says how much of every stream's work is done when its next operation begins (Fidge
1988). Memory is identified by storages and the bytes within them. C++ kernels are not visible, so plain torch must be
used.
"""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict["Stream", int]
Bytes = tuple[int, int]
"""First byte of a tensor in its storage, and the one after its last."""


class Stream:
    """Stand-in for `torch.cuda.Stream`, with the methods that DeepSpeed and this package use."""

    def __init__(self, device: "Device", name: str) -> None:
        self.device = device
        self.name = name
        self.clock: Clock = {self: 0}
        self.freed: list[_Memory] = []
        """Freed memory that the next allocation may reuse."""

    def __repr__(self) -> str:
        return self.name

    def wait_stream(self, other: "Stream") -> None:
        self.wait_clock(other.clock)

    def wait_event(self, event: "Event") -> None:
        self.wait_clock(event.clock)

    def wait_clock(self, clock: Clock) -> None:
        _advance(self.clock, clock)

    def synchronize(self) -> None:
        self.device.host_waits(self.clock)


class Event:
    """Stand-in for `torch.cuda.Event`, with the methods that DeepSpeed and this package use."""

    def __init__(self, device: "Device", **_: object) -> None:
        self.device = device
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = dict((stream or self.device.current).clock)

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.device.host_waits(self.clock)

    def elapsed_time(self, other: "Event") -> float:
        return 0.0


@dataclass(eq=False)
class _Memory:
    """A storage that was allocated on stream `home`, with the last use of its parts by every stream."""

    home: Stream
    made_by: str
    reads: dict[Bytes, Clock] = field(default_factory=dict)
    writes: dict[Bytes, Clock] = field(default_factory=dict)
    recorded: set[Stream] = field(default_factory=set)
    awaited: Clock = field(default_factory=dict)
    """Work for which the allocator waits when the storage is freed."""


class Device(TorchDispatchMode):
    """Context that records all operations of this thread. `problems` are the races, each described once."""

    def __init__(self) -> None:
        super().__init__()
        self.problems: dict[str, None] = {}
        self.streams: list[Stream] = []
        self.default = self.stream("default")
        self.current = self.default
        self._memories: dict[int, _Memory] = {}

    def stream(self, name: str = "side") -> Stream:
        made = Stream(self, name)
        self.streams.append(made)
        return made

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def host_waits(self, clock: Clock | None = None) -> None:
        """Make everything that the host starts from now on wait for work up to `clock`, or for all work."""
        over = [clock] if clock is not None else [stream.clock for stream in self.streams]
        for stream in self.streams:
            for one in over:
                stream.wait_clock(dict(one))

    def record(self, tensor: Tensor, stream: Stream) -> None:
        """Act as `Tensor.record_stream`: memory is reused only after all work that `stream` has when it is freed."""
        self._memory(tensor).recorded.add(stream)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self._note(func, args, kwargs or {}, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        written = {
            argument.name for argument in func._schema.arguments if argument.alias_info and argument.alias_info.is_write
        }
        shape_alone = func._schema.name.startswith("aten::new_") or func._schema.name.endswith("_like")
        read = [] if shape_alone else [value for name, value in named.items() if name not in written]
        writes = [tensor for name in written for tensor in _tensors(named.get(name))]
        self.work(str(func), _tensors(read), writes, _tensors(result))

    def work(self, name: str, reads: Iterable[Tensor], writes: Iterable[Tensor], made: Iterable[Tensor] = ()) -> None:
        """Record an operation on the current stream."""
        stream, clock = self.current, self.current.clock
        clock[stream] += 1
        outputs = list(made)
        if outputs:
            self._reuse(stream)
        for tensor in _filled(reads):
            memory, place = self._memory(tensor), _bytes(tensor)
            self._check(f"{name} reads", memory.writes, place, stream)
            memory.reads.setdefault(place, {})[stream] = clock[stream]
        for tensor in _filled(outputs):
            self._memory(tensor, stream, name)
        for tensor in _filled((*writes, *outputs)):
            memory, place = self._memory(tensor), _bytes(tensor)
            self._check(f"{name} overwrites", memory.writes, place, stream)
            self._check(f"{name} overwrites data being read", memory.reads, place, stream)
            memory.writes.setdefault(place, {})[stream] = clock[stream]

    def _check(self, what: str, uses: dict[Bytes, Clock], place: Bytes, stream: Stream) -> None:
        clocks = [clock for (first, end), clock in uses.items() if first < place[1] and place[0] < end]
        for other, count in (use for clock in clocks for use in clock.items()):
            if stream.clock.get(other, 0) < count:
                self.problems[f"{what} on {stream}, which does not wait for {other}"] = None

    def _memory(self, tensor: Tensor, home: Stream | None = None, made_by: str = "an earlier operation") -> _Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            self._memories[key] = _Memory(home or self.default, made_by)
            weakref.finalize(storage, self._free, key).atexit = False
        return self._memories[key]

    def _free(self, key: int) -> None:
        memory = self._memories.pop(key)
        for stream in memory.recorded:
            _advance(memory.awaited, stream.clock)
        memory.home.freed.append(memory)

    def _reuse(self, home: Stream) -> None:
        """Check the freed memory of `home`, which the allocator gives to the next allocation on the same stream."""
        for memory in home.freed:
            clocks = (*memory.reads.values(), *memory.writes.values())
            for stream, count in (use for clock in clocks for use in clock.items()):
                if max(home.clock.get(stream, 0), memory.awaited.get(stream, 0)) < count:
                    self.problems[f"memory of {memory.made_by} on {home} is reused while {stream} uses it"] = None
        home.freed.clear()


def _advance(clock: Clock, other: Clock) -> None:
    for stream, count in other.items():
        clock[stream] = max(clock.get(stream, 0), count)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _bytes(tensor: Tensor) -> Bytes:
    """Return the bytes of a tensor with elements, including those between them."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.storage_offset()
    return first * tensor.itemsize, (first + last + 1) * tensor.itemsize


def _filled(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.numel()]
