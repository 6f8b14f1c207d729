"""Hugging Face Trainer as it is, on two ranks: with method "none" bit for bit as without us, and compressed."""

from pathlib import Path
from typing import Any

import pytest

import deepspeed_compress
from tests.integrations.trainers import INT4, Job, Outcome, forget_accelerate, train, trainer_of
from tests.support.forks import run_forks

NONE = {"gradients": {"method": "none"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.05},
    "lengths": {"train_sampling_strategy": "group_by_length"},
    "bf16": {"bf16": True},
}
CASES = [(stage, "plain") for stage in range(4)] + [(2, name) for name in SETTINGS if name != "plain"]


def losses(outcome: Outcome) -> list[float]:
    return outcome.of("loss")


@pytest.mark.parametrize(("stage", "setting"), CASES)
def test_none_is_bit_identical_and_compression_trains(stage: int, setting: str, tmp_path: Path) -> None:
    alone = Job(str(tmp_path), stage, args=SETTINGS[setting])
    none = Job(str(tmp_path), stage, NONE, SETTINGS[setting])
    int4 = Job(str(tmp_path), stage, INT4, SETTINGS[setting])
    for expected, same, compressed in run_forks(2, train, alone, none, int4):
        assert same.parameters == expected.parameters
        assert losses(same) == losses(expected)
        assert compressed.parameters != expected.parameters
        assert losses(compressed)[0] == losses(expected)[0]
        assert losses(compressed)[-1] == pytest.approx(losses(expected)[-1], rel=0.05)
        assert losses(compressed)[-1] < losses(compressed)[0]


def test_tensor_parallelism(tmp_path: Path) -> None:
    """Llama, each layer on two ranks, and two of each: asked for in the section alone."""
    section = {"parallelism": {"zero_stage": 1, "tensor": 2}}
    fields = {"zero_optimization": {"reduce_bucket_size": "auto"}}
    jobs = (
        Job(str(tmp_path), section=section | NONE, extra=fields, model="llama"),
        Job(str(tmp_path), section=section | INT4, extra=fields, model="llama"),
    )
    expected = Job(str(tmp_path), 1, extra={"tensor_parallel": {"autotp_size": 2}}, model="llama")
    for alone, none, int4 in run_forks(4, train, expected, *jobs):
        assert none.parameters == alone.parameters
        assert losses(none) == losses(alone)
        assert int4.parameters != alone.parameters
        assert losses(int4)[-1] == pytest.approx(losses(alone)[-1], rel=0.05)
        assert losses(int4)[-1] < losses(int4)[0]
        # How many layers are split tells the 2 x 2 layout from four data-parallel ranks.
        assert len(alone.parameters["model.layers.0.mlp.gate_proj.weight"]) == 32 * 48 // 2
    first = run_forks(4, train, jobs[1])[0][0]
    assert min(first.of("compression_bytes_tensor")) > 0


def evaluate(rank: int, *jobs: Job) -> list[float]:
    """Evaluation alone: DeepSpeed makes an engine without an optimizer, which has no gradients to compress."""
    found = []
    for job in jobs:
        uninstall = deepspeed_compress.install()
        trainer = trainer_of(job)
        found.append(trainer.evaluate()["eval_loss"])
        assert "compression" not in vars(trainer.model_wrapped)
        uninstall()
        forget_accelerate()
    return found


def test_evaluation_without_training(tmp_path: Path) -> None:
    for alone, int4 in run_forks(2, evaluate, Job(str(tmp_path), 3), Job(str(tmp_path), 3, INT4)):
        assert int4 == alone
