"""Residuals and momenta that a session keeps between steps, and what the end of a step does to them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from deepspeed_compress.compression.residual_stores import ResidualStores, full_name, kind_of, owner_of
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.state import OWNED, SHARED
from deepspeed_compress.config import CompressConfig, CompressedGradients, ErrorFeedbackConfig

_RESIDUALS = frozenset({"gradients", "means", "node", "node_means"})
"""Kinds of stores that hold residuals; the others hold momenta, factors, and values still to be passed on."""
_OF_SOME = frozenset({"gradients", "means", "factors", "spread"})
"""Kinds of stores that some settings of a run need and others do not."""


@dataclass(frozen=True)
class FinishedStep:
    """Result of an optimizer step in DeepSpeed.

    Attributes:
        step: number of finished steps, this one included.
        samples: number of samples so far; None if they are not counted.
        applied: False if the step was skipped for an overflow.
        scale_before: loss scale of the step; 1.0 without loss scaling.
        scale_after: loss scale after the step; 1.0 without loss scaling.
        grad_norm: norm of the mean gradient without loss scale; inf if it is not finite, None if unknown.
    """

    step: int
    samples: int | None
    applied: bool
    scale_before: float
    scale_after: float
    grad_norm: float | None = None


class ResidualState:
    """All residuals and momenta of a session."""

    def __init__(self, stores: ResidualStores, config: CompressConfig) -> None:
        self._prunes = False
        """True after a state of other ranks was restored: residuals of all owners are here."""
        self.stores, self._config = stores, config
        gradients = config.gradients
        kept = gradients.residuals if isinstance(gradients, CompressedGradients) else None
        self._forget_every = kept.reset_interval if isinstance(kept, ErrorFeedbackConfig) else None

    @property
    def by_name(self) -> Mapping[str, Residuals]:
        """Return residuals and momenta, by what they hold ("gradients", "means", "velocity" ...)."""
        return self.stores.by_name

    def settle(self, finished: FinishedStep, dense: bool) -> None:
        """Commit what the step has written, or roll it back if the step was skipped.

        Args:
            finished: the step.
            dense: True if the step sent everything uncompressed.
        """
        if self._prunes and finished.applied and not dense:
            # Drop the residuals of elements that other ranks own; the first step has shown which they are.
            for store in self._of(OWNED):
                store.prune()
            self._prunes = False
        for store in self.by_name.values():
            store.commit() if finished.applied else store.rollback()
            if finished.scale_after != finished.scale_before:
                store.scale(finished.scale_after / finished.scale_before)
        if finished.applied and self._forget_every is not None and finished.step % self._forget_every == 0:
            self.clear_residuals()

    def rollback(self) -> None:
        """Roll back what the running step has written into error-feedback buffers and momenta."""
        for store in self.by_name.values():
            store.rollback()

    def clear(self) -> None:
        for store in self.by_name.values():
            store.clear()

    def clear_residuals(self) -> None:
        for store in self._of(_RESIDUALS):
            store.clear()

    def _of(self, kinds: frozenset[str]) -> list[Residuals]:
        return [store for name, store in self.by_name.items() if kind_of(name) in kinds]

    def residual_norm(self, loss_scale: float) -> float | None:
        """Return the L2 norm of this rank's residuals, without momenta; None if it keeps none."""
        left = self._of(_RESIDUALS)
        if not left:
            return None
        # Synchronize with the GPU once, whatever the number of stores.
        squares = [norm for store in left for norm in store.square_norms()]
        return math.sqrt(sum(torch.stack(squares).tolist())) / loss_scale if squares else 0.0

    def expect(self, storage: Mapping[str, str]) -> None:
        """Make the stores of a state that is about to be loaded that no settings have requested yet.

        If settings change during the run, later ones will request them. `storage` is the form of each store of the
        state, by name.
        """
        config, gradients = self._config, self._config.gradients
        if config.adaptive is None and not config.schedule.phases:
            return
        kept = gradients.residuals if isinstance(gradients, CompressedGradients) else None
        for name in sorted(storage.keys() - self.by_name.keys()):
            if kind_of(name) in _OF_SOME:
                shared = kind_of(name) in SHARED
                on_host = kept is not None and kept.on_host and not shared
                self.stores.get(name, storage[name], on_host, scaled=not shared)

    def restored(self, same_ranks: bool) -> None:
        """Note that a state was restored; residuals of owners are still to be dropped if other ranks saved it."""
        self._prunes = not same_ranks

    def hand_over_means(self, scale: float) -> None:
        """Add the residuals of means to those of owners' gradients, for PowerSGD, which has no means of matrices.

        `scale` is that of the sums that became means. An owner's gradient is in the sum once, so the residual of a mean
        divided by the scale is added to the next sum.
        """
        stores = self.by_name
        for name in [name for name in stores if kind_of(name) == "means"]:
            means, gradients = stores[name], stores.get(full_name("gradients", owner_of(name)))
            if gradients is not None:
                for piece, values in list(means.items()):
                    gradients.add([(piece, values / scale)], values.device)
                means.clear()
