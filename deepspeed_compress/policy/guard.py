"""Is something wrong? Gradient norms, losses and residuals against what was normal in the last steps.

A pure state machine: `judge` and `observe` return the next state, so that it can be saved, and so that all ranks, which
give it the same figures, stand in the same state.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from deepspeed_compress.config import Guard as GuardConfig
from deepspeed_compress.policy.observation import Observation

__all__ = ["Anomaly", "Guard", "GuardState", "Orders"]

SKIPS = 5
"""Steps skipped in a row at most: after that the large norm is what training is."""
ENOUGH = 8
"""Figures without which no median says what is normal."""
DEVIATIONS = 6.0
UNKNOWN = 100.0
"""Gradient norms that a residual may have while its usual size is not known."""


@dataclass(frozen=True)
class Anomaly:
    """What is wrong, and the figures that say so."""

    reason: str
    evidence: Mapping[str, float]


@dataclass(frozen=True)
class GuardState:
    """What the guard remembers. `level`: steps up the ladder towards no compression, which has `floor` as its least;
    the rest are recent figures, and counters of optimizer steps."""

    level: int = 0
    floor: int = 0
    quiet: int = 0
    skipped: int = 0
    norms: tuple[float, ...] = ()
    losses: tuple[float, ...] = ()
    residuals: tuple[float, ...] = ()
    smoothed: float | None = None
    best: float | None = None
    behind: int = 0

    def saved(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> "GuardState":
        values: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in saved.items()}
        return cls(**values)


@dataclass(frozen=True)
class Orders:
    """What is to be done after a step. `anomalies`: what was found. `behind`: training has fallen behind. `returned`:
    compression came back by a step."""

    anomalies: tuple[Anomaly, ...] = ()
    behind: Anomaly | None = None
    returned: bool = False


@dataclass(frozen=True)
class Guard:
    """Decides by `config`."""

    config: GuardConfig

    def skips(self, state: GuardState, norm: float) -> bool:
        """Whether a step of gradient norm `norm` must not be applied: never one that is not finite."""
        if not math.isfinite(norm):
            return True
        enough = len(state.norms) >= ENOUGH and state.skipped < SKIPS and self.config.skip_steps
        return enough and norm > self.config.exploding * statistics.median(state.norms)

    def damaged(self, state: GuardState, residual_norm: float) -> bool:
        """Whether residuals of `residual_norm` are not what compression leaves; `state` is that after the step."""
        if len(state.residuals) > 2:
            usual = statistics.median(state.residuals)
        else:
            # Of sparse methods residuals grow to many gradients; before anything is known of them this must do.
            usual = UNKNOWN * statistics.median(state.norms) if state.norms else math.inf
        return not math.isfinite(residual_norm) or residual_norm > self.config.residual_growth * usual

    def observe(self, state: GuardState, seen: Observation, top: int) -> tuple[GuardState, Orders]:
        """The state after a step, and what is to be done. `top`: levels of the ladder above 0."""
        anomalies = tuple(find for check in _CHECKS for find in check(self.config, state, seen))
        state = self._remember(state, seen)
        state, behind = self._smoothed(state, seen)
        if anomalies:
            return self._soften(state, top), Orders(anomalies, behind)
        if state.level == state.floor or behind is not None:
            return state, Orders(behind=behind)
        quiet = state.quiet + 1
        returned = quiet >= self.config.cooldown_steps
        level = state.level - 1 if returned else state.level
        return replace(state, level=level, quiet=0 if returned else quiet), Orders(returned=returned)

    def _remember(self, state: GuardState, seen: Observation) -> GuardState:
        def longer(known: tuple[float, ...], value: float | None) -> tuple[float, ...]:
            good = value is not None and math.isfinite(value)
            return (*known, value)[-self.config.window :] if good and value is not None else known

        return replace(
            state,
            norms=longer(state.norms, seen.grad_norm),
            losses=longer(state.losses, seen.loss),
            residuals=longer(state.residuals, seen.residual_norm),
            skipped=0 if seen.applied else state.skipped + 1,
        )

    def _soften(self, state: GuardState, top: int) -> GuardState:
        reached = {"disable": top, "soften": min(state.level + 1, top), "report": state.level}[self.config.on_anomaly]
        return replace(state, level=max(reached, state.floor), quiet=0)

    def _smoothed(self, state: GuardState, seen: Observation) -> tuple[GuardState, Anomaly | None]:
        """Follow the smoothed loss; what is found when it is behind its best for long enough."""
        rollback = self.config.rollback
        if rollback is None or seen.loss is None or not math.isfinite(seen.loss):
            return state, None
        weight = 1 / min(len(state.losses) or 1, self.config.window)
        before = seen.loss if state.smoothed is None else state.smoothed
        smoothed = before + weight * (seen.loss - before)
        best = smoothed if state.best is None else min(state.best, smoothed)
        late = len(state.losses) >= ENOUGH and smoothed > best * (1 + rollback.behind)
        behind = state.behind + 1 if late else 0
        state = replace(state, smoothed=smoothed, best=best, behind=behind)
        if behind < rollback.patience:
            return state, None
        reason = f"the smoothed loss has been more than {rollback.behind:.1%} above its best for {behind} steps"
        # The next judgement starts from here: what was best before may be out of reach.
        return replace(state, behind=0, best=smoothed), Anomaly(reason, {"smoothed_loss": smoothed, "best": best})


Check = Callable[[GuardConfig, GuardState, Observation], Iterator[Anomaly]]


def _not_finite(config: GuardConfig, state: GuardState, seen: Observation) -> Iterator[Anomaly]:
    figures = {"grad_norm": seen.grad_norm, "loss": seen.loss, "residual_norm": seen.residual_norm}
    bad = {name: value for name, value in figures.items() if value is not None and not math.isfinite(value)}
    if bad:
        yield Anomaly(f"{' and '.join(bad)} not finite", bad)


def _too_large(config: GuardConfig, state: GuardState, seen: Observation) -> Iterator[Anomaly]:
    yield from _against_median("gradient norm", seen.grad_norm, state.norms, config.exploding)
    yield from _against_median("residual norm", seen.residual_norm, state.residuals, config.residual_growth)


def _against_median(name: str, value: float | None, known: tuple[float, ...], factor: float) -> Iterator[Anomaly]:
    if value is None or not math.isfinite(value) or len(known) < ENOUGH:
        return
    median = statistics.median(known)
    if value > factor * median > 0:
        evidence = {name.replace(" ", "_"): value, "median": median}
        yield Anomaly(f"{name} {value:.3g} is {value / median:.3g} times the running median", evidence)


def _too_small(config: GuardConfig, state: GuardState, seen: Observation) -> Iterator[Anomaly]:
    if seen.grad_norm is None or len(state.norms) < ENOUGH:
        return
    median = statistics.median(state.norms)
    if seen.grad_norm < config.vanishing * median:
        yield Anomaly(
            f"gradient norm {seen.grad_norm:.3g} has vanished: the running median is {median:.3g}",
            {"grad_norm": seen.grad_norm, "median": median},
        )


def _spike(config: GuardConfig, state: GuardState, seen: Observation) -> Iterator[Anomaly]:
    if seen.loss is None or not math.isfinite(seen.loss) or len(state.losses) < ENOUGH:
        return
    median = statistics.median(state.losses)
    usual = statistics.median(abs(loss - median) for loss in state.losses)
    if seen.loss > median + max(config.loss_spike * abs(median), DEVIATIONS * usual):
        evidence = {"loss": seen.loss, "median": median, "deviation": usual}
        yield Anomaly(f"loss {seen.loss:.4g} is far above its running median {median:.4g}", evidence)


_CHECKS: tuple[Check, ...] = (_not_finite, _too_large, _too_small, _spike)
