"""Reductions of ZeRO 1 that begin while backward still runs, and are used only if they prove to be the right ones.

DeepSpeed reduces under ZeRO 1 when the backward pass of the boundary micro-step is over (`reduce_gradients`): what it
finds in the gradients then is right whatever the program did before, with several backwards, `no_sync`, parameters
used now and then, layers shared between reentrant checkpoints. Its own `overlap_comm` gives that up. Here a program
that reduces the same buckets step after step has them sent off as soon as their gradients are there. Then, where
DeepSpeed would reduce, all ranks compare what was sent with what is to be reduced, bit for bit, and agree: either all
of it counts, or none of it does, everything that it wrote into memories is forgotten, and DeepSpeed goes on as ever.

On all ranks an engine sends the same messages in the same order, whatever becomes of them: every bucket of the plan
once, before the agreement. The plan is that of earlier steps, which were equal on all ranks since they were reduced.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.communication.buckets import Partition
from deepspeed_compress.communication.payload import PayloadReducer
from deepspeed_compress.communication.reducer import Pending
from deepspeed_compress.engine.session import Session

__all__ = ["EarlyReductions", "Key"]

Key = tuple[int, int, int]
"""A parameter in DeepSpeed's bucket: (optimizer group, index in the group, parameter id)."""
LONGEST_PATIENCE = 1024
"""Equal steps that are asked for at most before reductions begin early again."""


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
    ready: dict[int, None] = field(default_factory=dict)
    sent: dict[Bucket, tuple[Tensor, Pending]] = field(default_factory=dict)
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

    def learn(self, plan: BucketOrder) -> None:
        if plan != self.plan:
            self.plan, self.order, self.equal = plan, (), 0
        self.equal += 1

    def back_off(self) -> None:
        self.order, self.equal, self.patience = (), 0, min(2 * self.patience, LONGEST_PATIENCE)

    @property
    def is_stable(self) -> bool:
        return bool(self.plan) and self.equal >= self.patience


class EarlyReductions:
    """Of one engine. `partition_of` gives the partition of a bucket's keys, `scale` is that of the mean.

    Call `reduce_gradients` in place of DeepSpeed's, and `take` for each bucket that it reduces.
    """

    def __init__(
        self, engine: Any, session: Session, partition_of: Callable[[tuple[Key, ...]], Partition], scale: float
    ) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._session = session
        self._partition_of = partition_of
        self._scale = scale
        self._reduce_gradients = engine.optimizer.reduce_gradients
        self._history = _BucketHistory()
        self._step = _Step(-1)
        for parameter in self._parameters():
            handle = parameter.register_post_accumulate_grad_hook(self._gradient_is_there)
            session.patches.on_undo(handle.remove)
            # DeepSpeed's `destroy` removes them with its own.
            engine.optimizer._grad_acc_hooks.append(handle)
            session.patches.on_undo(partial(engine.optimizer._grad_acc_hooks.remove, handle))

    def _parameters(self) -> Iterator[Any]:
        return (one for group in self._optimizer.bit16_groups for one in group if one.requires_grad)

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """DeepSpeed's `reduce_gradients`, after an agreement on what was sent early."""
        step = self._current()
        if step.closed:
            self._reduce_gradients(pipeline_parallel=pipeline_parallel)
            return
        if self._history.order and step.reducer is not None and not self._agree(step, step.reducer):
            self._forget(step)
            self._history.back_off()
        self._reduce_gradients(pipeline_parallel=pipeline_parallel)
        assert not step.sent, "reductions that began early and were agreed upon were not asked for"
        step.closed = True
        self._history.learn(tuple(step.reduced))
        if self._history.is_stable and not self._history.order:
            self._history.order = self._sorted(step)

    def take(self, dtype: torch.dtype, tensor: Tensor, keys: tuple[Key, ...]) -> Pending | None:
        """The reduction under way of the bucket `keys`, whose gradients DeepSpeed has collected in `tensor`."""
        step, bucket = self._current(), Bucket(dtype, tensor.dtype, keys)
        if step.closed:
            return None
        step.reduced.append(bucket)
        sent = step.sent.pop(bucket, None)
        return None if sent is None else sent[1]

    def _current(self) -> _Step:
        begun = self._session.clock.begun
        if self._step.sent:
            # A backward pass was given up, and a checkpoint loaded: what travels still waits for an agreement.
            self._step.number = begun
        elif self._step.number != begun:
            self._step = _Step(begun, self._session.early_reducer)
        return self._step

    def _gradient_is_there(self, parameter: Any) -> None:
        """Called by autograd, perhaps more than once in a pass, and in passes of other engines."""
        if not self._in_last_backward():
            return
        step = self._current()
        step.ready.setdefault(self._optimizer.get_param_id(parameter))
        if step.closed or step.reducer is None:
            return
        for bucket in self._history.order[len(step.sent) :]:
            if any(key[2] not in step.ready for key in bucket.keys):
                break
            self._send(bucket, step, step.reducer)

    def _in_last_backward(self) -> bool:
        """Whether this engine runs the backward pass after which it reduces."""
        engine = self._engine
        return (
            not torch.compiler.is_compiling()
            and engine._running_engine_backward
            and engine.enable_backward_allreduce
            and not engine.inside_no_sync_ctxt
            and self._optimizer.is_gradient_accumulation_boundary()
        )

    def _send(self, bucket: Bucket, step: _Step, reducer: PayloadReducer) -> None:
        flat = torch.cat([self._gradient(key).to(bucket.held) for key in bucket.keys])
        partition = self._partition_of(bucket.keys)
        number = self._numbers(reducer)[self._history.plan.index(bucket)]
        pending = self._session.start_early(flat, partition, self._scale, number)
        step.sent[bucket] = (flat, pending)

    def _gradient(self, key: Key) -> Tensor:
        """Flat; zeros where there is none, which the agreement finds."""
        parameter = self._optimizer.bit16_groups[key[0]][key[1]]
        gradient: Tensor | None = self._optimizer.get_gradient_for_reduction(parameter)
        return torch.zeros_like(parameter).reshape(-1) if gradient is None else gradient.reshape(-1)

    def _numbers(self, reducer: PayloadReducer) -> list[int]:
        """The number of the first message of each bucket of the plan, and the first one after them.

        They are those of a step without early reductions, so that random numbers do not tell which it was.
        """
        counts = [len(reducer.layouts(self._partition_of(bucket.keys))) for bucket in self._history.plan]
        return list(accumulate(counts, initial=1))

    def _agree(self, step: _Step, reducer: PayloadReducer) -> bool:
        """Send what is left of the plan; whether, on all ranks, it is what DeepSpeed is about to reduce."""
        for bucket in self._history.order[len(step.sent) :]:
            self._send(bucket, step, reducer)
        right = torch.tensor(int(self._is_right(step)))
        dist.all_reduce(right, op=dist.ReduceOp.MIN, group=self._optimizer.dp_process_group)
        if right:
            reducer.skip_messages(self._numbers(reducer)[-1] - 1)
        return bool(right)

    def _is_right(self, step: _Step) -> bool:
        planned = {key for bucket in self._history.plan for key in bucket.keys}
        return planned == set(self._keys()) and all(
            _same_bits(flat, [self._gradient(key) for key in bucket.keys]) for bucket, (flat, _) in step.sent.items()
        )

    def _keys(self) -> Iterator[Key]:
        """Of the parameters that DeepSpeed is about to reduce."""
        for number, group in enumerate(self._optimizer.bit16_groups):
            for parameter in group:
                if parameter.numel() and self._optimizer.get_gradient_for_reduction(parameter) is not None:
                    yield number, parameter.param_idx_in_group, self._optimizer.get_param_id(parameter)

    def _forget(self, step: _Step) -> None:
        """Wait for what was sent for nothing; memories are as before it."""
        for _, pending in step.sent.values():
            pending.finish(torch.zeros(sum(segment.numel for segment in pending.own)))
        step.sent.clear()
        self._session.forget_step()

    def _sorted(self, step: _Step) -> BucketOrder:
        """The buckets of the plan as they were complete on rank 0; those that never were, at the end. Collective."""
        place = {identity: position for position, identity in enumerate(step.ready)}
        last = [max(place.get(key[2], len(place)) for key in bucket.keys) for bucket in self._history.plan]
        order = torch.tensor(sorted(range(len(last)), key=lambda index: (last[index], -index)))
        group = self._optimizer.dp_process_group
        dist.broadcast(order, dist.get_global_rank(group, 0), group=group)
        return tuple(self._history.plan[index] for index in order.tolist())


def _same_bits(flat: Tensor, parts: Sequence[Tensor]) -> bool:
    """Whether `flat` is `parts` one after the other, in its type. NaN equals itself."""
    bits = _BITS[flat.dtype.itemsize]
    pieces = torch.split(flat, [part.numel() for part in parts])
    return all(
        torch.equal(one.view(bits), part.to(flat.dtype).view(bits)) for one, part in zip(pieces, parts, strict=True)
    )


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
