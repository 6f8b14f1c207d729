"""Measurements of a cluster: probes, steps, and the constants that fit them. They are kept in a JSON file."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.constants import Constants, Observation, Prior, fit
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.links import Group, Links, Message
from deepspeed_compress.planner.search import Job
from deepspeed_compress.planner.software import Software

PRIOR = Prior(
    Constants(),
    {
        "matmul": 1.5,
        "memory": 1.5,
        "link": 1.5,
        "kernel": 1.5,
        "network": 0.1,
        "delay": 2.0,
        "cpu": 1.5,
        "coding": 1.5,
        "contention": 0.7,
    },
)
"""Constants before a cluster is measured. Only the network's rate is known, to a tenth.

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


@dataclass(frozen=True, slots=True)
class MeasuredProbe:
    """Probe on a cluster as an observation."""

    probe: Probe
    cluster: Cluster
    software: Software
    noise: float = NOISE

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        return self.probe.seconds

    def predicted(self, constants: Constants) -> float:
        """Return the predicted seconds."""
        device = Device(self.cluster.gpu, constants, self.software)
        return PREDICTED[self.probe.kind](device, Links(self.cluster, constants), *self.probe.sizes)


Collective = Callable[[Links, float, Group], Message]


def _sent(collective: Collective, _: Device, links: Links, size: float, ranks: float) -> float:
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
