"""Reduction of the gradients of FSDP2 by `FSDPModule.set_custom_reduce_scatter`.

FSDP2 (`foreach_reduce`) copies the gradients of a unit into one flat buffer as soon as backward has computed all of
them. It calls the custom reduce-scatter to compute each rank's part of their mean, waits for the result (on CUDA in a
separate stream), and adds it to the gradients. The buffer does not say which parameters it contains: it is those that
have a gradient, which are determined before it is created.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from deepspeed_compress.backends.fsdp2.units import Ranks, Unit, reduce_by_shards_alone
from deepspeed_compress.backends.limits import check_reduced_once
from deepspeed_compress.backends.sessions import Attached
from deepspeed_compress.collectives.buckets import LAYOUTS, Partition
from deepspeed_compress.collectives.powersgd import PowerSGDReducer
from deepspeed_compress.collectives.reducer import ClippingReducer
from deepspeed_compress.compression.segments import Segment, gather, scatter
from deepspeed_compress.errors import SeamError, UnsupportedError
from deepspeed_compress.monitor import ring_all_reduce, ring_reduce_scatter

Sizes = tuple[tuple[str, tuple[int, ...]], ...]
"""Names and shapes of parameters."""


@dataclass(frozen=True)
class Layout:
    """Layout of a buffer.

    `segments` lie at their offsets in a buffer of `numel` elements; the other elements are padding. Concatenated in
    this order, they form the bucket that `partition` cuts.
    """

    segments: tuple[Segment, ...]
    partition: Partition
    numel: int

    def bucket(self, buffer: Tensor) -> Tensor:
        """Return the elements of the flat `buffer` [numel] without padding.

        The result is the buffer itself if it has no padding and the same order, else an fp32 copy.
        """
        return buffer if self._is_buffer else gather(buffer, self.segments)

    def hand_over(self, bucket: Tensor, rank: int, out: Tensor) -> None:
        """Copy the elements of `bucket` that `rank` owns to `out`, its flat part of the buffer. Padding becomes 0."""
        share = self.numel // self.partition.world_size
        places = [
            replace(segment, offset=segment.offset - rank * share) for segment in self.segments if segment.owner == rank
        ]
        if sum(place.numel for place in places) != share:
            out.zero_()
        scatter(gather(bucket, self.partition.owned_by(rank)), places, out)

    @cached_property
    def _is_buffer(self) -> bool:
        same = zip(self.segments, self.partition.segments, strict=True)
        return self.partition.numel == self.numel and all(one.offset == other.offset for one, other in same)


@lru_cache(maxsize=LAYOUTS)
def find_layout(sizes: Sizes, ranks: int, whole: bool) -> Layout:
    """Return the layout of the gradients of parameters of `sizes`, in the order of FSDP2, over `ranks`.

    FSDP2 (`foreach_reduce_scatter_copy_in`) writes, for one rank after another, its rows of every parameter. All ranks
    have the same number of rows: those of the last ranks are padded, or consist only of padding. If `whole`, the bucket
    holds one parameter after another, for reducers that need whole parameters; otherwise, it has the order of the
    buffer.
    """
    segments = list(_segments(sizes, ranks))
    if whole:
        place = {name: number for number, (name, _) in enumerate(sizes)}
        segments.sort(key=lambda segment: (place[segment.parameter], segment.begin))
    offsets = accumulate((segment.numel for segment in segments), initial=0)
    moved = tuple(replace(segment, offset=offset) for segment, offset in zip(segments, offsets, strict=False))
    return Layout(tuple(segments), Partition(moved, ranks), ranks * sum(_share(shape, ranks) for _, shape in sizes))


def _segments(sizes: Sizes, ranks: int) -> Iterator[Segment]:
    offset = 0
    for owner in range(ranks):
        for name, shape in sizes:
            share = _share(shape, ranks)
            begin = owner * share
            numel = min(share, math.prod(shape) - begin)
            if numel > 0:
                yield Segment(name, begin, numel, offset, owner)
            offset += share


def _share(shape: tuple[int, ...], ranks: int) -> int:
    """Return the number of elements of a parameter that each rank has room for."""
    return math.ceil(shape[0] / ranks) * math.prod(shape[1:])


def compress_gradients(units: Sequence[Unit], ranks: Ranks, attached: Attached) -> list[Callable[[], None]]:
    """Reduce the gradients of `units` by the session.

    Returns functions that raise UnsupportedError if other code has replaced a custom reduce-scatter since.
    """
    patches, checks = attached.session.patches, []
    for unit in units:
        reduction = _Reduction(unit, ranks, attached)
        if ranks.replicate is not None:
            reduce_by_shards_alone(unit, patches)
        patches.on_undo(partial(unit.module.set_custom_reduce_scatter, unit.theirs._reduce_scatter_comm))
        unit.module.set_custom_reduce_scatter(reduction)
        patches.precede(unit.theirs, "post_backward", reduction.before_post_backward)
        checks.append(reduction.check)
    return checks


def count_gradients(units: Sequence[Unit], ranks: Ranks, attached: Attached) -> list[Callable[[], None]]:
    """Count the bytes of method "none", with which FSDP2 is left unchanged. Returns an empty list."""
    for unit in units:
        attached.session.patches.precede(unit.theirs, "post_backward", partial(_count, unit, attached))
    return []


def _count(unit: Unit, attached: Attached) -> None:
    names = unit.with_gradients() if unit.theirs.reduce_grads else ()
    if names:
        size = uncompressed_bytes(unit, names, unit.ranks(), copies=unit.theirs.all_reduce_grads)
        attached.session.meter.count_engine_reduction(size)


def uncompressed_bytes(unit: Unit, names: Sequence[str], ranks: Ranks, copies: bool = True) -> int:
    """Return the bytes that a rank sends if FSDP2 reduces the gradients of `names`, including copies if `copies`."""
    shards = ranks.shard.size()
    padded = find_layout(_sizes(unit, names), shards, whole=False).numel
    size = padded * max(dtype.itemsize for dtype in unit.reduce_dtypes(names))
    # gloo implements reduce-scatter by an all-reduce of everything.
    inside = ring_all_reduce if ranks.shard.name() == "gloo" else ring_reduce_scatter
    replicas = ranks.size // shards if copies else 1
    return inside(size, shards) + ring_all_reduce(size // shards, replicas)


def _sizes(unit: Unit, names: Sequence[str]) -> Sizes:
    return tuple((name, unit.shapes[name]) for name in names)


class _Reduction(ReduceScatter):
    """Custom reduce-scatter of the gradients of one unit."""

    def __init__(self, unit: Unit, ranks: Ranks, attached: Attached) -> None:
        self._unit, self._ranks = unit, ranks
        self._session, self._steps = attached.session, attached.steps
        self._trained = frozenset(unit.trained())
        self._coming: tuple[str, ...] = ()
        self._reduced_in: int | None = None
        """Step of the last call, counted from the start of the process."""

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def before_post_backward(self) -> None:
        """Record which parameters have gradients, before `FSDPParamGroup.post_backward`."""
        self._coming = self._unit.with_gradients()

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Write this rank's part of the mean of `input_tensor`, which is overwritten, to `output_tensor`.

        Both are flat, on the same device, and of the reduction dtype.
        """
        self._begin()
        layout = self._layout(input_tensor.numel(), group.size())
        size = uncompressed_bytes(self._unit, self._coming, self._ranks)
        self._session.meter.count("bytes_uncompressed", size)
        bucket = layout.bucket(input_tensor)
        self._session.gradients.reduce(bucket, layout.partition, self._scale(op, group.size()), everywhere=False)
        layout.hand_over(bucket, group.rank(), output_tensor)

    def check(self) -> None:
        if self._unit.theirs._reduce_scatter_comm is not self:
            name = self._unit.names[0]
            remedy = "do not call set_custom_reduce_scatter or similar methods"
            raise UnsupportedError(f"the reduce-scatter of {name} was replaced after fsdp2.attach; {remedy}")

    def _begin(self) -> None:
        step = self._session.clock.begun
        remedy = "run all backward passes except the last after set_requires_gradient_sync(False)"
        check_reduced_once(self._reduced_in == step, self._session.config, remedy)
        if self._ranks.replicate is not None and not self._unit.theirs.all_reduce_grads:
            remedy = "write set_requires_gradient_sync(False)"
            raise UnsupportedError(f"set_requires_all_reduce(False) cannot be combined with compression; {remedy}")
        self._steps.gradients_reduced()
        self._reduced_in = step

    def _layout(self, numel: int, shards: int) -> Layout:
        """Return the layout of the gradients that are about to be reduced."""
        if not self._trained.issuperset(self._coming):
            late = ", ".join(sorted(set(self._coming) - self._trained))
            raise UnsupportedError(
                f"{late}: frozen when fsdp2.attach was called, but trained now; call attach after unfreezing"
            )
        whole = isinstance(self._session.gradients.reducer, ClippingReducer | PowerSGDReducer)
        layout = find_layout(_sizes(self._unit, self._coming), shards, whole)
        if layout.numel != numel:
            what = f"FSDPParamGroup reduces {numel} elements, but {layout.numel} have gradients"
            raise SeamError(f"{what}: {', '.join(self._coming)}")
        return layout

    def _scale(self, op: Any, shards: int) -> float:
        """Return the factor of the sum over all ranks, including copies.

        FSDP2 applies the remaining factor (`foreach_reduce`).
        """
        factor: float | None = self._unit.theirs.gradient_divide_factor
        if factor is not None:
            # The divisor for all ranks, including copies.
            return 1.0 if op == dist.ReduceOp.SUM else 1.0 / factor
        return shards / self._ranks.size if op == dist.ReduceOp.SUM else 1.0 / self._ranks.size
