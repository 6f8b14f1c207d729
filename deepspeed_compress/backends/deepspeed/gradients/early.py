"""Speculative reductions for ZeRO 0 and 1: begin during backward, and use the results only if they prove correct.

These stages reduce after the backward pass of the boundary micro-step. The gradients that DeepSpeed finds then are
correct whatever the program did before: several backward passes, `no_sync`, parameters that are used only now and then,
layers shared between reentrant checkpoints. Hooks that reduce immediately give this up, as DeepSpeed's own
`overlap_comm` does. This module keeps it: if a program reduces the same buckets step after step, each bucket is sent as
soon as its gradients exist. When DeepSpeed would reduce, all ranks compare, bit for bit, what was sent with what is due
to be reduced. If everything matches on every rank, the results are used. Otherwise all of them are discarded, residuals
are rolled back, and DeepSpeed reduces as usual.

Every rank sends the same messages in the same order, whether or not they are used: each bucket of the plan once, before
the agreement. The plan comes from earlier steps, and is equal on all ranks because those steps were reduced.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.gradients.background import Background
from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.payload import PayloadReducer, PendingMeans
from deepspeed_compress.collectives.reducer import Pending
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session

Key = Any
"""Hashable identity of a parameter in DeepSpeed's bucket; each seam defines its own."""
LONGEST_PATIENCE = 1024
"""Maximum number of consecutive equal steps required before speculative reductions resume."""


@dataclass(frozen=True)
class Bucket:
    """One gradient bucket: the parameters that are reduced together.

    Attributes:
        dtype: the communication dtype of the gradients.
        held: the dtype of the tensor in which they are collected.
        keys: the parameters, in order.
    """

    dtype: torch.dtype
    held: torch.dtype
    keys: tuple[Key, ...]


BucketOrder = tuple[Bucket, ...]
"""Buckets of one step, in the order in which DeepSpeed reduces them."""


@dataclass
class BucketHistory:
    """History of the buckets, which decides when speculative reductions may begin.

    They begin after `patience` equal steps. `patience` doubles after each speculation that turned out wrong.

    Attributes:
        plan: the buckets of the last step, in DeepSpeed's order.
        order: the buckets of `plan` in the order in which they are sent; empty while nothing is sent early.
        equal: the number of consecutive steps with this plan.
        patience: the number of equal steps required.
    """

    plan: BucketOrder = ()
    order: BucketOrder = ()
    equal: int = 0
    patience: int = 1
    copies: dict[Bucket, Tensor] = field(default_factory=dict)
    """Flat buffer for the gradients of each bucket, reused because allocating takes longer than filling."""

    def learn(self, plan: BucketOrder) -> None:
        """Record the buckets of a finished step. If they changed, start over."""
        if plan != self.plan:
            self.plan, self.order, self.equal = plan, (), 0
            self.copies.clear()
        self.equal += 1

    def copy(self, bucket: Bucket, parts: list[Tensor]) -> Tensor:
        """Return `parts` concatenated into the bucket's buffer, which is the same tensor in every step."""
        self.copies[bucket] = torch.cat(parts, out=self.copies.get(bucket))
        return self.copies[bucket]

    def back_off(self) -> None:
        """Stop sending buckets early, and require twice as many equal steps before starting again."""
        self.order, self.equal, self.patience = (), 0, min(2 * self.patience, LONGEST_PATIENCE)


class Gradients(Protocol):
    """Access to the gradients that an optimizer reduces over `group`, multiplied by `scale`.

    Attributes:
        group: the ranks that reduce together.
        asking: a group with at least these ranks, which ask each other there whether any of them has begun early. On
            NCCL, `group` would mistake the question for a reduction, where ranks have begun different numbers of them.
        scale: the factor applied to the sum over ranks.
        everywhere: True if every rank receives the means, False if only their owners do.
        device: the device of the gradients.
    """

    group: ProcessGroup
    asking: ProcessGroup
    scale: float
    everywhere: bool
    device: torch.device

    def hooked(self) -> Iterable[tuple[Any, Key]]:
        """Return the parameters whose hooks tell when a gradient is complete, with the keys of these gradients."""

    def of(self, key: Key) -> Tensor:
        """Return the current gradient of a parameter, flat. Zeros if it has none."""

    def due(self) -> Iterable[Key]:
        """Return the keys of the parameters whose gradients DeepSpeed is about to reduce."""

    def partition(self, keys: tuple[Key, ...]) -> Partition:
        """Return the partition of the bucket `keys`: the segments that each rank owns."""

    def side_by_side(self, keys: tuple[Key, ...]) -> tuple[Key, ...]:
        """Return `keys` reordered so that each owner's elements are contiguous, if that changes no message."""

    def complete_now(self) -> bool:
        """Return True during the backward pass after which this engine reduces."""


@dataclass
class _Step:
    """State of one optimizer step.

    Attributes:
        number: the step number of the session's clock.
        reducer: the reducer for speculative reductions; None if none may begin in this step.
        ready: keys of the gradients accumulated so far, in order.
        sent: for each bucket that was sent, the flat gradients and the pending reduction.
        reduced: the buckets that DeepSpeed has reduced so far.
    """

    number: int
    reducer: PayloadReducer | None = None
    ready: dict[Key, None] = field(default_factory=dict)
    sent: dict[Bucket, tuple[Tensor, Pending | PendingMeans]] = field(default_factory=dict)
    reduced: list[Bucket] = field(default_factory=list)
    closed: bool = False
    """True once DeepSpeed has reduced. Later reductions of the same step take DeepSpeed's normal path."""


class EarlyReductions:
    """Speculative reductions of one engine.

    Call `reduce` in place of DeepSpeed's function that reduces all buckets of a step, and `take` for each bucket that
    it reduces.

    Args:
        session: the engine's session.
        gradients: the gradients of the engine.
        original: DeepSpeed's function that reduces all buckets of a step.
        patches: removes the hooks of the gradients.
        background: where buckets are sent. If means return early there, this takes a second copy of the gradients.
    """

    def __init__(
        self,
        session: Session,
        gradients: Gradients,
        original: Callable[..., object],
        patches: Patches,
        background: Background | None = None,
    ) -> None:
        self._session = session
        self._gradients = gradients
        self._original = original
        self._background = Background() if background is None else background
        self._history = BucketHistory()
        self._step = _Step(-1)
        self.handles = [
            parameter.register_post_accumulate_grad_hook(partial(self.note_complete, key))
            for parameter, key in gradients.hooked()
        ]
        patches.on_undo(self.remove_hooks)
        patches.on_undo(session.gradients.on_interruption(self._discard))

    def remove_hooks(self) -> None:
        """Remove the hooks of the gradients, and drop the copies of these. Nothing begins early from now on."""
        for handle in self.handles:
            handle.remove()
        self._history = BucketHistory()

    def reduce(self, *arguments: Any, **options: Any) -> None:
        """Reduce all buckets as DeepSpeed does, after all ranks have agreed on what was sent early."""
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
        if not isinstance(self._session.gradients.reducer, PayloadReducer):
            # Its buckets differ from those of steps in which reductions may begin early.
            return
        self._history.learn(tuple(step.reduced))
        history = self._history
        if history.plan and history.equal >= history.patience and not history.order:
            history.order = self._sorted(step)

    def take(self, dtype: torch.dtype, held: torch.dtype, keys: tuple[Key, ...]) -> Any:
        """Return the pending reduction of the bucket `keys`, whose gradients DeepSpeed has collected in dtype `held`.

        Returns:
            A `PendingMeans` if the gradients are reduced `everywhere`, otherwise a `Pending`. None if the bucket was
            not sent early, or if DeepSpeed has already reduced in this step.
        """
        step, bucket = self._current(), Bucket(dtype, held, keys)
        if step.closed:
            return None
        step.reduced.append(bucket)
        sent = step.sent.pop(bucket, None)
        return None if sent is None else sent[1]

    def _current(self) -> _Step:
        begun = self._session.clock.begun
        if self._step.sent:
            # A backward pass failed and the program continued: pending buckets still need an agreement.
            self._step.number = begun
        elif self._step.number != begun:
            self._step = _Step(begun, self._session.gradients.early_reducer)
        return self._step

    def _discard(self) -> None:
        """Discard what a failed backward pass sent before an agreement, on any rank. Collective."""
        most = torch.tensor(len(self._step.sent), device=self._gradients.device)
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=self._gradients.asking)
        if most:
            step = self._current()
            assert step.reducer is not None, "a rank has begun early where another one may not"
            self._send_rest(step, step.reducer)
            self._forget(step)
        self._step = _Step(-1)

    def note_complete(self, key: Key, parameter: Any = None) -> None:
        """Mark the gradient `key` as ready in a backward pass that reduces, and send the buckets that are complete.

        Autograd calls this for a `parameter` whose gradient it has accumulated, possibly more than once per pass, and
        also in backward passes of other engines.
        """
        if torch.compiler.is_compiling() or not self._gradients.complete_now():
            return
        step = self._current()
        step.ready.setdefault(key)
        if step.closed or step.reducer is None:
            return
        for bucket in self._history.order[len(step.sent) :]:
            if not step.ready.keys() >= set(bucket.keys):
                break
            self._send(bucket, step, step.reducer)

    def _send(self, bucket: Bucket, step: _Step, reducer: PayloadReducer) -> None:
        source = self._gradients
        keys = source.side_by_side(bucket.keys)
        number = self._numbers(reducer)[self._history.plan.index(bucket)]
        partition = source.partition(keys)
        with self._background.filling():
            flat = self._history.copy(bucket, [source.of(key).detach().to(bucket.held) for key in keys])
        with self._background.sending():
            # The means overwrite a part of what is sent, and `flat` is compared later.
            sent = flat.clone() if self._background.returns_early else flat
            pending = self._session.gradients.start_early(sent, partition, source.scale, number, source.everywhere)
            step.sent[bucket] = (flat, pending)
            if isinstance(pending, PendingMeans):
                self._background.add(pending)

    def _numbers(self, reducer: PayloadReducer) -> list[int]:
        """Return the number of the first message of each bucket of the plan, and the first number after them.

        The numbers equal those of a step without early reductions, so that random numbers do not depend on whether a
        bucket was sent early.
        """
        messages = 2 if self._gradients.everywhere else 1
        rounds = [len(reducer.layouts(self._gradients.partition(bucket.keys))) for bucket in self._history.plan]
        return list(accumulate((messages * count for count in rounds), initial=1))

    def _agree(self, step: _Step, reducer: PayloadReducer) -> bool:
        """Send the rest of the plan, and return True if it is what DeepSpeed is about to reduce. Collective.

        The answer is the same on all ranks: True only if the plan is right on every one.
        """
        self._send_rest(step, reducer)
        with self._background.filling():
            right = self._is_right(step).int()
            dist.all_reduce(right, op=dist.ReduceOp.MIN, group=self._gradients.group)
            agreed = bool(right)
        if agreed:
            reducer.skip_messages(self._numbers(reducer)[-1] - 1)
        self._send_all_back(step)
        return agreed

    def _send_rest(self, step: _Step, reducer: PayloadReducer) -> None:
        for bucket in self._history.order[len(step.sent) :]:
            self._send(bucket, step, reducer)

    def _send_all_back(self, step: _Step) -> None:
        """Send the means of all buckets back, before the first of them is waited for."""
        self._background.finish()
        for _, pending in step.sent.values():
            if isinstance(pending, PendingMeans):
                pending.send_back()

    def _is_right(self, step: _Step) -> Tensor:
        """Return whether what was sent is due to be reduced (bool [])."""
        source = self._gradients
        planned = {key for bucket in self._history.plan for key in bucket.keys}
        right = planned == set(source.due())
        equal = [
            _same_bits(flat, [source.of(key) for key in source.side_by_side(bucket.keys)])
            for bucket, (flat, _) in (step.sent.items() if right else ())
        ]
        return torch.stack([torch.full((), right, device=source.device), *equal]).all()

    def _forget(self, step: _Step) -> None:
        """Finish the pending reductions of `step`, drop their results, and roll back the residuals."""
        self._send_all_back(step)
        for flat, pending in step.sent.values():
            if isinstance(pending, PendingMeans):
                pending.finish(flat)
            else:
                pending.finish(torch.zeros(sum(segment.numel for segment in pending.own)))
        step.sent.clear()
        self._session.residuals.rollback()

    def _sorted(self, step: _Step) -> BucketOrder:
        """Return the buckets of the plan in the order in which they became complete on rank 0. Collective.

        Buckets that never became complete come last.
        """
        place = {identity: position for position, identity in enumerate(step.ready)}
        last = [max(place.get(key, len(place)) for key in bucket.keys) for bucket in self._history.plan]
        order = torch.tensor(
            sorted(range(len(last)), key=lambda index: (last[index], -index)), device=self._gradients.device
        )
        group = self._gradients.group
        dist.broadcast(order, dist.get_global_rank(group, 0), group=group)
        return tuple(self._history.plan[index] for index in order.tolist())


def reduces_now(engine: Any) -> bool:
    """Return True if `engine` is in a backward pass that reduces if it is at an accumulation boundary."""
    reduces = engine.enable_backward_allreduce and not engine.inside_no_sync_ctxt
    return bool(engine._running_engine_backward and reduces)


def _same_bits(flat: Tensor, parts: Sequence[Tensor]) -> Tensor:
    """Return whether `flat` is bit for bit `parts`, concatenated and cast to its dtype (bool []).

    NaNs with equal bits compare equal. The host waits for no device.
    """
    bits = _BITS[flat.dtype.itemsize]
    pieces = torch.split(flat, [part.numel() for part in parts])
    pairs = ((piece.view(bits), part.to(flat.dtype).view(bits)) for piece, part in zip(pieces, parts, strict=True))
    if get_accelerator().is_synchronized_device():
        return torch.tensor(all(torch.equal(*pair) for pair in pairs))
    return torch.stack([(one == part).all() for one, part in pairs]).all()


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
