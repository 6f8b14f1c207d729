"""Unmodified Hugging Face Trainer: method "none" gives the same bits as without this package, and 4 bits train."""

from pathlib import Path
from typing import Any

import deepspeed
import pytest
from transformers import GPT2LMHeadModel, Trainer

import deepspeed_compress
from deepspeed_compress import UnsupportedError
from tests.integrations.trainers import (
    BY_LENGTH,
    INT4,
    Job,
    Outcome,
    collate,
    forget_accelerate,
    network,
    sentences,
    train,
    trainer_of,
)
from tests.support.forks import run_forks
from tests.support.jobs import weights

pytestmark = pytest.mark.sampled(8)

NONE = {"gradients": {"method": "none"}}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 3},
    "clipping": {"max_grad_norm": 0.05},
    "lengths": dict(BY_LENGTH),
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


def test_tensor_parallelism_of_the_section_matches_deepspeed(tmp_path: Path) -> None:
    """Llama on two tensor-parallel times two data-parallel ranks, requested only by the section."""
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
        # Split layers show that the layout is 2 x 2, not four data-parallel ranks.
        assert len(alone.parameters["model.layers.0.mlp.gate_proj.weight"]) == 32 * 48 // 2
    first = run_forks(4, train, jobs[1])[0][0]
    assert min(first.of("compression_bytes_tensor")) > 0


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharding_within_nodes_matches_data_parallelism(stage: int, tmp_path: Path) -> None:
    """Two nodes of two ranks. Adam turns the last bits of a mean into the last bits of a step."""
    nodes = {"parallelism": {"shard_within": 2}}
    jobs = [Job(str(tmp_path), stage, section) for section in (None, nodes | NONE, nodes | INT4)]
    for expected, uncompressed, int4 in run_forks(4, train, *jobs):
        assert losses(uncompressed) == pytest.approx(losses(expected), rel=1e-4)
        assert losses(int4)[0] == pytest.approx(losses(expected)[0], rel=1e-4)
        assert losses(int4)[-1] == pytest.approx(losses(expected)[-1], rel=0.05)


def decide(rank: int, job: Job) -> list[str]:
    """Train, and return the kinds of decisions."""
    deepspeed_compress.install()
    trainer = trainer_of(job)
    trainer.train()
    return [event.kind for event in trainer.model_wrapped.compression.events]


def test_preset_auto_decides(tmp_path: Path) -> None:
    """Accelerate would take the "auto" of the preset for a value that it must fill in."""
    job = Job(str(tmp_path), 2, {"preset": "auto", "auto": {"steps": 3}}, {"max_steps": 22})
    assert run_forks(2, decide, job) == [["auto"]] * 2


def load_and_train(rank: int, saved: str, *jobs: Job) -> list[tuple[int, dict[str, list[float]], list[float]]]:
    """Load weights after `TrainingArguments`, so transformers makes the model in `deepspeed.zero.Init`.

    Returns:
        For each job, the number of ranks that share a parameter, the weights that an evaluation used, and the losses of
        training.
    """
    found = []
    # A launched program gets this from Accelerate.
    deepspeed.init_distributed()
    for job in jobs:
        uninstall = deepspeed_compress.install() if job.section is not None else lambda: None
        trainer = loading_trainer(saved, job)
        trainer.evaluate()
        evaluated = weights(trainer.model_wrapped)
        # DeepSpeed never frees an engine of ZeRO 3, and the next section may divide the ranks in another way.
        trainer.model_wrapped.destroy()
        forget_accelerate()
        trainer = loading_trainer(saved, job)
        shared = trainer.model.transformer.wte.weight.ds_process_group.size()
        trainer.train()
        found.append((shared, evaluated, Outcome({}, trainer.state.log_history).of("loss")))
        uninstall()
        trainer.model_wrapped.destroy()
        forget_accelerate()
    return found


def loading_trainer(saved: str, job: Job) -> Trainer:
    """Return a Trainer of the model in the directory `saved`."""
    args = job.arguments()
    model = GPT2LMHeadModel.from_pretrained(saved)
    return Trainer(model, args, data_collator=collate, train_dataset=sentences(48), eval_dataset=sentences(8))


@pytest.mark.slow
def test_a_model_that_is_loaded_for_zero_3_is_sharded_within_nodes_and_islands(tmp_path: Path) -> None:
    """Only the first rank of the job reads weights, so those of the second part come from the first."""
    network("gpt2").save_pretrained(tmp_path / "saved")
    nodes = {"parallelism": {"shard_within": 2}}
    # The engine of an evaluation has no optimizer, so it is not attached to.
    islands = {"islands": {"size": 2, "sync_every": 2}}
    sections = (None, nodes | NONE, nodes | INT4, islands)
    jobs = [Job(str(tmp_path), 3, section, extra=CONSTANT) for section in sections]
    for expected, uncompressed, int4, island in run_forks(4, load_and_train, str(tmp_path / "saved"), *jobs):
        assert (expected[0], uncompressed[0], int4[0], island[0]) == (4, 2, 2, 2)
        assert uncompressed[1] == int4[1] == island[1] == expected[1]
        assert island[2][0] == pytest.approx(expected[2][0], rel=1e-4)
        assert island[2][-1] == pytest.approx(expected[2][-1], rel=0.05)
        assert uncompressed[2] == pytest.approx(expected[2], rel=1e-4)
        assert int4[2][0] == pytest.approx(expected[2][0], rel=1e-4)
        assert int4[2][-1] == pytest.approx(expected[2][-1], rel=0.05)


def evaluate(rank: int, *jobs: Job) -> list[float]:
    """Evaluate without training: DeepSpeed makes an engine without an optimizer, which has no gradients to compress."""
    found = []
    for job in jobs:
        uninstall = deepspeed_compress.install()
        trainer = trainer_of(job)
        found.append(trainer.evaluate()["eval_loss"])
        assert "compression" not in vars(trainer.model_wrapped)
        uninstall()
        forget_accelerate()
    return found


def test_evaluation_without_training_is_unchanged(tmp_path: Path) -> None:
    for alone, int4 in run_forks(2, evaluate, Job(str(tmp_path), 3), Job(str(tmp_path), 3, INT4)):
        assert int4 == alone


CONSTANT = {"scheduler": {"type": "WarmupLR", "params": {}}}
"""Schedule without "auto" values: `evaluate()` would fill in training steps that `train()` rejects later."""


def evaluate_and_train(rank: int, job: Job) -> str:
    """Return the error of `train()` after an evaluation, whose engine has no optimizer."""
    deepspeed_compress.install()
    trainer = trainer_of(job)
    trainer.evaluate()
    with pytest.raises(UnsupportedError) as raised:
        trainer.train()
    return str(raised.value)


def test_training_on_the_engine_of_an_evaluation_is_refused(tmp_path: Path) -> None:
    """Trainer alone cannot train it either."""
    for error in run_forks(2, evaluate_and_train, Job(str(tmp_path), 3, INT4, extra=CONSTANT)):
        assert "was made before deepspeed_compress.install(), or has no optimizer" in error
