"""Gradient reduction of ZeRO 3: `DeepSpeedZeroOptimizer_Stage3.__avg_scatter_grads` and its contiguous counterpart.

DeepSpeed reduce-scatters every parameter of a bucket separately. Rank r owns the r-th of equal shares; the last share
is padded with zeros. We send all shares of an owner in one message.

On GPU, DeepSpeed's streams overlap this with backward. On CPU, the backend's own threads send messages. There the
method only sends the bucket. Results are awaited and handed to DeepSpeed after the backward pass has closed the last
bucket, in `independent_gradient_partition_epilogue`; nothing reads the gradients before that.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus, get_allgather_dtype
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.engine_facts import limit_bucket_size
from deepspeed_compress.backends.deepspeed.gradients.muon import count_gathers
from deepspeed_compress.backends.deepspeed.groups import reduction_group
from deepspeed_compress.backends.deepspeed.versions import may_defer_reductions
from deepspeed_compress.collectives.buckets import partition_each
from deepspeed_compress.collectives.exchange import is_gloo
from deepspeed_compress.collectives.reducer import Pending
from deepspeed_compress.compression.segments import Segment, gather, scatter
from deepspeed_compress.monitor import Meter, ring_all_reduce, ring_reduce_scatter
from deepspeed_compress.session.gradients import discard
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session

_PREFIX = "_DeepSpeedZeroOptimizer_Stage3__"


def attach_zero_3(engine: Any, session: Session) -> int:
    """Replace the reduction of gradient buckets on this optimizer; for method "none", only count its bytes.

    Returns:
        The bytes for weights that remain to be counted after an optimizer step: 0, because each gather is counted when
        it happens.
    """
    buckets = _Buckets(engine, session)
    session.replace_reduction(buckets.replace, buckets.only_count)
    # Weights are counted at each parameter's gather functions, since the number of gathers in a step is not known in
    # advance: DeepSpeed keeps weights that are needed again soon, depending on the order of layers and on
    # `stage3_max_live_parameters`, `stage3_max_reuse_distance` and `stage3_param_persistence_threshold`.
    for parameter in engine.optimizer.module.parameters():
        for name in ("all_gather", "all_gather_coalesced"):
            counted = partial(_counted, [parameter], session.meter, name == "all_gather_coalesced")
            session.patches.wrap(parameter, name, counted)
    count_gathers(engine.optimizer, session, "_apply_muon_to_accumulated_grads")
    return 0


@dataclass(frozen=True)
class _Reduction:
    """Pending reduction of one bucket.

    Attributes:
        parameters: the parameters of the bucket, in order.
        pending: the reduction.
        local: this rank's own gradients in the segments that it owns; flat fp32.
    """

    parameters: Sequence[Any]
    dtype: torch.dtype
    """Dtype of the gradients in the bucket, to which the mean is rounded."""
    pending: Pending
    local: Tensor


class _Buckets:
    """Reduction, or counting, of the buckets that DeepSpeed fills: lists of parameters with gradients."""

    def __init__(self, engine: Any, session: Session) -> None:
        self._engine, self._optimizer, self._session = engine, engine.optimizer, session
        self._deferred: list[_Reduction] = []
        # On other devices only the reduction stream waits, not the host or backward.
        self.defers = may_defer_reductions() and get_accelerator().is_synchronized_device()
        self._group = reduction_group(engine)
        # gloo implements reduce-scatter as an all-reduce of the whole tensor.
        self._all_reduces = is_gloo(self._group)
        session.gradients.on_interruption(self._discard)

    def replace(self, patches: Patches) -> None:
        """Reduce in place of DeepSpeed."""
        optimizer = self._optimizer
        patches.wrap(optimizer, _PREFIX + "avg_scatter_grads", partial(self.reduce, False))
        patches.wrap(optimizer, _PREFIX + "avg_scatter_contiguous_grads", partial(self.reduce, True))
        patches.wrap(optimizer, "independent_gradient_partition_epilogue", self.finish)
        if self.defers and optimizer.reduce_scatter:
            # A bucket is copied once anyway, into the order of its message.
            patches.replace(optimizer, "contiguous_gradients", False)
        trained = sum(parameter.ds_numel for group in optimizer.fp16_groups for parameter in group)
        limit_bucket_size(self._engine, trained, patches)

    def only_count(self, patches: Patches) -> None:
        """Leave the reduction to DeepSpeed, and count its bytes."""
        patches.wrap(self._optimizer, _PREFIX + "avg_scatter_grads", partial(self.count, False))
        patches.wrap(self._optimizer, _PREFIX + "avg_scatter_contiguous_grads", partial(self.count, True))

    def _discard(self) -> None:
        """Discard the buckets of a failed backward pass. Collective."""
        deferred, self._deferred = self._deferred, []
        discard([reduction.pending for reduction in deferred], self._group)
        self._session.residuals.rollback()

    def reduce(self, contiguous: bool, original: Any, bucket: Any, dtype: torch.dtype) -> list[Tensor]:
        """Reduce a bucket in place of DeepSpeed's `__avg_scatter_grads`, and return this rank's shares.

        If `contiguous`, the function is `__avg_scatter_contiguous_grads`, whose bucket is a tensor.
        """
        parameters = self._parameters(contiguous, bucket, dtype)
        self._session.meter.count("bytes_uncompressed", self._uncompressed_bytes(parameters, dtype, contiguous))
        # Of DeepSpeed's two paths, only the contiguous one takes sequence parallelism into account.
        copies = self._optimizer.sequence_parallel_size if contiguous else 1
        return self._reduced_shares(parameters, dtype, copies / self._group.size())

    def count(self, contiguous: bool, original: Any, bucket: Any, dtype: torch.dtype) -> Any:
        """Count the bytes of a bucket, and call DeepSpeed's function; see `reduce`."""
        parameters = self._parameters(contiguous, bucket, dtype)
        self._session.meter.count_engine_reduction(self._uncompressed_bytes(parameters, dtype, contiguous))
        return original(bucket, dtype)

    def _parameters(self, contiguous: bool, bucket: Any, dtype: torch.dtype) -> Sequence[Any]:
        parameters: Sequence[Any] = self._optimizer.ipg_buckets[dtype].params if contiguous else bucket
        return parameters

    def _uncompressed_bytes(self, parameters: Sequence[Any], dtype: torch.dtype, contiguous: bool) -> int:
        """Return the bytes that this rank sends if DeepSpeed reduces a bucket of `parameters`."""
        size = sum(parameter.ds_numel for parameter in parameters) * dtype.itemsize
        # Without `reduce_scatter`, DeepSpeed all-reduces the contiguous bucket.
        ring = ring_all_reduce if contiguous or self._all_reduces else ring_reduce_scatter
        return ring(size, _group_of(parameters).size())

    def _reduced_shares(self, parameters: Sequence[Any], dtype: torch.dtype, scale: float) -> list[Tensor]:
        """Return this rank's share of the mean gradient of each parameter, padded to its partition.

        Returns:
            Flat tensors [parameter.partition_numel()] of `gradient_accumulation_dtype`. An empty list if the reduction
            is deferred; `finish` then hands the shares to DeepSpeed.
        """
        bucket = torch.cat([parameter.grad.reshape(-1).to(dtype) for parameter in parameters])
        names = self._optimizer.param_names
        sizes = [(names[parameter], parameter.ds_numel) for parameter in parameters]
        partition = partition_each(sizes, _group_of(parameters).size())
        pending = self._session.gradients.start(bucket, partition, scale)
        reduction = _Reduction(tuple(parameters), dtype, pending, gather(bucket, pending.own))
        if not self.defers:
            return self._shares(reduction)
        self._deferred.append(reduction)
        for parameter in parameters:
            # DeepSpeed also frees the gradient once it has the share; the bucket has been read.
            parameter.grad = None
        return []

    @torch.no_grad()
    def finish(self, original: Any) -> None:
        """Call DeepSpeed's `independent_gradient_partition_epilogue`, then hand over the deferred shares.

        The original closes the last bucket. The shares are handed over in the order of the buckets, within the same
        backward pass, so DeepSpeed accumulates, copies to the host and computes norms in the same order as without this
        package.
        """
        original()
        deferred, self._deferred = self._deferred, []
        for reduction in deferred:
            self._optimizer.partition_grads(reduction.parameters, self._shares(reduction))

    def _shares(self, reduction: _Reduction) -> list[Tensor]:
        """Wait for a bucket, and return this rank's shares; see `_reduced_shares`."""
        sizes = [parameter.partition_numel() for parameter in reduction.parameters]
        flat = reduction.local.new_zeros(sum(sizes), dtype=self._optimizer.gradient_accumulation_dtype)
        means = reduction.pending.finish(reduction.local).to(reduction.dtype)
        scatter(means, list(self._places(reduction, sizes)), flat)
        return list(torch.split(flat, sizes))

    def _places(self, reduction: _Reduction, sizes: Sequence[int]) -> Iterator[Segment]:
        """Yield this rank's segments of a bucket at their offsets in the concatenated, padded shares."""
        names, group = self._optimizer.param_names, _group_of(reduction.parameters)
        ranks, rank = group.size(), group.rank()
        # A segment's `begin` is relative to the whole parameter, but the share begins at rank * share size.
        begins = {
            names[parameter]: place - rank * math.ceil(parameter.ds_numel / ranks)
            for parameter, place in zip(reduction.parameters, accumulate(sizes, initial=0), strict=False)
        }
        for segment in reduction.pending.own:
            yield replace(segment, offset=begins[segment.parameter] + segment.begin)


def _group_of(parameters: Sequence[Any]) -> ProcessGroup:
    """Return the ranks that reduce the bucket of `parameters`. DeepSpeed puts experts into buckets of their own."""
    group: ProcessGroup = parameters[0].ds_process_group
    return group


def _counted(
    own: list[Any], meter: Meter, coalesced: bool, gather: Any, param_list: Any = None, *args: Any, **options: Any
) -> Any:
    """Call a gather function of a parameter, after counting the bytes that this rank sends around a ring.

    With hpZ (ZeRO++), each group of `zero_hpz_partition_size` ranks has a second copy of the weights, from the first
    gather of a step to the optimizer step. Forward and backward, whose gathers are `coalesced`, gather from that.
    """
    parameters, sent = own if param_list is None else list(param_list), 0
    for parameter in parameters:
        # The others are there, or already being gathered.
        if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE:
            share, group = parameter.ds_tensor, parameter.ds_process_group
            if coalesced and parameter.ds_secondary_tensor is not None:
                share, group = parameter.ds_secondary_tensor, parameter.ds_zero_param_process_group
            size = share.ds_numel * get_allgather_dtype(parameter, parameter.ds_tensor).itemsize
            sent += size * (group.size() - 1)
    meter.count("bytes_weights", sent)
    return gather(parameters, *args, **options)
