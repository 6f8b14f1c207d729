"""Is something wrong? Gradient norms, losses and residuals against what was normal in the last steps.

A pure state machine: `judge` and `observe` return the next state, so that it can be saved, and so that all ranks, which
give it the same figures, stand in the same state.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any

from deepspeed_compress.config import Guard as GuardConfig
from deepspeed_compress.policy.observation import Observation

__all__ = ["Anomaly", "Guard", "GuardState", "Verdict"]

SKIPS = 5
"""Steps skipped in a row at most: after that the large norm is what training is."""
PERSISTS = 6
"""Figures in a row that are out of the ordinary before it counts: a few are the batches that made them."""
MOST = 0.9
"""Part of the window that lies within what is usual: steps may be of two kinds, and the rarer one is usual too."""
ENOUGH = 8
"""Residual norms without which none is usual, since looks at them are far apart."""
DEVIATIONS = 6.0
UNKNOWN = 100.0
"""Gradient norms that a residual may have while its usual size is not known."""


@dataclass(frozen=True)
class Anomaly:
    """What is wrong, and the figures that say so. `severe`: no batch of data explains it, so once is enough."""

    reason: str
    evidence: Mapping[str, float]
    severe: bool = False


@dataclass(frozen=True)
class GuardState:
    """What the guard remembers. `level`: steps up the ladder towards no compression, which has `floor` as its least;
    `odd`: how many of the last figures were out of the ordinary, by what is wrong with them; the rest are recent
    figures of applied steps, and counters of optimizer steps."""

    level: int = 0
    floor: int = 0
    quiet: int = 0
    skipped: int = 0
    odd: Mapping[str, int] = field(default_factory=dict)
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
class Verdict:
    """What is to be done after a step. `anomalies`: what was found. `behind`: training has fallen behind. `returned`:
    compression came back by a step."""

    anomalies: tuple[Anomaly, ...] = ()
    behind: Anomaly | None = None
    returned: bool = False


@dataclass(frozen=True)
class Guard:
    """Decides by `config`.

    It knows what is usual when it has seen a whole window of applied steps, and acts on nothing but figures that are
    not finite before. A norm beyond `exploding` softens when it persists; only one beyond the square of that, which no
    batch explains and clipping does not mend, keeps a step from being applied.
    """

    config: GuardConfig

    def skips(self, state: GuardState, norm: float) -> bool:
        """Whether a step of gradient norm `norm` must not be applied: never one that is not finite."""
        if not math.isfinite(norm):
            return True
        may = self.config.skip_steps and state.skipped < SKIPS
        usual = _usual(_before(state.norms, state.odd.get("exploding", 0), self.config.window))
        return may and usual is not None and norm > self.config.exploding**2 * usual > 0

    def damaged(self, state: GuardState, residual_norm: float) -> bool:
        """Whether residuals of `residual_norm` are not what compression leaves; `state` is that after the step."""
        if len(state.residuals) > 2:
            usual = statistics.median(state.residuals)
        else:
            # Of sparse methods residuals grow to many gradients; before anything is known of them this must do.
            usual = UNKNOWN * statistics.median(state.norms) if state.norms else math.inf
        return not math.isfinite(residual_norm) or residual_norm > self.config.residual_growth * usual > 0

    def observe(self, state: GuardState, seen: Observation, top: int) -> tuple[GuardState, Verdict]:
        """The state after a step, and what is to be done. `top`: levels of the ladder above 0."""
        state, anomalies = self._judged(state, seen)
        state, behind = self._learned(state, seen)
        if anomalies:
            return self._soften(state, top), Verdict(anomalies, behind)
        if state.level == state.floor or behind is not None:
            return state, Verdict(behind=behind)
        quiet = state.quiet + 1
        returned = quiet >= self.config.cooldown_steps
        level = state.level - 1 if returned else state.level
        return replace(state, level=level, quiet=0 if returned else quiet), Verdict(returned=returned)

    def _judged(self, state: GuardState, seen: Observation) -> tuple[GuardState, tuple[Anomaly, ...]]:
        """What counts of what is out of the ordinary. A figure that was not taken says nothing."""
        odd = dict(state.odd)
        found: dict[str, Anomaly] = {}
        for name, check in _CHECKS.items():
            value = getattr(seen, check.figure)
            if value is None:
                continue
            anomaly = _judge(self.config, state, check, value)
            odd[name] = 0 if anomaly is None else odd.get(name, 0) + 1
            if anomaly is not None and (anomaly.severe or odd[name] >= check.patience(self.config)):
                found[anomaly.reason] = anomaly
        return replace(state, odd=odd), tuple(found.values())

    def _learned(self, state: GuardState, seen: Observation) -> tuple[GuardState, Anomaly | None]:
        """What is usual from now on. A skipped step leaves nothing: not its norm, nor its loss, which comes later."""
        norm, loss = seen.grad_norm if seen.applied else None, seen.loss if not state.skipped else None
        # A batch without anything to learn from says nothing of the others' gradients.
        if not norm or 0 < state.odd.get("vanishing", 0) < self.config.window:
            norm = None
        skipped = 0 if seen.applied else state.skipped + 1
        # After so many in a row what was usual is no more.
        norms = self._longer(state.norms, norm) if skipped < SKIPS else ()
        losses, residuals = self._longer(state.losses, loss), self._longer(state.residuals, seen.residual_norm)
        state = replace(state, norms=norms, losses=losses, residuals=residuals, skipped=skipped)
        return self._smoothed(state, loss)

    def _longer(self, known: tuple[float, ...], value: float | None) -> tuple[float, ...]:
        good = value is not None and math.isfinite(value)
        return (*known, value)[-self.config.window :] if good and value is not None else known

    def _soften(self, state: GuardState, top: int) -> GuardState:
        reached = {"disable": top, "soften": min(state.level + 1, top), "report": state.level}[self.config.on_anomaly]
        return replace(state, level=max(reached, state.floor), quiet=0)

    def _smoothed(self, state: GuardState, loss: float | None) -> tuple[GuardState, Anomaly | None]:
        """Follow the smoothed loss; what is found when it is behind its best for long enough."""
        rollback = self.config.rollback
        if rollback is None or loss is None or not math.isfinite(loss):
            return state, None
        number = min(len(state.losses) or 1, self.config.window)
        before = loss if state.smoothed is None else state.smoothed
        smoothed = before + (loss - before) / number
        best = smoothed if state.best is None else min(state.best, smoothed)
        late = len(state.losses) >= ENOUGH and smoothed > best + rollback.behind * abs(best)
        behind = state.behind + 1 if late else 0
        state = replace(state, smoothed=smoothed, best=best, behind=behind)
        if behind < rollback.patience:
            return state, None
        reason = f"the smoothed loss has been more than {rollback.behind:.1%} above its best for {behind} steps"
        # The next judgement starts from here: what was best before may be out of reach.
        return replace(state, behind=0, best=smoothed), Anomaly(reason, {"smoothed_loss": smoothed, "best": best})


def _before(known: tuple[float, ...], odd: int, enough: int) -> tuple[float, ...]:
    """What is known without the last `odd` figures, which are being judged, until they have persisted; nothing while
    fewer than `enough` are."""
    return known[: len(known) - min(odd, PERSISTS)] if len(known) >= enough else ()


def _usual(known: tuple[float, ...]) -> float | None:
    """What most of the `known` figures do not exceed; None without any."""
    return sorted(known)[math.ceil(MOST * len(known)) - 1] if known else None


def _deviation(known: tuple[float, ...]) -> float:
    """The median of the distances from the median; 0 where nothing is known."""
    median = statistics.median(known) if known else 0.0
    return statistics.median([abs(value - median) for value in known] or [0.0])


def _exploding(config: GuardConfig, state: GuardState, norm: float) -> Anomaly | None:
    usual = _usual(_before(state.norms, state.odd.get("exploding", 0), config.window))
    return _too_large("gradient norm", norm, usual, config.exploding)


def _vanishing(config: GuardConfig, state: GuardState, norm: float) -> Anomaly | None:
    usual = _usual(_before(state.norms, 0, config.window))
    if not norm or usual is None or norm >= config.vanishing * usual:
        return None
    reason = f"gradient norm {norm:.3g} has vanished: the usual one was {usual:.3g}"
    return Anomaly(reason, {"grad_norm": norm, "usual": usual})


def _residual_growth(config: GuardConfig, state: GuardState, norm: float) -> Anomaly | None:
    usual = _usual(_before(state.residuals, state.odd.get("residual_growth", 0), ENOUGH))
    return _too_large("residual norm", norm, usual, config.residual_growth)


def _too_large(name: str, value: float, usual: float | None, factor: float) -> Anomaly | None:
    if not usual or value <= factor * usual:
        return None
    evidence = {name.replace(" ", "_"): value, "usual": usual}
    reason = f"{name} {value:.3g} is {value / usual:.3g} times what is usual"
    return Anomaly(reason, evidence, severe=value > factor**2 * usual)


def _spike(config: GuardConfig, state: GuardState, loss: float) -> Anomaly | None:
    known = _before(state.losses, state.odd.get("loss_spike", 0), config.window)
    usual, deviation = _usual(known), _deviation(known)
    if usual is None or loss <= usual + max(config.loss_spike * abs(usual), DEVIATIONS * deviation):
        return None
    evidence = {"loss": loss, "usual": usual, "deviation": deviation}
    return Anomaly(f"loss {loss:.4g} is far above the usual {usual:.4g}", evidence)


@dataclass(frozen=True)
class Check:
    """What is judged of a `figure` of an observation. `patience`: how many in a row must be out of the ordinary."""

    figure: str
    find: Callable[[GuardConfig, GuardState, float], Anomaly | None]
    patience: Callable[[GuardConfig], int] = lambda config: PERSISTS


def _judge(config: GuardConfig, state: GuardState, check: Check, value: float) -> Anomaly | None:
    if math.isfinite(value):
        return check.find(config, state, value)
    return Anomaly(f"{check.figure} not finite", {check.figure: value}, severe=True)


_CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "exploding": Check("grad_norm", _exploding),
        # Where rewards or labels are all alike for a while there is nothing to learn.
        "vanishing": Check("grad_norm", _vanishing, lambda config: config.window),
        "loss_spike": Check("loss", _spike),
        "residual_growth": Check("residual_norm", _residual_growth),
    }
)
"""By the key of the configuration that says what is out of the ordinary."""
