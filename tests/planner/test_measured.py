"""The fit of all constants to measurements of a cluster, and the file that keeps them."""

import json
from dataclasses import astuple, replace
from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import (
    ERRORS,
    PREDICTED,
    STEP_NOISE,
    Measured,
    Probe,
    Step,
    fit_measured,
    predict_probe,
    predict_step,
    read_constants,
)
from deepspeed_compress.planner.search import Job
from deepspeed_compress.planner.software import SOFTWARE
from tests.planner.jobs import TOY

SLOW = Constants(0.3, 1.5, 0.2, 4e-6, 0.7, 30.0, 12.0, 0.4, 0.5)
"""Constants such as those of emulated hosts."""
JOB = Job(read_cluster("8xCPU", "1gbit", 2), TOY, SOFTWARE["deepspeed"], 64, 16, 1e9)
SIZES: dict[str, list[tuple[float, ...]]] = {
    "product": [(512, 512, 128), (1024, 128, 4096)],
    "copy": [(4e6,), (4e7,)],
    "kernel": [()],
    "coding": [(4e6,)],
    **{
        kind: [(size, ranks) for size in (1e4, 1e6, 1e8) for ranks in (2, 8)]
        for kind in PREDICTED
        if kind not in ("product", "copy", "kernel", "coding")
    },
}
LAYOUTS = (
    Layout(1, 1, 8, 2, 1, 2, gradient_bits=4),
    Layout(2, 1, 4, 1, 1, 4),
    Layout(1, 2, 4, 1, 1, 4),
    Layout(1, 1, 8, 3, 1, 2),
)


def probes(constants: Constants) -> list[Probe]:
    """Return the probes of a cluster that the model describes exactly."""
    empty = [Probe(kind, sizes, 1.0) for kind, given in SIZES.items() for sizes in given]
    return [replace(one, seconds=predict_probe(JOB, one, constants)) for one in empty]


def steps(constants: Constants) -> list[Step]:
    return [Step(one, predict_step(JOB, one, constants)) for one in LAYOUTS]


@pytest.fixture(scope="module")
def measured() -> Measured:
    return fit_measured(JOB, probes(SLOW), steps(SLOW))


def test_every_constant_is_fitted() -> None:
    assert set(ERRORS) == set(Constants.__dataclass_fields__)


def test_constants_far_from_those_of_a_gpu_are_found(measured: Measured) -> None:
    # Only steps tell of contention, and leave some doubt, so the prior counts.
    known = replace(measured.constants, contention=SLOW.contention)
    assert astuple(known) == pytest.approx(astuple(SLOW), rel=0.1)
    assert 0.2 < measured.constants.contention < SLOW.contention


def test_measured_steps_are_predicted(measured: Measured) -> None:
    for step in measured.steps:
        assert measured.predicted(step) == pytest.approx(step.seconds, rel=STEP_NOISE)


def test_a_file_keeps_the_constants(measured: Measured, tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(measured.to_json()))
    assert read_constants(file, "CPU") == measured.constants
    with pytest.raises(ConfigError, match="were measured on CPU, not on H100"):
        read_constants(file, "H100")


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"constants": 1, "gpu": "CPU"}', '{"constants": {"matmul": 1}, "gpu": "CPU"}']
)
def test_another_file_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="--constants"):
        read_constants(file, "CPU")


def test_constants_must_be_positive(measured: Measured, tmp_path: Path) -> None:
    found = measured.to_json()
    found["constants"]["matmul"] = 0
    file = tmp_path / "zero.json"
    file.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match="positive number"):
        read_constants(file, "CPU")


def test_what_the_fit_cannot_explain_is_corrected_for_layouts_of_the_same_kind() -> None:
    measured = Measured(JOB, (), (replace(steps(JOB.constants)[0], seconds=1.0),), JOB.constants)
    corrected = replace(JOB, corrections=measured.corrections)
    assert corrected.predict(LAYOUTS[0]).seconds == pytest.approx(1.0)
    fewer = replace(LAYOUTS[0], gradient_bits=3)
    factor = 1.0 / JOB.predict(LAYOUTS[0]).seconds
    assert corrected.predict(fewer).seconds == pytest.approx(factor * JOB.predict(fewer).seconds)
    for other in (LAYOUTS[3], replace(LAYOUTS[0], gradient_bits=0)):
        assert corrected.predict(other).seconds == JOB.predict(other).seconds
