"""Measurements of a cluster: probes, steps, and the constants that fit them. They are kept in a JSON file.

`fit` finds constants from measured seconds: least squares of logarithms, with a prior.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import Links, Message
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.search import Job

_SMALL = 1e-3
_LONGEST = 1.0
"""Largest change of a constant's logarithm in a round, because the model is not linear far from the solution."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Measured seconds of something that the model predicts.

    Attributes:
        seconds: Measured seconds.
        noise: Relative standard error with which the right constants would predict it.
        predicted: Function that returns the seconds that the model predicts with constants.
    """

    seconds: float
    noise: float
    predicted: Callable[[Constants], float]


def fit(
    observations: Sequence[Observation], expected: Constants, errors: Mapping[str, float], rounds: int = 3
) -> Constants:
    """Return the constants that are most probable after `observations`, by Gauss-Newton steps.

    Args:
        observations: Measured and predicted seconds.
        expected: The most probable constants before anything is measured.
        errors: Relative standard errors of the constants to fit. The others keep their values.
        rounds: Number of steps.
    """
    logs = {name: math.log(getattr(expected, name)) for name in errors}
    for _ in range(rounds):
        change = _step(observations, expected, errors, logs)
        logs = {name: logs[name] + max(-_LONGEST, min(_LONGEST, change[name])) for name in logs}
    return _with(expected, logs)


def _with(constants: Constants, logs: Mapping[str, float]) -> Constants:
    return replace(constants, **{name: math.exp(value) for name, value in logs.items()})


def _step(
    observations: Sequence[Observation], expected: Constants, errors: Mapping[str, float], logs: Mapping[str, float]
) -> dict[str, float]:
    """Return the change of each logarithm that solves the problem if it were linear at `logs`."""
    here = _residuals(observations, _with(expected, logs))
    slopes = {}
    for name, value in logs.items():
        there = _residuals(observations, _with(expected, {**logs, name: value + _SMALL}))
        slopes[name] = [(after - before) / _SMALL for before, after in zip(here, there, strict=True)]
    weights = {name: 1 / error**2 for name, error in errors.items()}
    matrix = [[_dot(slopes[i], slopes[j]) + weights[i] * (i == j) for j in logs] for i in logs]
    moved = {name: value - math.log(getattr(expected, name)) for name, value in logs.items()}
    right = [-_dot(slopes[name], here) - weights[name] * moved[name] for name in logs]
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


ERRORS: Mapping[str, float] = {
    "matmul": 1.5,
    "memory": 1.5,
    "link": 1.5,
    "kernel": 1.5,
    "network": 0.1,
    "delay": 2.0,
    "cpu": 1.5,
    "coding": 1.5,
    "contention": 0.7,
}
"""Relative standard errors of the constants before a cluster is measured. Only the network's is known, to a tenth.

Short messages seem faster than the line, since queues take them at once.
"""
NOISE = 0.2
"""Relative standard error of the model's prediction of a probe."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Measured operation.

    Attributes:
        kind: Key of `PREDICTED`.
        sizes: Rows, columns and inner size of a matrix product; bytes that a kernel moves; or bytes of a rank's buffer
            and the number of ranks of a collective.
        seconds: Measured seconds.
    """

    kind: str
    sizes: tuple[float, ...]
    seconds: float


def predict_probe(job: Job, probe: Probe, constants: Constants) -> float:
    """Return the predicted seconds of a probe on a job's cluster."""
    changed = replace(job, constants=constants)
    return PREDICTED[probe.kind](changed.device, changed.links, *probe.sizes)


def _sent(collective: Callable[..., Message], _: Device, links: Links, size: float, ranks: float) -> float:
    return collective(links, size, links.group(int(ranks), 1)).seconds


PREDICTED: Mapping[str, Callable[..., float]] = {
    "product": lambda device, _, *sizes: device.product(*sizes),
    "copy": lambda device, _, size: device.moved(size),
    "kernel": lambda device, _: device.constants.kernel,
    "coding": lambda device, _, size: device.coded(size),
    "all_reduce": partial(_sent, Links.reduce),
    "all_gather_into_tensor": partial(_sent, Links.gather),
    "reduce_scatter_tensor": partial(_sent, Links.scatter),
    "all_to_all_single": partial(_sent, Links.exchange),
    "exchange": partial(_sent, Links.exchange),
}
"""Predicted seconds by kind of probe, from the device, the links, and the sizes."""


STEP_NOISE = 0.05
"""Relative standard error with which the model would predict a step with the right constants."""
ROUNDS = 15
"""Rounds of the fit: the constants of a CPU are far from those of a GPU, at which the fit begins."""


@dataclass(frozen=True, slots=True)
class Step:
    """Measured seconds of a layout's step."""

    layout: Layout
    seconds: float


def predict_step(job: Job, layout: Layout, constants: Constants) -> float:
    """Return the predicted seconds of a layout's step."""
    return replace(job, constants=constants).predict(layout).seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a job's cluster.

    Attributes:
        job: The job, with the constants that it had before.
        probes: Measured operations.
        steps: Measured steps.
        constants: Constants that fit probes and steps.
    """

    job: Job
    probes: tuple[Probe, ...]
    steps: tuple[Step, ...]
    constants: Constants

    def predicted(self, step: Step) -> float:
        """Return the predicted seconds of a measured step."""
        return predict_step(self.job, step.layout, self.constants)

    @property
    def corrections(self) -> Mapping[tuple[int, int, bool], float]:
        """Measured seconds of steps, relative to the predicted ones, by the kind of their layouts."""
        return {step.layout.kind: step.seconds / self.predicted(step) for step in self.steps}

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        steps = [
            {"layout": str(step.layout), "seconds": step.seconds, "predicted": self.predicted(step)}
            for step in self.steps
        ]
        return {
            "gpu": self.job.cluster.gpu.name,
            "cluster": str(self.job.cluster),
            "model": self.job.model.name,
            "constants": asdict(self.constants),
            "steps": steps,
            "probes": [asdict(probe) for probe in self.probes],
        }


def fit_measured(job: Job, probes: Sequence[Probe], steps: Sequence[Step]) -> Measured:
    """Return the measurements with the constants that fit them."""
    observed = [Observation(probe.seconds, NOISE, partial(predict_probe, job, probe)) for probe in probes]
    observed += [Observation(step.seconds, STEP_NOISE, partial(predict_step, job, step.layout)) for step in steps]
    return Measured(job, tuple(probes), tuple(steps), fit(observed, Constants(), ERRORS, ROUNDS))


def read_constants(file: Path, gpu: str) -> Constants:
    """Return the constants in `file`, which were measured on GPUs of type `gpu`.

    Raises:
        ConfigError: The file holds no constants, or those of another type.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        values = {name: float(value) for name, value in found["constants"].items()}
        measured = str(found["gpu"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--constants {file}: cannot be read; write a file that --measure wrote") from error
    names = {field.name for field in fields(Constants)}
    if set(values) != names or not all(0 < value < float("inf") for value in values.values()):
        raise ConfigError(f"--constants {file}: must have a positive number for each of {', '.join(sorted(names))}")
    if measured != gpu:
        raise ConfigError(
            f"--constants {file}: were measured on {measured}, not on {gpu}; write --measure, or change --gpus"
        )
    return Constants(**values)
