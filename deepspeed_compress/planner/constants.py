"""Constants of the model: shares of the published figures that training achieves, and factors of typical costs.

`fit` finds them from measured seconds: least squares of logarithms, with a prior. The first four were fitted to
published training steps by `launch/studies/planner_calibration.py`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of a prediction; `MEANINGS` describes each.

    The first four are fitted to published runs on A100, the others are typical. `plan cluster --measure` fits all of
    them to measurements.
    """

    matmul: float = 0.819
    memory: float = 0.647
    link: float = 0.610
    kernel: float = 8.97e-6
    # Published nccl-tests on InfiniBand and RoCE.
    network: float = 0.85
    delay: float = 1.0
    cpu: float = 1.0
    coding: float = 1.0
    # NCCL's channels occupy 24 of 108 multiprocessors of an A100.
    contention: float = 0.2

    @property
    def origin(self) -> str:
        """Origin of the values."""
        return "fitted on A100" if self == Constants() else "measured"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Range of the runs that the constants are fitted to."""

    software: str
    parameters: tuple[float, float]
    gpus: int
    network: float


CALIBRATED = Calibrated("megatron", (1.6e9, 1.02e12), 3072, 200e9)
"""The 18 runs of `launch/studies/published_steps.csv`, whose nodes have eight cards of 200 Gbit/s."""

MEANINGS: Mapping[str, str] = {
    "matmul": "share of the peak rate that large matrix products reach",
    "memory": "share of the memory bandwidth that elementwise kernels reach",
    "link": "share of the rate between the GPUs of a node that collectives reach",
    "kernel": "seconds that a kernel takes beyond its work: start, tail, and the gap to the next one",
    "network": "share of the line rate of a node's network cards that collectives reach",
    "delay": "delays of a collective and its hops, relative to those of NCCL",
    "cpu": "costs of the CPU (issuing kernels, hooks of ZeRO 3, idle share), relative to the table of programs",
    "coding": "rate of the compression kernels, relative to elementwise kernels",
    "contention": "seconds that computation loses for each second of a message behind it, at most 1",
}
"""Meaning of each constant."""


_SMALL = 1e-3
_LONGEST = 1.0
"""Largest change of a constant's logarithm in a round, because the model is not linear far from the solution."""


class Observation(Protocol):
    """Measured seconds of something that the model predicts."""

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        ...

    @property
    def noise(self) -> float:
        """Relative standard error with which the right constants would predict it."""
        ...

    def predicted(self, constants: Constants) -> float:
        """Return the seconds that the model predicts with `constants`."""
        ...


@dataclass(frozen=True, slots=True)
class Prior:
    """Constants before anything is measured.

    Attributes:
        expected: The most probable values.
        errors: Relative standard errors of the constants to fit. The others keep their values.
    """

    expected: Constants
    errors: Mapping[str, float]


def fit(observations: Sequence[Observation], prior: Prior, rounds: int = 3) -> Constants:
    """Return the constants that are most probable after `observations`, by Gauss-Newton steps."""
    usual = {name: math.log(getattr(prior.expected, name)) for name in prior.errors}
    logs = dict(usual)
    for _ in range(rounds):
        change = _step(observations, prior, usual, logs)
        logs = {name: logs[name] + max(-_LONGEST, min(_LONGEST, change[name])) for name in logs}
    return _with(prior.expected, logs)


def _with(constants: Constants, logs: Mapping[str, float]) -> Constants:
    return replace(constants, **{name: math.exp(value) for name, value in logs.items()})


def _step(
    observations: Sequence[Observation], prior: Prior, usual: Mapping[str, float], logs: Mapping[str, float]
) -> dict[str, float]:
    """Return the change of each logarithm that solves the problem if it were linear at `logs`."""
    here = _residuals(observations, _with(prior.expected, logs))
    slopes = {}
    for name, value in logs.items():
        there = _residuals(observations, _with(prior.expected, {**logs, name: value + _SMALL}))
        slopes[name] = [(after - before) / _SMALL for before, after in zip(here, there, strict=True)]
    weights = {name: 1 / error**2 for name, error in prior.errors.items()}
    matrix = [[_dot(slopes[i], slopes[j]) + weights[i] * (i == j) for j in logs] for i in logs]
    right = [-_dot(slopes[name], here) - weights[name] * (logs[name] - usual[name]) for name in logs]
    return dict(zip(logs, _gauss(matrix, right), strict=True))


def _residuals(observations: Sequence[Observation], constants: Constants) -> list[float]:
    """Return the logarithmic errors in units of their standard errors."""
    return [math.log(one.predicted(constants) / one.seconds) / one.noise for one in observations]


def _dot(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def _gauss(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Return the solution of a small linear system with a positive definite matrix."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for pivot in range(size):
        for other in range(size):
            if other != pivot:
                factor = rows[other][pivot] / rows[pivot][pivot]
                rows[other] = [a - factor * b for a, b in zip(rows[other], rows[pivot], strict=True)]
    return [rows[index][-1] / rows[index][index] for index in range(size)]
