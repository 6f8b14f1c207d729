"""A policy whose ranks share layers learns as in one process; engines that divide completions are refused."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from deepspeed_compress import initialize
from deepspeed_compress.agents.grpo import Sample
from deepspeed_compress.agents.learner import Learned, Learner, LearnerSettings
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from tests.agents.models import PAD
from tests.agents.steps import RATE, samples, step_of_one_process
from tests.support.forks import run_forks
from tests.support.jobs import Job, start
from tests.support.tensor_islands import AUTO_TP, TENSOR, llama


def learned(rank: int, chosen: Sequence[Sample], ranks: int, stage: int, store: Path) -> Learned:
    """Learn from `chosen` in one step, and publish the weights."""
    model = llama()
    config = {
        "train_micro_batch_size_per_gpu": 8 // ranks,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 0.0,
        **AUTO_TP,
        "deepspeed_compress": {"gradients": {"method": "none"}},
    }
    engine, *_ = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=RATE), config=config)
    report = Learner(engine, PAD, LearnerSettings()).learn(chosen, version=4)
    assert engine.global_steps == report.steps
    Publisher(engine, DirectoryStore(store), dtype="fp32").publish()
    engine.destroy()
    return report


@pytest.mark.parametrize(
    ("ranks", "stage"),
    [(TENSOR, 1), *(pytest.param(2 * TENSOR, stage, marks=pytest.mark.slow) for stage in (0, 2))],
)
def test_ranks_that_share_layers_take_the_step_of_one_process(ranks: int, stage: int, tmp_path: Path) -> None:
    chosen = samples(7)
    reports = run_forks(ranks, learned, chosen, ranks, stage, tmp_path, shared_memory=True)
    assert {report.steps for report in reports} == {1}
    assert reports[:TENSOR] == [reports[0]] * TENSOR
    assert reports[0].reward == pytest.approx(sum(one.reward for one in chosen) / len(chosen))
    model = llama()
    Receiver(model, DirectoryStore(tmp_path)).update()
    expected = step_of_one_process(llama(), chosen)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), expected[name], rtol=1e-4, atol=1e-5)


def refusal(rank: int) -> str:
    engine = start(Job(stages=2))
    with pytest.raises(UnsupportedError) as refused:
        Learner(engine, PAD, LearnerSettings())
    return str(refused.value)


def test_pipelines_are_refused() -> None:
    for text in run_forks(2, refusal):
        assert text.startswith("the engine is a pipeline, but a policy needs the logits of whole completions")
