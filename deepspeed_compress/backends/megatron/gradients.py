"""Reduction of Megatron's gradients: replaces the collective in `start_grad_sync` of each bucket group.

Megatron keeps a handle of the collective that it has started, and waits for it in `finish_grad_sync`. The adapter
provides such a handle. Without `overlap_grad_reduce`, the reduction starts and finishes in `start_grad_sync`.

The order in which buckets become complete is learned in the first batch of a process. Messages are numbered by the
place of their bucket, so bits do not depend on that order.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import SimpleNamespace

from torch.distributed import ProcessGroup

from deepspeed_compress.backends.limits import check_reduced_once
from deepspeed_compress.backends.megatron.buckets import Bucket, BucketGroup
from deepspeed_compress.backends.steps import StepFollower
from deepspeed_compress.collectives.payload import PendingMeans
from deepspeed_compress.collectives.reducer import Pending
from deepspeed_compress.compression.segments import gather, scatter
from deepspeed_compress.monitor import ring_all_reduce, ring_reduce_scatter
from deepspeed_compress.session.session import Session


def _bytes_alone(group: BucketGroup, whole: ProcessGroup, everywhere: bool) -> int:
    """Return the bytes that a rank of `whole` would send for `group` without compression, including padding.

    gloo implements reduce-scatter by all-reduce.
    """
    ring = ring_all_reduce if everywhere or whole.name() == "gloo" else ring_reduce_scatter
    return sum(ring(bucket.grad_data.nbytes, whole.size()) for bucket in group.source.buckets)


def count_gradients(session: Session, groups: Sequence[BucketGroup], whole: ProcessGroup) -> None:
    """Count the bytes of method "none", with which Megatron is left unchanged."""
    for group in groups:
        session.patches.wrap(group.source, "finish_grad_sync", partial(_finish_and_count, session, group, whole))


def _finish_and_count(
    session: Session,
    group: BucketGroup,
    whole: ProcessGroup,
    original: Callable[..., None],
    force_all_reduce: bool | None = False,
) -> None:
    original(force_all_reduce=force_all_reduce)
    everywhere = bool(force_all_reduce) or not group.distributed
    session.meter.count_engine_reduction(_bytes_alone(group, whole, everywhere))


@dataclass(frozen=True, eq=False)
class _Sent:
    """A bucket whose reduction is in progress. If `pending` is None, it is reduced when it is waited for."""

    session: Session
    bucket: Bucket
    everywhere: bool
    pending: Pending | PendingMeans | None

    def send_back(self) -> None:
        if isinstance(self.pending, PendingMeans):
            self.pending.send_back()

    def finish(self) -> None:
        flat, pending = self.bucket.gradients, self.pending
        if pending is None:
            self.session.gradients.reduce(flat, self.bucket.partition, self.bucket.scale, self.everywhere)
        elif isinstance(pending, PendingMeans):
            pending.finish(flat)
        else:
            scatter(pending.finish(gather(flat, pending.own)), pending.own, flat)


class Gradients:
    """Reducer of the gradients of `groups` through `session`, over the ranks `whole`."""

    def __init__(
        self, session: Session, steps: StepFollower, groups: Sequence[BucketGroup], whole: ProcessGroup
    ) -> None:
        self._session, self._steps, self._whole = session, steps, whole
        self._buckets = [bucket for group in groups for bucket in group.buckets]
        self._place = {id(bucket): place for place, bucket in enumerate(self._buckets)}
        self._under_way: list[_Sent] = []
        self._begun = -1
        """The step whose messages are numbered, counted from the start of the process."""
        self._firsts: list[int] = []
        """First number of each bucket, and the count of numbers for all buckets."""
        self._passes: Counter[int] = Counter()
        """Number of reductions of each bucket in this step, by its place among all."""
        for group in groups:
            session.patches.wrap(group.source, "start_grad_sync", partial(self._start, group))

    def _start(self, group: BucketGroup, original: Callable[..., None], force_all_reduce: bool | None = False) -> None:
        source, options = group.source, group.source.ddp_config
        if source.grad_reduce_handle is not None:
            # Started already. Megatron accepts that in its first batch, and raises an error later.
            original(force_all_reduce=force_all_reduce)
            return
        if options.check_for_nan_in_grad or options.check_for_large_grads:
            source.check_grads(
                check_for_nan_or_inf=options.check_for_nan_in_grad, check_for_large=options.check_for_large_grads
            )
        sent = self._send(group, bool(force_all_reduce) or not group.distributed)
        if options.overlap_grad_reduce:
            source.grad_reduce_handle = SimpleNamespace(wait=partial(self._finish, sent))
        else:
            self._finish(sent)

    def _send(self, group: BucketGroup, everywhere: bool) -> list[_Sent]:
        self._begin()
        self._session.meter.count("bytes_uncompressed", _bytes_alone(group, self._whole, everywhere))
        sent = [self._sent(bucket, everywhere) for bucket in group.buckets]
        self._under_way += sent
        return sent

    def _finish(self, sent: Sequence[_Sent]) -> None:
        # Send all means back before waiting for the first of them.
        for one in self._under_way:
            one.send_back()
        for one in sent:
            one.finish()
            self._under_way.remove(one)

    def _sent(self, bucket: Bucket, everywhere: bool) -> _Sent:
        number = self._number(self._place[id(bucket)])
        pending = None
        if self._session.gradients.early_reducer is not None:
            flat, partition = bucket.gradients, bucket.partition
            pending = self._session.gradients.start_early(flat, partition, bucket.scale, number, everywhere)
        return _Sent(self._session, bucket, everywhere, pending)

    def _begin(self) -> None:
        """Assign message numbers at the first reduction of a step: two per round of every bucket."""
        self._steps.gradients_reduced()
        if self._begun == self._session.clock.begun:
            return
        self._under_way.clear()  # what a pass that failed has left
        reducer = self._session.gradients.early_reducer
        rounds = [0 if reducer is None else 2 * len(reducer.layouts(bucket.partition)) for bucket in self._buckets]
        self._firsts = list(accumulate(rounds, initial=0))
        self._begun, self._passes = self._session.clock.begun, Counter()

    def _number(self, place: int) -> int:
        """Return the number of the first message of a bucket."""
        passes = self._passes[place]
        remedy = "run all micro-batches except the last in no_sync()"
        check_reduced_once(passes > 0, self._session.config, remedy)
        self._passes[place] += 1
        return 1 + self._firsts[place] + passes * self._firsts[-1]
