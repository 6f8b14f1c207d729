"""Saving and resuming with Trainer: a resumed run has the same bits as an uninterrupted one, including residuals."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import load_file
from transformers.trainer_utils import rotate_checkpoints

import deepspeed_compress
from deepspeed_compress.checkpointing.completeness import find_problems
from deepspeed_compress.integrations.trainer_callback import CompressionCallback, newest_complete_checkpoint
from tests.integrations.trainers import INT4, SAVING, Job, Outcome, keep_checkpoint, train, trainer_of
from tests.support.checkpoints import publish, save, write
from tests.support.forks import run_forks

SAMPLED = pytest.mark.sampled(4)


def training_logs(outcome: Outcome) -> list[dict[str, float]]:
    """Return the training logs without times, and without bytes of weights and totals that include them.

    ZeRO 3 gathers more weights until it knows the order of the layers. Saving makes compressed weights exact, which
    counts in the step after the save, and a resumed run has not saved before its first step.
    """
    entries = [entry for entry in outcome.logs if "loss" in entry]
    weights = {"compression_bytes_weights", "compression_bytes_exact", "compression_total_ratio"}
    left_out = {"compression_time_ms", *weights}
    return [{key: value for key, value in entry.items() if key not in left_out} for entry in entries]


@SAMPLED
@pytest.mark.parametrize("stage", range(4))
def test_a_resumed_run_has_the_bits_of_an_uninterrupted_one(stage: int, tmp_path: Path) -> None:
    job = Job(str(tmp_path), stage, INT4, {**SAVING, "per_device_train_batch_size": 3})
    whole = [outcomes[0] for outcomes in run_forks(2, train, job)]
    keep_checkpoint(job.directory, 2)
    resumed = [outcomes[0] for outcomes in run_forks(2, train, replace(job, resume=True))]
    for one, other in zip(whole, resumed, strict=True):
        assert other.parameters == one.parameters
        assert other.of("loss") == one.of("loss")
    assert len(training_logs(whole[0])) == 4
    # These include residual norms and bytes, which only rank 0 logs.
    assert training_logs(resumed[0]) == training_logs(whole[0])


def test_a_resumed_run_with_compressed_weights_has_the_same_bits(tmp_path: Path) -> None:
    section = {**INT4, "weights": {"method": "blockwise"}}
    job = Job(str(tmp_path), 2, section, SAVING)
    whole = run_forks(2, train, job)[0][0]
    keep_checkpoint(job.directory, 2)
    resumed = run_forks(2, train, replace(job, resume=True))[0][0]
    assert resumed.parameters == whole.parameters
    assert training_logs(resumed) == training_logs(whole)


@pytest.mark.parametrize("cut", ["trainer_state.json", "rng_state_1.pth", "scheduler.pt"])
def test_a_checkpoint_whose_small_files_a_crash_has_cut_off_is_passed_over(tmp_path: Path, cut: str) -> None:
    """Trainer does not sync its files to the disk, so those of DeepSpeed may survive them."""
    for step in (2, 4):
        folder = tmp_path / f"checkpoint-{step}"
        publish(write(save(folder, step)))
        (folder / "trainer_state.json").write_text('{"global_step": 4}')
        for name in ("rng_state_0.pth", "rng_state_1.pth", "scheduler.pt"):
            torch.save({"state": step}, folder / name)
    assert newest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-4")
    os.truncate(tmp_path / "checkpoint-4" / cut, 9)
    assert newest_complete_checkpoint(tmp_path) == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize(("failed", "kept"), [((), {6, 8}), ((6,), {4, 6, 8}), ((2, 4, 6), {2, 4, 6, 8})])
def test_failed_checkpoints_do_not_displace_a_complete_one(
    tmp_path: Path, failed: tuple[int, ...], kept: set[int]
) -> None:
    """The newest one is still being written when Trainer removes old ones."""
    for step in (2, 4, 6):
        folder = tmp_path / f"checkpoint-{step}"
        publish(write(save(folder, step), ranks=(0,) if step in failed else (0, 1)))
        (folder / "trainer_state.json").write_text("{}")
    args = SimpleNamespace(output_dir=str(tmp_path), save_total_limit=1, save_only_model=False)
    callback = CompressionCallback(SimpleNamespace(args=args))
    with callback._keep_one_more(SimpleNamespace(wait=lambda: None)):
        (tmp_path / "checkpoint-8").mkdir()
        rotate_checkpoints(str(tmp_path), args.save_total_limit)
    assert {int(one.name.removeprefix("checkpoint-")) for one in tmp_path.iterdir()} == kept
    assert args.save_total_limit == 1


BEST = {**SAVING, "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}


@SAMPLED
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_the_best_model_is_loaded_at_the_end(stage: int, tmp_path: Path) -> None:
    """The learning rate is so large that the first of the two evaluations is the best."""
    constant = {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": "auto"}}
    job = Job(str(tmp_path / "whole"), stage, INT4, {**BEST, "learning_rate": 3.0}, {"scheduler": constant})
    until_best = replace(job, directory=str(tmp_path / "half"), args={**job.args, "max_steps": 2})
    for loaded, best in run_forks(2, train, job, until_best):
        evaluations = loaded.of("eval_loss")
        assert len(evaluations) == 2
        assert evaluations[0] < evaluations[1]
        assert loaded.parameters == best.parameters


def train_and_save(rank: int, job: Job) -> float:
    """Train, and let rank 0 alone save the model.

    Returns the largest distance between this rank's weights and its fp32 master weights after that.
    """
    uninstall = deepspeed_compress.install()
    trainer = trainer_of(job)
    trainer.train()
    if rank == 0:
        trainer.save_model(job.directory)
    optimizer = trainer.model_wrapped.optimizer
    uninstall()
    pairs = zip(optimizer.single_partition_of_fp32_groups, optimizer.parallel_partitioned_bit16_groups, strict=True)
    return max(float((master.detach() - weights[rank]).abs().max()) for master, weights in pairs)


@pytest.mark.parametrize("saving", ["steps", "no"])
def test_saved_models_are_exact(saving: str, tmp_path: Path) -> None:
    """The model in each checkpoint equals the fp32 weights in DeepSpeed's files next to it."""
    args = {"save_strategy": saving, "save_steps": 2, "max_steps": 4, "logging_steps": 10}
    section = {"weights": {"bits": 4}}
    assert run_forks(2, train_and_save, Job(str(tmp_path), section=section, args=args)) == [0.0, 0.0]
    assert (tmp_path / "model.safetensors").is_file()
    directories = sorted(tmp_path.glob("checkpoint-*"))
    assert len(directories) == (2 if saving == "steps" else 0)
    for directory in directories:
        exact = get_fp32_state_dict_from_zero_checkpoint(str(directory))
        saved = load_file(directory / "model.safetensors")
        assert saved
        assert max(float((saved[name] - exact[name].detach()).abs().max()) for name in saved) == 0.0


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
def test_background_checkpoints_match_blocking_ones(stage: int, tmp_path: Path) -> None:
    """Trainer also removes old checkpoints during training, and loads the best one at the end."""
    section = {**INT4, "checkpointing": {}}
    options = {**BEST, "max_steps": 8, "save_total_limit": 2}
    job = Job(str(tmp_path), stage, section, options)
    blocking_job = replace(job, directory=str(tmp_path / "blocking"), section=INT4)
    for background, blocking in run_forks(2, train, job, blocking_job):
        assert background.parameters == blocking.parameters
        assert background.of("loss") == blocking.of("loss")
    # One more than `save_total_limit`: the newest is not complete yet when Trainer removes others.
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-6", "checkpoint-8"}
    assert list(find_problems(tmp_path / "checkpoint-8" / "global_step8")) == []
    longer = replace(job, resume=True, args={**options, "max_steps": 10})
    resumed = run_forks(2, train, longer)
    assert len(resumed[0][0].of("loss")) == 10
    # A run that is killed while it writes the newest checkpoint leaves such a directory.
    (tmp_path / "checkpoint-10" / "latest").unlink()
    again = run_forks(2, train, longer)
    assert [outcomes[0].parameters for outcomes in again] == [outcomes[0].parameters for outcomes in resumed]
