"""Differences between versions of DeepSpeed: signatures of seams, and adapters. A study runs each version."""

from itertools import chain
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.checkpoint import constants
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_compress.backends.deepspeed import byte_counts, limits, node_gradients, seams, versions
from deepspeed_compress.backends.deepspeed.gradients import zero_0, zero_12
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.config import CompressConfig
from launch.studies.versions import VERSIONS

RELEASES = sorted({deepspeed.removeprefix("==") for deepspeed, *_ in VERSIONS.values() if deepspeed})
FORMS = [
    *chain(seams.STEP, seams.ZERO_0, seams.ZERO_12, seams.ZERO_3, seams.OWNERSHIP, seams.WEIGHTS, byte_counts.SEAMS)
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setattr(deepspeed, "__version__", request.param)


@pytest.mark.parametrize(
    ("seam", "version", "expected"),
    [
        (Seam("m:f", ""), "0.18.0", True),
        (Seam("m:f", "", since="0.19.3"), "0.19.2", False),
        (Seam("m:f", "", since="0.19.3"), "0.19.3+cu126", True),
        (Seam("m:f", "", until="0.19.3"), "0.19.3rc1", False),
        (Seam("m:f", "", until="0.19.3"), "0.19.2", True),
        (Seam("m:f", "", since="0.18.3", until="0.19.3"), "0.18.2", False),
    ],
)
def test_a_form_is_in_its_range_of_versions(seam: Seam, version: str, expected: bool) -> None:
    assert seam.is_in(version) is expected


@pytest.mark.parametrize("version", RELEASES)
def test_a_version_has_at_most_one_form_of_a_function(version: str) -> None:
    forms = {(seam.target, seam.parameters) for seam in FORMS if seam.is_in(version)}
    targets = [target for target, _ in forms]
    assert len(targets) == len(set(targets))


def test_only_the_form_of_the_installed_version_is_checked() -> None:
    seams.check_seams([Seam("deepspeed.nowhere:gone", "", until="0.19.0")], deepspeed.__version__)


@pytest.mark.parametrize("installed", ["0.19.7"], indirect=True)
def test_an_older_optimizer_owns_empty_parameters_and_has_no_compact_gradients(installed: None) -> None:
    assert versions.owns_parameter(torch.nn.Parameter(torch.zeros(0)))
    assert not versions.has_compact_gradients(SimpleNamespace(bit16_groups=[[]]))


@pytest.mark.parametrize(
    ("installed", "boundary"),
    [("0.19.4", False), ("0.19.4", True), ("0.19.5", lambda: False), ("0.19.5", lambda: True)],
    indirect=["installed"],
)
def test_an_accumulation_boundary_is_an_attribute_or_a_method(installed: None, boundary: Any) -> None:
    optimizer = SimpleNamespace(is_gradient_accumulation_boundary=boundary)
    assert versions.is_last_micro_batch(optimizer) is (boundary() if callable(boundary) else boundary)


@pytest.mark.parametrize("mpu", [None, SimpleNamespace(get_model_parallel_rank=lambda: 3)])
@pytest.mark.parametrize("installed", ["0.19.5"], indirect=True)
def test_an_older_engine_asks_mpu_for_its_rank_in_file_names(installed: None, mpu: Any) -> None:
    assert versions.model_parallel_rank(SimpleNamespace(mpu=mpu)) == (0 if mpu is None else 3)


@pytest.mark.parametrize("installed", ["0.19.6"], indirect=True)
def test_a_newer_engine_knows_its_rank_in_file_names(installed: None) -> None:
    assert versions.model_parallel_rank(SimpleNamespace(mpu=None, checkpoint_mp_rank=2)) == 2


@pytest.mark.parametrize(("installed", "expected"), [("0.18.8", None), ("0.18.9", {"a": 1})], indirect=["installed"])
def test_tensor_parallelism_records_shapes_since_0_18_9(installed: None, expected: Any) -> None:
    parameter = SimpleNamespace(**{constants.DS_AUTOTP_UC_META: {"a": 1}})
    assert versions.tensor_parallel_record(parameter) == expected


@pytest.mark.parametrize(
    ("installed", "problems"), [("0.19.6", 1), ("0.19.7", 1), ("0.19.8", 0), ("0.19.9", 0)], indirect=["installed"]
)
def test_steps_are_only_skipped_if_the_optimizer_can(installed: None, problems: int) -> None:
    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    optimizer.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    engine = SimpleNamespace(optimizer=optimizer)
    found = list(limits._too_old(engine, CompressConfig(guard={})))
    assert len(found) == problems
    assert all("skip_steps" in text and "deepspeed>=0.19.8" in text for text in found)
    assert not list(limits._too_old(engine, CompressConfig(guard={"skip_steps": False})))


@pytest.mark.parametrize(("installed", "defers"), [("0.18.4", False), ("0.18.5", True)], indirect=["installed"])
def test_an_older_version_gets_each_bucket_when_it_asks_for_it(installed: None, defers: bool) -> None:
    """It neither tells the last bucket from the others nor lets ZeRO 3 wait for it."""
    optimizer = SimpleNamespace(bit16_groups=[], bit16_groups_flat=[], cpu_offload=False)
    engine = SimpleNamespace(optimizer=optimizer, device="cpu", has_moe_layers=False)
    assert zero_12.may_wait(optimizer) is defers
    assert zero_0.may_begin_early(engine) is defers
    assert node_gradients.may_average_early(engine) is defers


@pytest.mark.parametrize(
    ("installed", "zero", "refused"),
    [("0.18.4", False, True), ("0.18.4", True, False), ("0.18.5", False, False)],
    indirect=["installed"],
)
def test_a_pipeline_without_zero_needs_a_newer_version(installed: None, zero: bool, refused: bool) -> None:
    engine = object.__new__(PipelineEngine)
    optimizer = object.__new__(DeepSpeedZeroOptimizer)
    vars(engine)["optimizer"] = optimizer if zero else torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    assert limits._stops_in_backward(engine) is refused


@pytest.mark.parametrize(("installed", "problems"), [("0.18.3", 1), ("0.18.4", 0)], indirect=["installed"])
def test_background_checkpoints_need_a_newer_version(installed: None, problems: int) -> None:
    found = list(limits._too_old(SimpleNamespace(optimizer=None), CompressConfig(checkpointing={})))
    assert len(found) == problems
    assert all("/checkpointing" in text and "deepspeed>=0.18.4" in text for text in found)
    assert not list(limits._too_old(SimpleNamespace(optimizer=None), CompressConfig()))
