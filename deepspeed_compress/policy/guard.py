"""The guard: detects anomalies in gradient norms, losses and residuals by comparing them with the last steps.

It is a pure state machine: `observe` returns the next state, so the state can be saved, and all ranks, which observe
the same figures, are in the same state.
"""

import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from deepspeed_compress.config import Guard as GuardConfig
from deepspeed_compress.policy.observation import Observation

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

    def saved(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def loaded(cls, saved: Mapping[str, Any]) -> "GuardState":
        values: dict[str, Any] = {key: tuple(it) if isinstance(it, list) else it for key, it in saved.items()}
        return cls(**values)


@dataclass(frozen=True)
class Verdict:
    """Outcome of observing a step.

    Attributes:
        anomalies: the anomalies found.
        behind: set if training has fallen behind its best loss.
        returned: compression was increased by one level after a quiet period.
    """

    anomalies: tuple[Anomaly, ...] = ()
    behind: Anomaly | None = None
    returned: bool = False


@dataclass(frozen=True)
class Guard:
    """Decides according to `config`.

    Until it has seen a full window of applied steps, it reacts only to non-finite figures. A gradient norm beyond
    `exploding` softens the compression if it persists. Only a norm beyond the square of that factor, which no batch
    explains and clipping does not repair, prevents a step from being applied.
    """

    config: GuardConfig

    def skips(self, state: GuardState, norm: float) -> bool:
        """Return True if a step with gradient norm `norm` must not be applied; always True if it is not finite."""
        if not math.isfinite(norm):
            return True
        can_skip = self.config.skip_steps and state.skipped < MAX_SKIPS
        usual = _usual(_before(state.norms, state.odd.get("exploding", 0), self.config.window))
        return can_skip and usual is not None and norm > self.config.exploding**2 * usual > 0

    def damaged(self, state: GuardState, residual_norm: float) -> bool:
        """Return True if residuals of `residual_norm` cannot come from compression; `state` is that after the step."""
        if len(state.residuals) > 2:
            usual = statistics.median(state.residuals)
        else:
            # Residuals of sparse methods outgrow the gradients. Use a generous bound until their usual size is known.
            usual = RESIDUAL_BOUND * statistics.median(state.norms) if state.norms else math.inf
        return not math.isfinite(residual_norm) or residual_norm > self.config.residual_growth * usual > 0

    def observe(self, state: GuardState, seen: Observation, top: int) -> tuple[GuardState, Verdict]:
        """Return the state after a step, and the verdict. `top` is the number of ladder levels above 0."""
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
        """Return the state with updated counts of unusual figures, and the anomalies. Missing figures are ignored."""
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
        """Update the recent figures and the smoothed loss.

        A skipped step leaves no trace: neither its norm nor its loss, which arrives one step later.
        """
        norm, loss = seen.grad_norm if seen.applied else None, seen.loss if not state.skipped else None
        # A batch with nothing to learn from says nothing about the gradients of other batches.
        if not norm or 0 < state.odd.get("vanishing", 0) < self.config.window:
            norm = None
        skipped = 0 if seen.applied else state.skipped + 1
        # After so many skipped steps in a row, the old norms are no longer usual.
        norms = self._longer(state.norms, norm) if skipped < MAX_SKIPS else ()
        losses, residuals = self._longer(state.losses, loss), self._longer(state.residuals, seen.residual_norm)
        state = replace(state, norms=norms, losses=losses, residuals=residuals, skipped=skipped)
        return self._smoothed(state, loss)

    def _longer(self, known: tuple[float, ...], value: float | None) -> tuple[float, ...]:
        good = value is not None and math.isfinite(value)
        return (*known, value)[-self.config.window :] if good and value is not None else known

    def _soften(self, state: GuardState, top: int) -> GuardState:
        level = {"disable": top, "soften": min(state.level + 1, top), "report": state.level}[self.config.on_anomaly]
        return replace(state, level=max(level, state.floor), quiet=0)

    def _smoothed(self, state: GuardState, loss: float | None) -> tuple[GuardState, Anomaly | None]:
        """Update the smoothed loss, and report if it has been behind its best for long enough."""
        rollback = self.config.rollback
        if rollback is None or loss is None or not math.isfinite(loss):
            return state, None
        number = min(len(state.losses) or 1, self.config.window)
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


def _deviation(known: tuple[float, ...]) -> float:
    """Return the median absolute deviation; 0 if nothing is known."""
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
    usual, deviation = _usual(known), _deviation(known)
    if usual is None or loss <= usual + max(config.loss_spike * abs(usual), DEVIATIONS * deviation):
        return None
    evidence = {"loss": loss, "usual": usual, "deviation": deviation}
    return Anomaly(f"loss {loss:.4g} is far above the usual {usual:.4g}", evidence)


@dataclass(frozen=True)
class Check:
    """A check of one `figure` of an observation. `patience` is the number of unusual figures in a row that count."""

    figure: str
    find: Callable[[GuardConfig, GuardState, float], Anomaly | None]
    patience: Callable[[GuardConfig], int] = lambda config: PATIENCE


def _judge(config: GuardConfig, state: GuardState, check: Check, value: float) -> Anomaly | None:
    if math.isfinite(value):
        return check.find(config, state, value)
    return Anomaly(f"{check.figure} not finite", {check.figure: value}, severe=True)


_CHECKS: Mapping[str, Check] = {
    "exploding": Check("grad_norm", _exploding),
    # If rewards or labels are constant for a while, there is nothing to learn.
    "vanishing": Check("grad_norm", _vanishing, lambda config: config.window),
    "loss_spike": Check("loss", _spike),
    "residual_growth": Check("residual_norm", _residual_growth),
}
"""The checks, by the configuration key that sets their threshold."""
