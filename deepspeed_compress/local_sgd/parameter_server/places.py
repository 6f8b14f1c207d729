"""Tensors of a parameter server: the anchor and its momentum, by the place of a rank within its island.

Tensors are never changed in place: a call makes new ones, which are checked before they take effect, and anything that
refers to the old ones keeps them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TypeVar

import torch
from torch import Tensor

from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.collectives.reduction import Groups, ReductionContext, Reductions
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.config import Islands, Outer
from deepspeed_compress.local_sgd.exchange import FramedMessages
from deepspeed_compress.local_sgd.parameter_server.messages import Slice
from deepspeed_compress.local_sgd.round_peers import group_of_one
from deepspeed_compress.monitor import Meter

T = TypeVar("T")

NAMES = ("anchor", "momentum", "waiting")
"""Tensors of a place, by their names in files."""
UNFIT = (ArithmeticError, AssertionError, LookupError, MemoryError, RuntimeError, TypeError)
"""Errors that codecs and torch raise for bodies and settings that do not fit."""


@dataclass(frozen=True)
class Place:
    """Tensors that the ranks at one place of all islands share: flat fp32 on the host.

    Attributes:
        anchor: Weights from which all islands start.
        momentum: Momentum of the outer optimizer; empty if it has none.
        waiting: Sum of the pushes since momentum was last updated; empty without momentum.
        messages: Codec of the messages to and from the ranks.
    """

    anchor: Tensor
    momentum: Tensor
    waiting: Tensor
    messages: FramedMessages

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors by name."""
        return {name: getattr(self, name) for name in NAMES}

    @property
    def is_finite(self) -> bool:
        """Return True if all tensors are finite."""
        return all(bool(torch.isfinite(tensor).all()) for tensor in self.tensors.values())

    def after(self, update: Tensor, weight: float, outer: Outer, is_whole: bool) -> "Place":
        """Return the place after a push of `update` (overwritten).

        Args:
            update: weight changes of an island, flat fp32.
            weight: weight of the push.
            outer: settings of the outer optimizer.
            is_whole: True if the weights of pushes add up to a whole mean with this one, so that momentum is updated.
        """
        anchor = self.anchor.add(update.mul_(weight), alpha=outer.lr)
        if outer.optimizer != "nesterov":
            return replace(self, anchor=anchor)
        waiting = self.waiting + update
        if not is_whole:
            return replace(self, anchor=anchor, waiting=waiting)
        momentum = self.momentum.mul(outer.momentum).add_(waiting)
        anchor.add_(momentum, alpha=outer.lr * outer.momentum)
        return replace(self, anchor=anchor, momentum=momentum, waiting=torch.zeros_like(waiting))


def read_place(
    settings: Islands, layout: Sequence[Slice], shapes: Mapping[str, Sequence[int]], tensors: Mapping[str, Tensor]
) -> Place:
    """Return a place with the `tensors` of a file. Raises ValueError if they do not fit the `layout`."""
    numel = sum(numel for _, _, numel in layout)
    for name, size in zip(NAMES, (numel, *[numel if settings.outer.optimizer == "nesterov" else 0] * 2), strict=True):
        found = tensors.get(name)
        if found is None or found.dtype != torch.float32 or found.shape != (size,):
            what = "missing" if found is None else f"{tuple(found.shape)} of {found.dtype}"
            raise ValueError(f"tensor {name} is {what} (expected: {(size,)} of torch.float32)")
    place = Place(**{name: tensors[name] for name in NAMES}, messages=make_messages(settings, layout, shapes))
    if not place.is_finite:
        raise ValueError("a tensor is not finite")
    return place


def make_messages(settings: Islands, layout: Sequence[Slice], shapes: Mapping[str, Sequence[int]]) -> FramedMessages:
    """Return the codec of the slices in `layout`."""
    offsets = accumulate((numel for _, _, numel in layout), initial=0)
    segments = tuple(Segment(*one, offset, 0) for one, offset in zip(layout, offsets, strict=False))
    parameters = Parameters({name: tuple(shape) for name, shape in shapes.items()}, list(shapes))
    stores, run = ResidualStores(transactional=False), Run(StepClock(), Meter())
    return FramedMessages(
        settings.exchange, segments, Reductions(ReductionContext(Groups(group_of_one()), parameters, stores, run))
    )


def refuse_unfit(work: Callable[[], T]) -> T:
    """Return the result of `work`. Raises ValueError if it fails because of what an island has sent."""
    try:
        return work()
    except UNFIT as error:
        raise ValueError(f"it cannot be carried out ({type(error).__name__}: {str(error)[:200]})") from error
