"""Measurements of a cluster: probes, steps, and the constants that fit them. They are kept in a JSON file."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.fit import Observation, fit
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.probes import PRIOR, MeasuredProbe, Probe
from deepspeed_compress.planner.search import Job

STEP_NOISE = 0.05
"""Relative standard error with which the model would predict a step with the right constants."""
ROUNDS = 15
"""Rounds of the fit: the constants of a CPU are far from those of a GPU, at which the fit begins."""


@dataclass(frozen=True, slots=True)
class Step:
    """Measured seconds of a layout's step."""

    layout: Layout
    seconds: float


@dataclass(frozen=True, slots=True)
class ObservedStep:
    """Step of a job as an observation."""

    job: Job
    step: Step
    noise: float = STEP_NOISE

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        return self.step.seconds

    def predicted(self, constants: Constants) -> float:
        """Return the predicted seconds."""
        job, layout = replace(self.job, constants=constants), self.step.layout
        return job.predictor(layout).predict(layout).seconds


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of a job's cluster.

    Attributes:
        job: The job, with the constants that it had before.
        probes: Measured operations.
        steps: Measured steps.
        probed: Constants that fit the probes.
        constants: Constants that fit probes and steps.
    """

    job: Job
    probes: tuple[Probe, ...]
    steps: tuple[Step, ...]
    probed: Constants
    constants: Constants

    def predicted(self, step: Step, constants: Constants) -> float:
        """Return the predicted seconds of a measured step."""
        return ObservedStep(self.job, step).predicted(constants)

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        steps = [
            {
                "layout": str(step.layout),
                "seconds": step.seconds,
                "predicted_from_probes": self.predicted(step, self.probed),
                "predicted": self.predicted(step, self.constants),
            }
            for step in self.steps
        ]
        return {
            "gpu": self.job.cluster.gpu.name,
            "cluster": str(self.job.cluster),
            "model": self.job.model.name,
            "constants": asdict(self.constants),
            "constants_from_probes": asdict(self.probed),
            "steps": steps,
            "probes": [asdict(probe) for probe in self.probes],
        }


def fit_measured(job: Job, probes: Sequence[Probe], steps: Sequence[Step]) -> Measured:
    """Return the measurements with the constants that fit them."""
    observed: list[Observation] = [MeasuredProbe(probe, job.cluster, job.software) for probe in probes]
    probed = fit(observed, PRIOR, ROUNDS)
    both = fit([*observed, *(ObservedStep(job, step) for step in steps)], PRIOR, ROUNDS)
    return Measured(job, tuple(probes), tuple(steps), probed, both)


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
        raise ConfigError(
            f"--constants {file}: cannot be read, or has no constants; write a file that --measure wrote"
        ) from error
    names = {field.name for field in fields(Constants)}
    if set(values) != names or not all(0 < value < float("inf") for value in values.values()):
        raise ConfigError(f"--constants {file}: must have a positive number for each of {', '.join(sorted(names))}")
    if measured != gpu:
        raise ConfigError(
            f"--constants {file}: were measured on {measured}, not on {gpu}; measure again with --measure, or change "
            "--gpus"
        )
    return Constants(**values)
