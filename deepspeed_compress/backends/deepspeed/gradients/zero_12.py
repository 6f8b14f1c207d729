"""Gradient reduction of ZeRO 1 and 2, also in a pipeline: `DeepSpeedZeroOptimizer.gradient_reduction_w_predivide`.

DeepSpeed all-reduces a whole bucket although every rank keeps only its own slices. With `reduce_scatter` off, its
`average_tensor` passes the whole bucket to one method, after it has taken care of streams and offload. We replace that
method, and send each slice once, to its owner. Slices that a rank does not own keep its local gradient, which DeepSpeed
never reads.

On GPU, DeepSpeed's streams overlap this with backward. On CPU, the backend's own threads send messages. There the
method only sends the bucket. Results are awaited and copied into the gradients after the last bucket is closed, in the
call of `reduce_ipg_grads` for all dtypes; DeepSpeed reads the gradients only after that. Under ZeRO 1, DeepSpeed
reduces after backward, so reductions begin early (`early`, `parts`). Muon's matrices that have several
owners are completed once their means are there (`muon`).
"""

from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from deepspeed_compress.backends.deepspeed.engine_facts import limit_bucket_size
from deepspeed_compress.backends.deepspeed.gradients.early import EarlyReductions
from deepspeed_compress.backends.deepspeed.gradients.muon import SplitMatrices, count_gathers
from deepspeed_compress.backends.deepspeed.gradients.parts import Part, Zero1Gradients, parts_of
from deepspeed_compress.backends.deepspeed.versions import has_compact_gradients, may_defer_reductions
from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.reducer import Pending
from deepspeed_compress.compression.segments import Segment, scatter
from deepspeed_compress.monitor import ring_all_gather
from deepspeed_compress.session.gradients import discard
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session


def attach_zero_12(engine: Any, session: Session) -> int:
    """Replace the reduction of gradient buckets on this optimizer; for method "none", only count its bytes.

    Returns:
        The bytes that this rank sends for weights in one optimizer step, to gather the 16- or 32-bit ones.
    """
    optimizer = engine.optimizer
    if optimizer.cpu_offload:
        count_gathers(optimizer, session, "_apply_muon_updates_cpu_offload")
    session.replace_reduction(partial(_replace, engine, session), partial(_count_only, optimizer, session))
    groups = zip(optimizer.bit16_groups_flat, optimizer.real_dp_process_group, strict=True)
    return sum(ring_all_gather(flat.nbytes, group.size()) for flat, group in groups)


def _replace(engine: Any, session: Session, patches: Patches) -> None:
    optimizer = engine.optimizer
    limit_bucket_size(engine, sum(flat.numel() for flat in optimizer.bit16_groups_flat), patches)
    buckets = _Buckets(engine, session, patches)
    patches.replace(optimizer, "reduce_scatter", False)
    patches.replace(optimizer, "gradient_reduction_w_predivide", buckets.reduce)
    if buckets.later is not None:
        patches.replace(optimizer, "reduce_ipg_grads", buckets.later.reduce_ipg_grads)
    if buckets.early is not None:
        patches.replace(optimizer, "reduce_gradients", buckets.early.reduce)


class _Buckets:
    """Reduction of the buckets that DeepSpeed fills.

    Attributes:
        later: deferred reductions; None if every bucket is reduced immediately.
        early: speculative reductions; None if reductions do not begin before DeepSpeed asks for them.
    """

    def __init__(self, engine: Any, session: Session, patches: Patches) -> None:
        self._optimizer = optimizer = engine.optimizer
        self._session = session
        ranks = optimizer.dp_process_group.size()
        # DeepSpeed also divides the gradients of experts by the data-parallel size, whatever the size of their group.
        self._scale = optimizer.sequence_parallel_size / ranks if engine.gradient_average else 1.0
        self._parts_of = parts_of(optimizer)
        self._split = SplitMatrices(optimizer, session)
        self.later = DeferredReductions(optimizer, self._split) if may_wait(optimizer) else None
        self.early: EarlyReductions | None = None
        patches.on_undo(session.gradients.on_interruption(self._discard))
        if self.later is not None and _waits_for_backward(engine):
            gradients = Zero1Gradients(engine, self._scale)
            self.early = EarlyReductions(session, gradients, optimizer.reduce_gradients, patches)
            for handle in self.early.handles:
                # DeepSpeed's `destroy` removes these together with its own hooks.
                optimizer._grad_acc_hooks.append(handle)
                patches.on_undo(partial(optimizer._grad_acc_hooks.remove, handle))

    def reduce(self, tensor: Tensor, communication_data_type: torch.dtype) -> Tensor:
        """Reduce the flat bucket `tensor`, possibly empty, in place of DeepSpeed's `gradient_reduction_w_predivide`."""
        if not tensor.numel():
            return tensor
        for part in self._parts_of(tuple(self._optimizer.ipg_buckets[communication_data_type].params)):
            self._session.meter.count("bytes_uncompressed", part.all_reduced(communication_data_type))
            self._reduce(part, tensor, communication_data_type)
        return tensor

    def _reduce(self, part: Part, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        """Reduce `part` of the flat bucket `tensor`, or begin to."""
        if self.later is not None:
            begun = self.early.take(communication_data_type, tensor.dtype, part.keys) if self.early else None
            self.later.pending.append((part.partition, begun or self._start(part, tensor)))
            return
        self._keep(tensor)
        flat = part.of(tensor)
        self._session.gradients.reduce(flat, part.partition, self._scale, everywhere=False)
        if not self._optimizer.cpu_offload:
            # With offload, DeepSpeed's `step` gathers the matrices itself.
            self._split.complete(part.partition, lambda one: flat.narrow(0, one.offset, one.numel))
        if flat is not tensor:
            scatter(flat, part.places, tensor)

    def _start(self, part: Part, tensor: Tensor) -> Pending:
        flat = part.of(tensor)
        pending = self._session.gradients.start(flat, part.partition, self._scale)
        if flat is not tensor:
            # Some reducers clip the gradients in place, and DeepSpeed keeps those in `tensor`.
            scatter(flat, part.places, tensor)
        return pending

    def _discard(self) -> None:
        """Discard the buckets of a failed backward pass. Collective."""
        if self.later is not None:
            discard([pending for _, pending in self.later.taken()], self._optimizer.dp_process_group)
            self._session.residuals.rollback()

    def _keep(self, tensor: Tensor) -> None:
        """Keep the memory of `tensor` from being reused while the reduction stream reads it.

        A gradient larger than a bucket is not copied into one. DeepSpeed releases it as soon as the reduction returns,
        and it was allocated on another stream.
        """
        if self._optimizer.overlap_comm and not get_accelerator().resolves_data_dependency():
            tensor.record_stream(get_accelerator().current_stream())


def _waits_for_backward(engine: Any) -> bool:
    """Return True if DeepSpeed reduces only after backward and the user did not choose that.

    This holds under ZeRO 1 without a pipeline and without experts, if `overlap_comm` is not in the file.
    """
    # The older form of the section is `true`.
    written = engine.config.get("zero_optimization")
    chosen = isinstance(written, dict) and written.get("overlap_comm") is not None
    plain = not isinstance(engine, PipelineEngine) and not engine.has_moe_layers
    return not engine.optimizer.partition_gradients and not chosen and plain


def _count_only(optimizer: Any, session: Session, patches: Patches) -> None:
    """Leave the reduction to DeepSpeed's `average_tensor`, and count its bytes."""
    parts = parts_of(optimizer)

    def average_tensor(average: Any, tensor: Tensor, communication_data_type: torch.dtype) -> None:
        for part in parts(tuple(optimizer.ipg_buckets[communication_data_type].params)):
            session.meter.count_engine_reduction(part.all_reduced(communication_data_type))
        average(tensor, communication_data_type)

    patches.wrap(optimizer, "average_tensor", average_tensor)


def may_wait(optimizer: Any) -> bool:
    """Return True if reductions can be deferred until the last bucket is closed.

    They can if DeepSpeed reads no reduced bucket before that, and if the device has no streams to overlap them with.
    """
    if not may_defer_reductions() or has_compact_gradients(optimizer):
        return False
    on_host = all(flat.device.type == "cpu" for flat in optimizer.bit16_groups_flat)
    return on_host and not optimizer.cpu_offload


class DeferredReductions:
    """Pending reductions, and a replacement for DeepSpeed's `reduce_ipg_grads` that finishes them."""

    def __init__(self, optimizer: Any, split: SplitMatrices) -> None:
        self.pending: list[tuple[Partition, Pending]] = []
        """Reductions that `reduce_ipg_grads` finishes, each with the owners of its bucket."""
        self._optimizer = optimizer
        self._split = split
        self._parameters = {name: parameter for parameter, name in optimizer.param_names.items()}
        self._original = optimizer.reduce_ipg_grads

    def reduce_ipg_grads(self, comm_dtype: torch.dtype | None = None) -> None:
        """Call DeepSpeed's `reduce_ipg_grads`; in the call for all dtypes, then finish the pending reductions."""
        self._original(comm_dtype=comm_dtype)
        if comm_dtype is None:
            reduced = self.taken()
            for _, pending in reduced:
                self._land(pending)
            for partition, _ in reduced:
                self._split.complete(partition, self._gradient)

    def taken(self) -> list[tuple[Partition, Pending]]:
        """Return the pending reductions and forget them; the caller must finish them."""
        pending, self.pending = self.pending, []
        return pending

    def _land(self, pending: Pending) -> None:
        """Finish a reduction, and write the means over this rank's local gradients.

        DeepSpeed has already moved the unreduced gradients of this rank's parameters out of the bucket.
        """
        if not pending.own:
            pending.finish(torch.zeros(0))
            return
        places = [self._gradient(segment) for segment in pending.own]
        sums = pending.finish(torch.cat(places).to(torch.float32))
        for place, part in zip(places, torch.split(sums, [place.numel() for place in places]), strict=True):
            place.copy_(part)

    def _gradient(self, segment: Segment) -> Tensor:
        gradient: Tensor = self._optimizer.get_gradient_for_reduction(self._parameters[segment.parameter])
        return gradient.view(-1)[segment.begin : segment.begin + segment.numel]
