"""A policy that is killed and resumed learns as if it had not been, bit for bit, given the same rollouts."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_compress import initialize
from deepspeed_compress.agents.grpo import Sample
from deepspeed_compress.agents.learner import Checkpoints, Learner, LearnerSettings
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from tests.agents.models import PAD, network
from tests.agents.steps import samples
from tests.support.forks import RankError, run_forks

RANKS, BATCHES, EVERY = 2, 6, 2
KILLED = 5
"""Batch in which the run is killed. The last checkpoint is that of the batch before."""


def config(stage: int) -> dict[str, Any]:
    return {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}},
    }


def rollouts(batch: int) -> list[Sample]:
    """Return the samples of a batch, of which each is learned from in several steps."""
    return samples(20 + batch)[batch:]


def trained(rank: int, directory: Path, stage: int, killed: int | None) -> dict[int, tuple[str, dict[str, Any]]]:
    """Learn from all batches that are left.

    Returns:
        By number of the batch: the digest of the published version, and the weights.
    """
    model = network()
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config(stage))
    checkpoints = Checkpoints(engine, directory / "checkpoints", EVERY, resume=True)
    publisher = Publisher(engine, DirectoryStore(directory / "weights"))
    learner = Learner(engine, PAD, LearnerSettings(epochs=2))
    published, found = publisher.publish(), {}
    for batch in range(checkpoints.batches + 1, BATCHES + 1):
        assert published is not None
        learner.learn(rollouts(batch), published.version)
        published = publisher.publish()
        assert published is not None
        if batch == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        checkpoints.save_if_due(batch, last=batch == BATCHES)
        found[batch] = published.digest, {name: value.detach().clone() for name, value in model.named_parameters()}
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_a_killed_run_publishes_the_versions_of_one_that_was_not_killed(stage: int, tmp_path: Path) -> None:
    whole = run_forks(RANKS, trained, tmp_path / "whole", stage, None)
    with pytest.raises(RankError):
        run_forks(RANKS, trained, tmp_path / "killed", stage, KILLED, grace=0.1)
    resumed = run_forks(RANKS, trained, tmp_path / "killed", stage, None)
    for expected, found in zip(whole, resumed, strict=True):
        assert list(found) == [5, 6]
        for batch, (digest, weights) in found.items():
            assert digest == expected[batch][0]
            assert all(torch.equal(weights[name], value) for name, value in expected[batch][1].items())
    assert len({digest for digest, _ in whole[0].values()}) == BATCHES
    received = [network().to(torch.bfloat16) for _ in range(2)]
    for name, model in zip(("whole", "killed"), received, strict=True):
        Receiver(model, DirectoryStore(tmp_path / name / "weights")).update()
    pairs = zip(received[0].parameters(), received[1].parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
