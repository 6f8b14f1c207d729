"""A policy that learns on several ranks takes the step that one process would take."""

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_compress import initialize
from deepspeed_compress.agents.grpo import Sample
from deepspeed_compress.agents.learner import Learned, Learner, LearnerSettings
from tests.agents.models import PAD, network
from tests.agents.steps import RATE, samples, step_of_one_process
from tests.support.forks import run_forks

RANKS = 2


def config(micro: int, accumulation: int) -> dict[str, Any]:
    return {
        "train_batch_size": micro * accumulation * RANKS,
        "train_micro_batch_size_per_gpu": micro,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        "deepspeed_compress": {"gradients": {"method": "none"}},
    }


def learned(rank: int, chosen: Sequence[Sample], micro: int, accumulation: int, settings: LearnerSettings) -> Any:
    """Return the report and the parameters after learning from `chosen`."""
    model = network()
    engine, *_ = initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=RATE),
        config=config(micro, accumulation),
    )
    report = Learner(engine, PAD, settings).learn(chosen, version=4)
    found = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine.destroy()
    return report, found


@pytest.mark.parametrize(("micro", "accumulation", "number"), [(4, 1, 8), (2, 2, 8), (4, 2, 11)])
def test_ranks_take_the_step_of_one_process(micro: int, accumulation: int, number: int) -> None:
    chosen = samples(number)
    for report, found in run_forks(RANKS, learned, chosen, micro, accumulation, LearnerSettings()):
        assert report.steps == 1
        assert report.reward == pytest.approx(sum(one.reward for one in chosen) / number)
        assert report.lag == pytest.approx(4 - sum(one.version for one in chosen) / number)
        for name, value in step_of_one_process(network(), chosen).items():
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-5)


def test_more_samples_than_a_batch_and_several_epochs_take_several_steps() -> None:
    [(report, _), other] = run_forks(RANKS, learned, samples(20), 4, 1, LearnerSettings(epochs=2))
    assert isinstance(report, Learned)
    assert report.steps == 2 * 3
    assert other[0].steps == 2 * 3


def test_rewards_that_are_all_equal_change_nothing() -> None:
    chosen = [replace(sample, reward=1.0) for sample in samples(8)]
    for _, found in run_forks(RANKS, learned, chosen, 4, 1, LearnerSettings()):
        assert all(torch.equal(found[name], value) for name, value in network().named_parameters())


def test_a_divergence_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="a reference model is needed"):
        Learner(None, PAD, LearnerSettings(divergence=0.1))


class OneRank(torch.nn.Module):
    """An engine of one rank, whose model has the same logits for all samples."""

    data_parallel_group, dp_world_size, device = None, 1, torch.device("cpu")
    pipeline_parallelism, sequence_parallel_size, global_steps = False, 1, 0

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.logits.expand(len(input_ids), -1, -1))

    def train_batch_size(self) -> int:
        return 2

    train_micro_batch_size_per_gpu = train_batch_size

    def gradient_accumulation_steps(self) -> int:
        return 1

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None: ...


def test_a_token_of_a_prompt_that_the_policy_never_chooses_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ratio to the reference is infinite."""
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    logits = torch.zeros(1, 4, 10)
    logits[0, 0, 2] = -200.0
    engine, reference = OneRank(logits), OneRank(torch.zeros(1, 4, 10))
    chosen = [Sample((1, 2), (3, 4), (-2.0, -2.5), reward, "task") for reward in (0.0, 1.0)]
    learned = Learner(engine, PAD, LearnerSettings(divergence=0.1), reference).learn(chosen, 0)
    assert math.isfinite(learned.loss)
    assert engine.logits.grad is not None
    assert engine.logits.grad[0, 0].abs().max() == 0
    assert engine.logits.grad[0, 1].abs().max() > 0


def test_the_mean_reward_counts_an_episode_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    long = [Sample((1, 2), (3, 4), (-2.0, -2.5), 1.0, "task", episode="long")] * 3
    short = replace(long[0], reward=0.0, episode="short")
    learned = Learner(OneRank(torch.zeros(1, 4, 10)), PAD, LearnerSettings()).learn([*long, short], 0)
    assert learned.reward == 0.5


def test_samples_without_weight_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    engine = OneRank(torch.zeros(1, 4, 10))
    chosen = [Sample((1, 2), (3, 4), (-2.0, -2.5), reward, "task", weight=0.0) for reward in (0.0, 1.0)]
    assert Learner(engine, PAD, LearnerSettings()).learn(chosen, 0).loss == 0
    assert engine.logits.grad is not None
    assert engine.logits.grad.abs().max() == 0


def test_no_samples_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 0)
    with pytest.raises(ValueError, match="there are no samples to learn from"):
        Learner(OneRank(torch.zeros(1, 4, 10)), PAD, LearnerSettings()).learn([], 0)
