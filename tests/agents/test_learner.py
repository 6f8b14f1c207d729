"""A policy that learns on several ranks takes the step that one process would take."""

from collections.abc import Sequence
from dataclasses import replace
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
    chosen = [replace(one, reward=1.0) for one in samples(8)]
    for _, found in run_forks(RANKS, learned, chosen, 4, 1, LearnerSettings()):
        assert all(torch.equal(found[name], value) for name, value in network().named_parameters())


def test_a_divergence_needs_a_reference() -> None:
    with pytest.raises(ValueError, match="a reference model is needed"):
        Learner(None, PAD, LearnerSettings(divergence=0.1))
