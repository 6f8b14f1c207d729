"""Anomalies in gradient norms, losses and residuals: figures that are unlike those of the last steps.

Everything here is a pure function of the last figures, which all ranks share.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from deepspeed_compress.config import Guard as GuardConfig
from deepspeed_compress.policy.decider import Observation

MAX_SKIPS = 5
"""Maximum number of steps skipped in a row. After that, large norms are considered normal."""
PATIENCE = 6
"""Number of unusual figures in a row that make an anomaly; a few of them are just unusual batches."""
USUAL_SHARE = 0.9
"""Share of the window that counts as usual. Steps may be of two kinds, and the rarer kind counts as usual too."""
MIN_FIGURES = 8
"""Number of residual norms needed to judge another one (they are computed rarely), and of losses for a rollback."""
DEVIATIONS = 6.0
RESIDUAL_BOUND = 100.0
"""Allowed residual norm in units of the gradient norm, while the usual residual norm is not known."""


@dataclass(frozen=True)
class Anomaly:
    """An anomaly with its evidence. If `severe`, no batch of data explains it, so one occurrence is enough."""

    reason: str
    evidence: Mapping[str, float]
    severe: bool = False


@dataclass(frozen=True)
class GuardState:
    """State of the guard.

    Attributes:
        level: steps up the ladder towards no compression, at least `floor`.
        floor: lower bound of `level` after a rollback.
        quiet: steps without an anomaly since the last change of `level`.
        skipped: steps skipped in a row.
        odd: number of unusual figures in a row, by check.
        norms: recent gradient norms of applied steps.
        losses: recent losses of applied steps.
        residuals: recent residual norms.
        smoothed: exponentially smoothed loss.
        best: best smoothed loss.
        behind: steps in a row for which the smoothed loss has been worse than `best` by the configured margin.
    """

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

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> "GuardState":
        """Return the state of which `saved` has the attributes, with lists in place of tuples."""
        tuples = {key: tuple(value) for key, value in saved.items() if isinstance(value, list)}
        return cls(**{**saved, **tuples})

    def usual_norm(self, window: int) -> float | None:
        """Return the gradient norm that most of the last `window` steps did not exceed; None if there are fewer."""
        return _usual(_before(self.norms, self.odd.get("exploding", 0), window))

    @property
    def largest_residual(self) -> float:
        """Return the residual norm beyond which factors tell damage from compression; inf if nothing is known."""
        if len(self.residuals) > 2:
            return statistics.median(self.residuals)
        # Residuals of sparse methods outgrow the gradients. Use a generous bound until their usual size is known.
        return RESIDUAL_BOUND * statistics.median(self.norms) if self.norms else math.inf


def find_anomalies(config: GuardConfig, state: GuardState, seen: Observation) -> tuple[GuardState, tuple[Anomaly, ...]]:
    """Return the state with updated counts of unusual figures, and the anomalies. Missing figures are ignored."""
    odd = dict(state.odd)
    anomalies: dict[str, Anomaly] = {}
    for name, check in _CHECKS.items():
        value = getattr(seen, check.figure)
        if value is None:
            continue
        if math.isfinite(value):
            anomaly = check.find(config, state, value)
        else:
            anomaly = Anomaly(f"{check.figure} not finite", {check.figure: value}, severe=True)
        odd[name] = 0 if anomaly is None else odd.get(name, 0) + 1
        if anomaly is not None and (anomaly.severe or odd[name] >= check.patience(config)):
            anomalies[anomaly.reason] = anomaly
    return replace(state, odd=odd), tuple(anomalies.values())


def learn(config: GuardConfig, state: GuardState, seen: Observation) -> tuple[GuardState, Anomaly | None]:
    """Update the recent figures and the smoothed loss, and report if that has been behind its best for long enough.

    A skipped step leaves no trace: neither its norm nor its loss, which arrives one step later.
    """
    norm, loss = seen.grad_norm if seen.applied else None, seen.loss if not state.skipped else None
    # A batch with nothing to learn from says nothing about the gradients of other batches.
    if not norm or 0 < state.odd.get("vanishing", 0) < config.window:
        norm = None
    skipped = 0 if seen.applied else state.skipped + 1
    # After so many skipped steps in a row, the old norms are no longer usual.
    norms = _longer(config, state.norms, norm) if skipped < MAX_SKIPS else ()
    losses, residuals = _longer(config, state.losses, loss), _longer(config, state.residuals, seen.residual_norm)
    state = replace(state, norms=norms, losses=losses, residuals=residuals, skipped=skipped)
    return _smoothed(config, state, loss)


def _longer(config: GuardConfig, known: tuple[float, ...], value: float | None) -> tuple[float, ...]:
    return known if value is None or not math.isfinite(value) else (*known, value)[-config.window :]


def _smoothed(config: GuardConfig, state: GuardState, loss: float | None) -> tuple[GuardState, Anomaly | None]:
    rollback = config.rollback
    if rollback is None or loss is None or not math.isfinite(loss):
        return state, None
    number = min(len(state.losses) or 1, config.window)
    before = loss if state.smoothed is None else state.smoothed
    smoothed = before + (loss - before) / number
    best = smoothed if state.best is None else min(state.best, smoothed)
    late = len(state.losses) >= MIN_FIGURES and smoothed > best + rollback.behind * abs(best)
    behind = state.behind + 1 if late else 0
    state = replace(state, smoothed=smoothed, best=best, behind=behind)
    if behind < rollback.patience:
        return state, None
    reason = f"the smoothed loss has been more than {rollback.behind:.1%} above its best for {behind} steps"
    # Start again from here, because the previous best may be out of reach.
    return replace(state, behind=0, best=smoothed), Anomaly(reason, {"smoothed_loss": smoothed, "best": best})


def _before(known: tuple[float, ...], odd: int, enough: int) -> tuple[float, ...]:
    """Return the known figures without the last `odd` ones, which are still being judged.

    Returns nothing if fewer than `enough` figures are known.
    """
    return known[: len(known) - min(odd, PATIENCE)] if len(known) >= enough else ()


def _usual(known: tuple[float, ...]) -> float | None:
    """Return the value that most of the `known` figures do not exceed; None if there are none."""
    return sorted(known)[math.ceil(USUAL_SHARE * len(known)) - 1] if known else None


def _exploding(config: GuardConfig, state: GuardState, norm: float) -> Anomaly | None:
    return _too_large("gradient norm", norm, state.usual_norm(config.window), config.exploding)


def _vanishing(config: GuardConfig, state: GuardState, norm: float) -> Anomaly | None:
    usual = _usual(_before(state.norms, 0, config.window))
    if not norm or usual is None or norm >= config.vanishing * usual:
        return None
    reason = f"gradient norm {norm:.3g} has vanished: the usual one was {usual:.3g}"
    return Anomaly(reason, {"grad_norm": norm, "usual": usual})


def _residual_growth(config: GuardConfig, state: GuardState, norm: float) -> Anomaly | None:
    usual = _usual(_before(state.residuals, state.odd.get("residual_growth", 0), MIN_FIGURES))
    return _too_large("residual norm", norm, usual, config.residual_growth)


def _too_large(name: str, value: float, usual: float | None, factor: float) -> Anomaly | None:
    if not usual or value <= factor * usual:
        return None
    evidence = {name.replace(" ", "_"): value, "usual": usual}
    reason = f"{name} {value:.3g} is {value / usual:.3g} times the usual norm"
    return Anomaly(reason, evidence, severe=value > factor**2 * usual)


def _spike(config: GuardConfig, state: GuardState, loss: float) -> Anomaly | None:
    known = _before(state.losses, state.odd.get("loss_spike", 0), config.window)
    usual = _usual(known)
    if usual is None:
        return None
    median = statistics.median(known)
    deviation = statistics.median(abs(value - median) for value in known)
    if loss <= usual + max(config.loss_spike * abs(usual), DEVIATIONS * deviation):
        return None
    evidence = {"loss": loss, "usual": usual, "deviation": deviation}
    return Anomaly(f"loss {loss:.4g} is far above the usual {usual:.4g}", evidence)


@dataclass(frozen=True)
class Check:
    """A check of one `figure` of an observation. `patience` is the number of unusual figures in a row that count."""

    figure: str
    find: Callable[[GuardConfig, GuardState, float], Anomaly | None]
    patience: Callable[[GuardConfig], int] = lambda config: PATIENCE


_CHECKS: Mapping[str, Check] = {
    "exploding": Check("grad_norm", _exploding),
    # If rewards or labels are constant for a while, there is nothing to learn.
    "vanishing": Check("grad_norm", _vanishing, lambda config: config.window),
    "loss_spike": Check("loss", _spike),
    "residual_growth": Check("residual_norm", _residual_growth),
}
"""The checks, by the configuration key that sets their threshold."""
