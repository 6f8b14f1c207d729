"""Order of the gradient buckets of earlier steps, which shows when speculative reductions may begin."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
        if bucket not in self.copies:
            self.copies[bucket] = torch.cat(parts)
            return self.copies[bucket]
        return torch.cat(parts, out=self.copies[bucket])

    def back_off(self) -> None:
        """Stop sending buckets early, and require twice as many equal steps before starting again."""
        self.order, self.equal, self.patience = (), 0, min(2 * self.patience, LONGEST_PATIENCE)

    @property
    def is_stable(self) -> bool:
        """Return True if enough consecutive steps had the same plan."""
        return bool(self.plan) and self.equal >= self.patience
