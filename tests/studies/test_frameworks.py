"""The study of fine-tuning frameworks: settings, comparisons and cells, without the frameworks."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.integrations.launch import check_configurations, find_configurations
from launch.studies.framework_jobs import FRAMEWORKS, SECTIONS, STEPS, Job, Paths, ds_config
from launch.studies.frameworks import Outcome, cells, equal


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("variant", SECTIONS)
def test_only_the_plain_variant_has_no_section(variant: str, stage: int) -> None:
    config = ds_config(Job("TRL", "lora", stage, variant))
    assert (SECTION in config) is (variant != "plain")
    if variant != "plain":
        parse_section(config)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("tuning", ["lora", "full"])
def test_the_settings_name_the_configuration_that_is_checked(framework: str, tuning: str, tmp_path: Path) -> None:
    command = FRAMEWORKS[framework].train(Job(framework, tuning, 2, "4 bits"), Paths(tmp_path / "toy", tmp_path))
    assert list(find_configurations(command.words)) == [tmp_path / "ds_config.json"]
    check_configurations(command.words, allow_uncompressed=False)
    assert str(tmp_path / "output") in (tmp_path / "train.yaml").read_text()


def save(directory: Path, value: float) -> Path:
    directory.mkdir(parents=True)
    save_file({"a": torch.full((2,), value)}, directory / "model.safetensors")
    return directory


def test_runs_are_compared_to_the_bit(tmp_path: Path) -> None:
    first, same, other = (save(tmp_path / name, value) for name, value in (("a", 1), ("b", 1), ("c", 1 + 2e-7)))
    outcome = Outcome((2.0, 1.0))
    assert equal(outcome, outcome, first, same) == "equal"
    assert equal(outcome, outcome, first, other) == "other weights"
    assert equal(outcome, Outcome((2.0, 1.1)), first, same) == "other losses"
    assert equal(outcome, outcome, tmp_path, tmp_path) == "other weights"
    assert equal(Outcome(problem="x"), outcome, first, same) == "not run"


def test_cells(tmp_path: Path) -> None:
    case = ("TRL", "lora", 2)
    jobs = {variant: Job(*case, variant) for variant in SECTIONS}
    for job in jobs.values():
        save(tmp_path / job.name / "output" / f"checkpoint-{STEPS}", 1)
    outcomes = {
        jobs["plain"]: Outcome((2.0, 1.0), change=1.0),
        jobs["none"]: Outcome((2.0, 1.0), change=1.0),
        jobs["4 bits"]: Outcome((2.0, 1.001), ratio=7.5, change=1.0, merged=1e-6),
        jobs["resumed"]: Outcome((2.0, 1.002), ratio=7.5, change=1.0),
    }
    row = list(cells(case, outcomes, tmp_path))
    assert row == ["TRL 1.16.0, lora, ZeRO 2", "yes", "7.5", "equal", "+1.0e-03", "other losses", "yes", "1e-06"]
    outcomes[jobs["4 bits"]] = Outcome(problem="AssertionError: no GPU")
    assert list(cells(case, outcomes, tmp_path))[2:5] == ["AssertionError: no GPU", "equal", "not run"]
