"""Reductions that begin while backward still runs, and are used only if they prove to be the right ones: ZeRO 0 and 1.

There DeepSpeed reduces when the backward pass of the boundary micro-step is over: what it finds in the gradients then
is right whatever the program did before, with several backwards, `no_sync`, parameters used now and then, layers shared
between reentrant checkpoints. Hooks that reduce at once give that up, as DeepSpeed's own `overlap_comm` does. Here a
program that reduces the same buckets step after step has them sent off as soon as their gradients are there. Then,
where DeepSpeed would reduce, all ranks compare what was sent with what is to be reduced, bit for bit, and agree: either
all of it counts, or none of it does, all that it wrote into memories is forgotten, and DeepSpeed goes on as ever.

On all ranks an engine sends the same messages in the same order, whatever becomes of them: every bucket of the plan
once, before the agreement. The plan is that of earlier steps, which were equal on all ranks since they were reduced.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.communication.payload import PayloadReducer, PendingMeans
from deepspeed_compress.communication.reducer import Pending
from deepspeed_compress.session.session import Session

__all__ = ["EarlyReductions", "Gradients", "bucket_size", "reduces_now"]

Key = Any
"""A parameter in DeepSpeed's bucket, as its seam calls it: hashable."""
BUCKETS = 8
"""That a model is sent in, if the size of a bucket stays within bounds."""
SMALLEST_BUCKET, LARGEST_BUCKET = 1_000_000, 50_000_000
LONGEST_PATIENCE = 1024
"""Equal steps that are asked for at most before reductions begin early again."""


class Gradients(Protocol):
    """The gradients that an optimizer has reduced, over `group` by `scale`: for their owners, or `everywhere`."""

    group: ProcessGroup
    scale: float
    everywhere: bool

    def parameters(self) -> Iterable[Any]:
        """Those that may get one."""

    def key(self, parameter: Any) -> Key:
        """The name of a parameter in buckets."""

    def of(self, key: Key) -> Tensor:
        """The gradient of a parameter as it is now, flat; zeros where there is none."""

    def due(self) -> Iterable[Key]:
        """The parameters whose gradients DeepSpeed is about to reduce."""

    def partition(self, keys: tuple[Key, ...]) -> Partition:
        """How a bucket is cut."""

    def side_by_side(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        """The same bucket in an order in which what an owner gets lies together, as far as that changes no message."""

    def complete_now(self) -> bool:
        """Whether the backward pass runs after which this engine reduces."""


@dataclass(frozen=True)
class Bucket:
    """What is reduced at once: the parameters `keys`, whose gradients travel in `dtype` and are collected in `held`."""

    dtype: torch.dtype
    held: torch.dtype
    keys: tuple[Key, ...]


BucketOrder = tuple[Bucket, ...]
"""The buckets of a step, in the order in which DeepSpeed reduces them."""


@dataclass
class _Step:
    """One optimizer step: gradients that are there, in order; what was sent of them; what DeepSpeed has reduced.

    `reducer`: None where nothing may begin early.
    """

    number: int
    reducer: PayloadReducer | None = None
    ready: dict[Key, None] = field(default_factory=dict)
    sent: dict[Bucket, tuple[Tensor, Pending | PendingMeans]] = field(default_factory=dict)
    reduced: list[Bucket] = field(default_factory=list)
    closed: bool = False
    """Whether DeepSpeed has reduced: what comes afterwards in this step goes its own way."""


@dataclass
class _BucketHistory:
    """When reductions may begin early: after `patience` equal steps, twice as many after each that was not equal.

    `order`: the buckets of the plan as they are sent, once that is so.
    """

    plan: BucketOrder = ()
    order: BucketOrder = ()
    equal: int = 0
    patience: int = 1
    copies: dict[Bucket, Tensor] = field(default_factory=dict)
    """Room for the gradients of a bucket, which is kept: to have it anew in every step takes longer than to fill it."""

    def learn(self, plan: BucketOrder) -> None:
        if plan != self.plan:
            self.plan, self.order, self.equal = plan, (), 0
            self.copies.clear()
        self.equal += 1

    def copy(self, bucket: Bucket, parts: list[Tensor]) -> Tensor:
        """`parts`, flat, one after the other: the same room in every step."""
        if bucket not in self.copies:
            self.copies[bucket] = torch.cat(parts)
            return self.copies[bucket]
        return torch.cat(parts, out=self.copies[bucket])

    def back_off(self) -> None:
        self.order, self.equal, self.patience = (), 0, min(2 * self.patience, LONGEST_PATIENCE)

    @property
    def is_stable(self) -> bool:
        return bool(self.plan) and self.equal >= self.patience


class EarlyReductions:
    """Of one engine. `original`: where DeepSpeed reduces the buckets of a step; call `reduce` in its place, and `take`
    for each bucket that it reduces."""

    def __init__(self, session: Session, gradients: Gradients, original: Callable[..., object]) -> None:
        self._session = session
        self._gradients = gradients
        self._original = original
        self._history = _BucketHistory()
        self._step = _Step(-1)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
            for parameter in gradients.parameters()
        ]
        for handle in self.handles:
            session.patches.on_undo(handle.remove)
        session.on_interruption(self._discard)

    def reduce(self, *arguments: Any, **options: Any) -> None:
        """What DeepSpeed does, after an agreement on what was sent early."""
        step = self._current()
        if step.closed:
            self._original(*arguments, **options)
            return
        if self._history.order and step.reducer is not None and not self._agree(step, step.reducer):
            self._forget(step)
            self._history.back_off()
        try:
            self._original(*arguments, **options)
        except BaseException:
            self._forget(step)
            raise
        assert not step.sent, "reductions that began early and were agreed upon were not asked for"
        step.closed = True
        if not isinstance(self._session.reducer, PayloadReducer):
            # Its buckets are others than those of steps in which reductions may begin early.
            return
        self._history.learn(tuple(step.reduced))
        if self._history.is_stable and not self._history.order:
            self._history.order = self._sorted(step)

    def take(self, dtype: torch.dtype, held: torch.dtype, keys: tuple[Key, ...]) -> Any:
        """The reduction under way of the bucket `keys`, whose gradients DeepSpeed has collected as `held`: of type
        `PendingMeans` if `everywhere`, else `Pending`. None where there is none."""
        step, bucket = self._current(), Bucket(dtype, held, keys)
        if step.closed:
            return None
        step.reduced.append(bucket)
        sent = step.sent.pop(bucket, None)
        return None if sent is None else sent[1]

    def _current(self) -> _Step:
        begun = self._session.clock.begun
        if self._step.sent:
            # A backward pass failed, and the program went on: what travels still waits for an agreement.
            self._step.number = begun
        elif self._step.number != begun:
            self._step = _Step(begun, self._session.early_reducer)
        return self._step

    def _discard(self) -> None:
        """Discard what a failed backward pass has sent, on any rank, before an agreement. Collective."""
        most = torch.tensor(len(self._step.sent))
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._gradients.group)
        if most:
            step = self._current()
            assert step.reducer is not None, "a rank has begun early where another one may not"
            self._send_rest(step, step.reducer)
            self._forget(step)
        self._step = _Step(-1)

    def _gradient_is_there(self, parameter: Any) -> None:
        """Called by autograd, perhaps more than once in a pass, and in passes of other engines."""
        if torch.compiler.is_compiling() or not self._gradients.complete_now():
            return
        step = self._current()
        step.ready.setdefault(self._gradients.key(parameter))
        if step.closed or step.reducer is None:
            return
        for bucket in self._history.order[len(step.sent) :]:
            if not step.ready.keys() >= set(bucket.keys):
                break
            self._send(bucket, step, step.reducer)

    def _send(self, bucket: Bucket, step: _Step, reducer: PayloadReducer) -> None:
        source = self._gradients
        keys = source.side_by_side(bucket.keys)
        flat = self._history.copy(bucket, [source.of(key).detach().to(bucket.held) for key in keys])
        number = self._numbers(reducer)[self._history.plan.index(bucket)]
        partition = source.partition(keys)
        pending = self._session.start_early(flat, partition, source.scale, number, source.everywhere)
        step.sent[bucket] = (flat, pending)

    def _numbers(self, reducer: PayloadReducer) -> list[int]:
        """The number of the first message of each bucket of the plan, and the first one after them.

        They are those of a step without early reductions, so that random numbers do not tell which it was.
        """
        messages = 2 if self._gradients.everywhere else 1
        rounds = [len(reducer.layouts(self._gradients.partition(bucket.keys))) for bucket in self._history.plan]
        return list(accumulate((messages * count for count in rounds), initial=1))

    def _agree(self, step: _Step, reducer: PayloadReducer) -> bool:
        """Send what is left of the plan; whether, on all ranks, it is what DeepSpeed is about to reduce."""
        self._send_rest(step, reducer)
        right = torch.tensor(int(self._is_right(step)))
        dist.all_reduce(right, op=dist.ReduceOp.MIN, group=self._gradients.group)
        if right:
            reducer.skip_messages(self._numbers(reducer)[-1] - 1)
        for _, pending in step.sent.values():
            if isinstance(pending, PendingMeans):
                # Of all buckets, before the first is waited for.
                pending.send_back()
        return bool(right)

    def _send_rest(self, step: _Step, reducer: PayloadReducer) -> None:
        for bucket in self._history.order[len(step.sent) :]:
            self._send(bucket, step, reducer)

    def _is_right(self, step: _Step) -> bool:
        planned = {key for bucket in self._history.plan for key in bucket.keys}
        return planned == set(self._gradients.due()) and all(
            _same_bits(flat, [self._gradients.of(key) for key in self._gradients.side_by_side(bucket.keys)])
            for bucket, (flat, _) in step.sent.items()
        )

    def _forget(self, step: _Step) -> None:
        """Wait for what was sent for nothing; memories are as before it."""
        for flat, pending in step.sent.values():
            nothing = flat if isinstance(pending, PendingMeans) else torch.zeros(_numel(pending))
            pending.finish(nothing)
        step.sent.clear()
        self._session.forget_step()

    def _sorted(self, step: _Step) -> BucketOrder:
        """The buckets of the plan as they were complete on rank 0; those that never were, at the end. Collective."""
        place = {identity: position for position, identity in enumerate(step.ready)}
        last = [max(place.get(key, len(place)) for key in bucket.keys) for bucket in self._history.plan]
        order = torch.tensor(sorted(range(len(last)), key=lambda index: (last[index], -index)))
        group = self._gradients.group
        dist.broadcast(order, dist.get_global_rank(group, 0), group=group)
        return tuple(self._history.plan[index] for index in order.tolist())


def bucket_size(numel: int) -> int:
    """Elements of a bucket of a model with `numel` trained ones, where the user gives none: few enough for the first
    buckets to travel during backward, enough for latency not to matter."""
    return min(max(numel // BUCKETS, SMALLEST_BUCKET), LARGEST_BUCKET)


def reduces_now(engine: Any) -> bool:
    """Whether `engine` runs a backward pass, after which it reduces if that is one of a boundary."""
    reduces = engine.enable_backward_allreduce and not engine.inside_no_sync_ctxt
    return bool(engine._running_engine_backward and reduces)


def _numel(pending: Pending) -> int:
    return sum(segment.numel for segment in pending.own)


def _same_bits(flat: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether `flat` is `parts` one after the other, in its type. NaN equals itself."""
    bits = _BITS[flat.dtype.itemsize]
    pieces = torch.split(flat, [part.numel() for part in parts])
    return all(
        torch.equal(one.view(bits), part.to(flat.dtype).view(bits)) for one, part in zip(pieces, parts, strict=True)
    )


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
