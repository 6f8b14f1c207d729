"""What a session remembers from one step to the next, and what the end of a step does to it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepspeed_compress.compression.residuals import Residuals, ResidualStores
from deepspeed_compress.compression.state import OWNED
from deepspeed_compress.config import CompressConfig, CompressedGradients, ErrorFeedbackConfig
from deepspeed_compress.session.switching import hand_over_means, make_expected

__all__ = ["FinishedStep", "Remembered"]

_RESIDUALS = frozenset({"gradients", "means", "node", "node_means"})
"""Memories of what was left out; the others are momenta, factors, and parts still to be handed on."""


@dataclass(frozen=True)
class FinishedStep:
    """What DeepSpeed did with an optimizer step: `applied` is False when it was skipped for an overflow.

    `step` and `samples` count the finished one; `samples` is None where nobody counts them. The loss scales are 1.0
    where there is none. `grad_norm`: of the mean gradient, without loss scale, inf where it is not finite; None where
    it is not known.
    """

    step: int
    samples: int | None
    applied: bool
    scale_before: float
    scale_after: float
    grad_norm: float | None = None


class Remembered:
    """All memories of a session."""

    def __init__(self, stores: ResidualStores, config: CompressConfig) -> None:
        self.prune_owned = False
        """Set after loading the state of another number of ranks: residuals of all owners are here."""
        self._stores, self._config = stores, config
        gradients = config.gradients
        kept = gradients.residuals if isinstance(gradients, CompressedGradients) else None
        self._forget_every = kept.reset_interval if isinstance(kept, ErrorFeedbackConfig) else None

    @property
    def by_name(self) -> Mapping[str, Residuals]:
        return self._stores.by_name

    @property
    def transactional(self) -> bool:
        """Whether what a step has written can be forgotten."""
        return self._stores.transactional

    def settle(self, finished: FinishedStep, dense: bool) -> None:
        """Keep what the step has written, or forget it with a skipped step. `dense`: it sent all uncompressed."""
        if self.prune_owned and finished.applied and not dense:
            self._prune()
        for store in self.by_name.values():
            store.commit() if finished.applied else store.rollback()
            if finished.scale_after != finished.scale_before:
                store.scale(finished.scale_after / finished.scale_before)
        if finished.applied and self._forget_every is not None and finished.step % self._forget_every == 0:
            self.clear_residuals()

    def rollback(self) -> None:
        """What the running step has written was written in vain."""
        for store in self.by_name.values():
            store.rollback()

    def clear(self) -> None:
        for store in self.by_name.values():
            store.clear()

    def clear_residuals(self) -> None:
        for name in _RESIDUALS & self.by_name.keys():
            self.by_name[name].clear()

    def residual_norm(self, loss_scale: float) -> float | None:
        """L2 norm of what this rank left out; a momentum is none of it. None where nothing is kept."""
        left = [store for name, store in self.by_name.items() if name in _RESIDUALS]
        if not left:
            return None
        # A GPU is waited for once, whatever there is.
        squares = [norm for store in left for norm in store.square_norms()]
        return math.sqrt(sum(torch.stack(squares).tolist())) / loss_scale if squares else 0.0

    def expect(self, storage: Mapping[str, str]) -> None:
        """Make room for a state with the memories of `storage`: see `make_expected`."""
        make_expected(self._stores, self._config, storage)

    def hand_over_means(self, scale: float) -> None:
        """For PowerSGD, which begins with this step: see `hand_over_means`."""
        hand_over_means(self._stores, scale)

    def _prune(self) -> None:
        """Drop what other ranks own: the first step has shown it."""
        for name in OWNED & self.by_name.keys():
            self.by_name[name].prune()
        self.prune_owned = False
