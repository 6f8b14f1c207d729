"""Unmodified Trainer programs that SIGTERM ends, and that resume from the checkpoint that was saved then."""

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import TrainerCallback

import deepspeed_compress
from deepspeed_compress.integrations import hf
from tests.integrations.trainers import INT4, Job, Outcome, trainer_of
from tests.support.forks import run_forks
from tests.support.jobs import weights


def saving(tmp_path: Path) -> dict[str, Any]:
    """Return a section that saves on SIGTERM. Checkpoints go to Trainer's output directory, not to `directory`."""
    return {**INT4, "checkpointing": {"directory": str(tmp_path / "unused"), "save_on_sigterm": True}}


class SendSigterm(TrainerCallback):
    """Callback that sends SIGTERM to rank 1 after step 3."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 3 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def train(rank: int, job: Job, sigterm: bool, resume: bool, attached: bool = False) -> tuple[int, Outcome]:
    """Return the exit code and the outcome of a run, of a Trainer that is `attached` or made after `install`."""
    if resume:
        os.environ["DS_COMPRESS_RESUME"] = "1"
    if not attached:
        deepspeed_compress.install()
    trainer, code = trainer_of(job), 0
    if attached:
        hf.attach(trainer)
    if sigterm:
        trainer.add_callback(SendSigterm())
    try:
        trainer.train()
    except SystemExit as stop:
        code = int(str(stop.code))
    outcome = Outcome(weights(trainer.model_wrapped), trainer.state.log_history)
    trainer.model_wrapped.destroy()
    return code, outcome


def test_trainer_saves_on_sigterm_and_resumes_with_the_same_bits(tmp_path):
    job = Job(str(tmp_path / "whole"), section=saving(tmp_path), args={"max_steps": 8, "save_strategy": "no"})
    whole = run_forks(2, train, job, False, False)
    job = replace(job, directory=str(tmp_path / "parts"))
    first = run_forks(2, train, job, True, False)
    assert [code for code, _ in first] == [128 + signal.SIGTERM] * 2
    steps = {len(outcome.of("loss")) for _, outcome in first}
    assert steps <= {4, 5}
    assert (tmp_path / "parts" / f"checkpoint-{steps.pop()}").is_dir()
    second = run_forks(2, train, job, False, True)
    assert [outcome.parameters for _, outcome in second] == [outcome.parameters for _, outcome in whole]
    assert second[0][1].of("loss") == whole[0][1].of("loss")


BEST = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "save_total_limit": 1}


def test_an_attached_trainer_keeps_the_checkpoint_of_sigterm_next_to_the_best_one(tmp_path):
    """Trainer removes all checkpoints but the best one at the end. The learning rate makes the first one the best."""
    args = {**BEST, "max_steps": 8, "metric_for_best_model": "loss", "learning_rate": 3.0}
    job = Job(str(tmp_path / "run"), section=saving(tmp_path), args=args)
    ended = run_forks(2, train, job, True, False, True)
    assert [code for code, _ in ended] == [128 + signal.SIGTERM] * 2
    newest = len(ended[0][1].of("loss"))
    assert {one.name for one in (tmp_path / "run").iterdir()} >= {"checkpoint-2", f"checkpoint-{newest}"}
