"""Gathers of the weights of FSDP2 for forward and backward by `FSDPModule.set_custom_all_gather`.

No rank keeps gathered weights, so there is nothing to take a difference to. Instead, the weights themselves are
rounded, while the shards that the optimizer updates stay exact, and every gather of a step rounds them alike (ZeRO++,
arXiv:2306.10209, section 3.1, uses 8 bits). Gathers are exact in evaluation mode and in steps that send everything
uncompressed. Parameters that are not rounded (see `find_rounded`) are gathered by FSDP2 in a message of their own.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, cached_property, partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather

from deepspeed_compress.backends.fsdp2.units import Ranks, Unit
from deepspeed_compress.backends.groups import make_group
from deepspeed_compress.collectives.buckets import Partition, partition_by_owners, select
from deepspeed_compress.collectives.payload import PendingGather
from deepspeed_compress.collectives.weight_reduction import WeightReduction, warn_of_evaluation
from deepspeed_compress.compression.segments import Segment, scatter
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning, UnsupportedError
from deepspeed_compress.session.session import Session


class _Pending(Protocol):
    """A gather in progress."""

    def wait(self) -> Any: ...


class _Waited(dist.Work):
    """Gathers in progress, in the form that FSDP2 waits for."""

    def __init__(self, pending: Sequence[_Pending]) -> None:
        super().__init__()
        self._pending = pending

    def wait(self, timeout: timedelta | None = None) -> bool:
        pending, self._pending = self._pending, ()
        with torch.no_grad():
            for part in pending:
                part.wait()
        return True


@dataclass(frozen=True)
class _Part:
    """A gather of some `segments` of `output` into `values`, one after the other. `pending` is None if it is over."""

    pending: _Pending | None
    values: Tensor
    segments: Sequence[Segment]
    output: Tensor

    def wait(self) -> None:
        if self.pending is not None:
            self.pending.wait()
        scatter(self.values, self.segments, self.output)


class Gathers:
    """Gathers of the weights of `model`, in which `weights` rounds the parameters `rounded`; if None, only counted."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        ranks: Ranks,
        session: Session,
        weights: WeightReduction | None,
        rounded: frozenset[str],
    ) -> None:
        self._model, self.session, self.rounded, self.shard = model, session, rounded, ranks.shard
        self._group = None if weights is None else make_group(dist.get_process_group_ranks(ranks.shard))
        self._reducer = None if weights is None else cache(weights.rounding_reducer)
        self._warned = False
        self.has_rounded = False
        """True if rounded weights may be left on some unit."""
        self._gathers = [_Gather(unit, self, unit.theirs._all_gather_comm) for unit in units if unit.alone]
        for gather in self._gathers:
            session.patches.on_undo(partial(gather.unit.module.set_custom_all_gather, gather.theirs))
            gather.unit.module.set_custom_all_gather(gather)
            session.patches.precede(gather.unit.theirs, "pre_forward", self.before_forward)
            if weights is not None and rounded:
                session.patches.precede(gather.unit.theirs, "post_backward", partial(self._note_backward, gather.unit))
        if len(self._gathers) < len(units):
            text = f"{SECTION}: weights that are sharded over several meshes in one module are not counted"
            warnings.warn(text, CompressWarning, stacklevel=4)

    @property
    def rounds(self) -> bool:
        """Return True if a gather that begins now is rounded."""
        return self._reducer is not None and self._model.training and not self.session.plan.dense

    def before_forward(self) -> None:
        """Drop rounded weights that are left from a training forward if exact ones are needed now.

        The first unit of a pass does this for all, because it may begin to gather those of the others.
        """
        if self.has_rounded and not self.rounds:
            for gather in self._gathers:
                gather.forget()
            self.has_rounded = False

    def _note_backward(self, unit: Unit) -> None:
        """Warn, once per model, if gradients are reduced in evaluation mode, in which all gathers are exact."""
        exact = not (self._model.training or self.session.plan.dense)
        if exact and not self._warned and unit.theirs.reduce_grads and unit.with_gradients():
            self._warned = True
            warn_of_evaluation()

    def check(self) -> None:
        """Check that all rounded weights are still gathered here.

        Raises:
            UnsupportedError: other code has replaced the custom all-gather since.
        """
        replaced = [gather.unit.names[0] for gather in self._gathers if not is_gathered_by_us(gather.unit)]
        if replaced and self._reducer is not None:
            remedy = "do not call set_custom_all_gather or similar methods"
            raise UnsupportedError(f"the all-gather of {replaced[0]} was replaced after fsdp2.attach; {remedy}")

    def rounds_over(self, group: ProcessGroup) -> bool:
        """Return True if a gather over `group` that begins now is rounded.

        A forward pass may leave weights sharded over fewer ranks; these are rounded already.
        """
        return self.rounds and group.group_name == self.shard.group_name

    def start(self, weights: Tensor, partition: Partition) -> PendingGather:
        """Start to gather `weights`, cut by `partition`, with rounding."""
        assert self._reducer is not None
        return self._reducer(self._group, weights.dtype).start_all_gather(weights, partition)


class _Gather(AllGather):
    """Custom all-gather of the weights of one unit: rounded by `gathers`, or exact by `theirs`."""

    def __init__(self, unit: Unit, gathers: Gathers, theirs: AllGather) -> None:
        self.unit, self.theirs, self._gathers = unit, theirs, gathers
        self._names = gathers.rounded & set(unit.names)
        """Names of the parameters that are rounded."""
        self._rounded = False

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self.theirs.allocate(size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Write the parts of all ranks of `group` to `output_tensor`. `input_tensor` is this rank's part."""
        if not self._names or not self._gathers.rounds_over(group):
            self._rounded = self._rounded and self._gathers.rounds
            return self._exact(output_tensor, input_tensor, group, async_op)
        self._rounded = self._gathers.has_rounded = True
        mine = output_tensor[group.rank() * input_tensor.numel() :][: input_tensor.numel()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        pending = _Waited(self._start(output_tensor, group))
        if output_tensor.device.type == "cpu":
            # Only this lets the gather overlap with computation.
            return pending
        pending.wait()
        return None

    def _exact(self, output: Tensor, mine: Tensor, group: ProcessGroup, async_op: bool) -> dist.Work | None:
        self._gathers.session.meter.count("bytes_weights", mine.nbytes * (group.size() - 1))
        return self.theirs(output, mine, group, async_op)

    def _start(self, output: Tensor, group: ProcessGroup) -> Sequence[_Pending]:
        """Start to gather `output`, of which this rank's part is there."""
        exact, rounded, partition = self._split
        if not exact:
            return [self._gathers.start(output, partition)]
        mine = _copy(output, [segment for segment in exact if segment.owner == group.rank()])
        every, values = output.new_empty(mine.numel() * group.size()), _copy(output, rounded)
        first = _Part(self._exact(every, mine, group, async_op=True), every, exact, output)
        return [first, _Part(self._gathers.start(values, partition), values, rounded, output)]

    def forget(self) -> None:
        """Reshard the weights if the gathered ones are rounded."""
        if self._rounded:
            self.unit.module.reshard()
            self._rounded = False

    @cached_property
    def _split(self) -> tuple[Sequence[Segment], Sequence[Segment], Partition]:
        """Return the exact and the rounded segments of the buffer, and the partition of the latter."""
        shares = tuple((name, one._sharded_param_data.numel()) for name, one in self.unit.parameters())
        whole = partition_by_owners(shares, self._gathers.shard.size())
        exact, _ = select(whole, lambda segment: segment.parameter not in self._names)
        return exact, *select(whole, lambda segment: segment.parameter in self._names)


def _copy(buffer: Tensor, segments: Sequence[Segment]) -> Tensor:
    """Return a copy of the elements of `segments`, one after the other, in the dtype of `buffer`."""
    return torch.cat([buffer.narrow(0, segment.offset, segment.numel) for segment in segments])


def is_gathered_by_us(unit: Unit) -> bool:
    return isinstance(unit.theirs._all_gather_comm, _Gather)
