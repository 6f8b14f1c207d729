"""Mixtures of experts of DeepSpeed's layer: groups, residuals, skipped steps, checkpoints and figures of their own."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from torch import nn

from deepspeed_compress.compression import state
from deepspeed_compress.compression.state_description import Description, Moment, Position
from deepspeed_compress.errors import StateError, UnsupportedError
from deepspeed_compress.monitor import ring_all_reduce
from deepspeed_compress.session.state_files import check_experts
from tests.backends.deepspeed.programs.experts import Experts
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, make_engine, run, weights
from tests.support.messages import caught_warnings, refusal
from tests.support.methods import NONE, RAW
from tests.support.resuming import State, save_and_resume

pytestmark = pytest.mark.sampled(4)

INT4 = {"gradients": {"bits": 4, "block_size": 32, "error_feedback": {"dtype": "fp32"}}, "seed": 1}


def start(job: Job, spread: int) -> Any:
    """Return an engine with two layers of four experts, each rank of `spread` ranks with a part of them."""
    torch.manual_seed(0)
    model = nn.Sequential(Experts(spread, count=4), nn.Linear(1, 12), Experts(spread, count=4))
    given = {"params": list(model.parameters()), "name": "all"}
    groups = split_params_into_different_moe_groups_for_optimizer(given)
    return make_engine(model, job.config(), groups)


def expert_of(engine: Any) -> Any:
    return next(parameter for parameter in engine.module.parameters() if is_moe_param(parameter))


def skipping(rank: int, stage: int, spread: int) -> list[tuple[int, dict[str, list[float]]]]:
    """Train with a NaN in the gradient of one expert of rank 1 in the third of five steps, and without that step."""
    found = []
    for poisoned in (True, False):
        engine = start(Job(stage, INT4), spread)
        for step, batch in enumerate(data(rank, Job(steps=5))):
            if step != 2 or poisoned:
                factor = math.nan if poisoned and (step, rank) == (2, 1) else 1.0
                with expert_of(engine).register_hook(lambda gradient, factor=factor: factor * gradient):
                    run(engine, [batch])
        found.append((engine.skipped_steps, weights(engine)))
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "spread"), [(1, 2), (2, 1)])
def test_a_nan_in_one_expert_skips_the_step_on_all_ranks(stage: int, spread: int) -> None:
    """Nothing of the step remains in any residual."""
    for (skipped, ours), (none, expected) in run_forks(2, skipping, stage, spread):
        assert (skipped, none) == (1, 0)
        assert ours == expected


def saving(rank: int, stage: int, spread: int, more: Mapping[str, Any], directory: str) -> tuple[State, State]:
    """Return weights and residuals of a run that continues after saving, and of one that resumes."""
    return save_and_resume(rank, Job(stage, {**INT4, **more}, steps=6), directory, 3, partial(start, spread=spread))


@pytest.mark.parametrize(
    ("ranks", "stage", "spread", "more"),
    [
        (4, 1, 2, {}),
        pytest.param(4, 2, 2, {"weights": {"bits": 8, "min_numel": 10}}, marks=pytest.mark.slow),
        pytest.param(2, 2, 1, {}, marks=pytest.mark.slow),
        pytest.param(4, 0, 2, {}, marks=pytest.mark.slow),
    ],
)
def test_a_run_resumes_with_the_residuals_of_its_experts(
    tmp_path: Path, ranks: int, stage: int, spread: int, more: Mapping[str, Any]
) -> None:
    found = run_forks(ranks, saving, stage, spread, more, str(tmp_path))
    for rank, ((continued, saved), (resumed, loaded)) in enumerate(found):
        owner = f"ep_size_{spread}_rank_{rank % spread}/"
        names = {name for name, values in saved.items() if values}
        assert names >= {"gradients", owner + "gradients"}
        assert all("/" not in name or name.startswith(owner) for name in names)
        of_experts = [name for (name, _, _), _ in saved[owner + "gradients"]]
        assert of_experts
        assert all("deepspeed_experts" in name for name in of_experts)
        assert not any("deepspeed_experts" in name for (name, _, _), _ in saved["gradients"])
        assert loaded == saved
        assert resumed == continued


METHODS = (
    {"method": "powersgd", "rank": 2},
    {"method": "topk", "density": 0.1},
    {"method": "sign"},
    {"method": "bf16", "overrides": [{"parameters": "deepspeed_experts", "method": "blockwise", "bits": 4}]},
)


def learning(rank: int, stage: int, spread: int) -> list[tuple[list[str], dict[str, list[float]]]]:
    """Train with every method; return its warnings, and the weights."""
    found = []
    for method in METHODS:
        with caught_warnings() as said:
            engine = start(Job(stage, {"gradients": method}), spread)
            run(engine, data(rank, Job(steps=4)))
        found.append((said, weights(engine)))
        engine.destroy()
    return found


@pytest.mark.parametrize(("stage", "spread"), [(0, 2), pytest.param(1, 1, marks=pytest.mark.slow)])
def test_every_method_keeps_the_same_bits_where_the_same_parameters_are(stage: int, spread: int) -> None:
    for (said, first), (_, second) in zip(*run_forks(2, learning, stage, spread), strict=True):
        assert not said
        assert all(torch.isfinite(torch.tensor(values)).all() for values in first.values())
        for name, values in first.items():
            if spread == 1 or "deepspeed_experts" not in name:
                assert values == second[name], name


def overlapping(rank: int, spread: int) -> list[dict[str, list[float]]]:
    """Train with weights that arrive within the step, and with weights that arrive during the next forward pass."""
    found = []
    for overlap in (False, True):
        engine = start(Job(1, {**INT4, "weights": {"bits": 8, "min_numel": 10, "overlap": overlap}}), spread)
        run(engine, data(rank, Job()))
        engine.module.state_dict()
        found.append(weights(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize("spread", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_weights_of_experts_may_arrive_during_the_next_forward_pass(spread: int) -> None:
    """With a spread of 2, every rank has its own experts, which are not sent."""
    for within, during in run_forks(2, overlapping, spread):
        assert within == during


CLIPPED = {"gradients": {"method": "dgc", "density": 1.0, "clip_norm": 1e-3, "min_numel": 0}}
SGD = {
    "optimizer": {"type": "SGD", "params": {"lr": 1.0}},
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}


def clipping(rank: int, stage: int) -> list[float]:
    """Return the norm of the change of every parameter in a step whose gradients are clipped."""
    engine = start(Job(stage, CLIPPED, {"reduce_bucket_size": 10**5}, SGD), 2)
    before = [parameter.detach().clone() for parameter in engine.module.parameters()]
    run(engine, data(rank, Job(steps=1)))
    changes = zip(engine.module.parameters(), before, strict=True)
    found = [float((parameter.detach() - old).norm()) for parameter, old in changes]
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_are_clipped_in_buckets_with_experts_and_others(stage: int) -> None:
    """The rank that owns the mean clips its own gradients too."""
    for changes in run_forks(2, clipping, stage):
        assert 0 < max(changes) < 1.001e-3


def description(position: Position, *names: str) -> Description:
    return state.contents({name: _store() for name in names}, position, Moment(1, 3), {}, {}).description


def _store() -> Any:
    return state.Residuals("fp32", transactional=False)


def test_residuals_of_other_experts_are_refused() -> None:
    """Their names are equal on all ranks, so only the owner tells them apart."""
    here = Position(0, 4, 0, 1)
    saved = description(here, "gradients", "ep_size_2_rank_0/gradients")
    check_experts(saved, ["gradients", "ep_size_2_rank_0/gradients"], here)
    check_experts(description(here, "gradients"), ["gradients"], Position(0, 2, 0, 1))
    for stores, position in (
        (["gradients", "ep_size_2_rank_1/gradients"], here),
        (["gradients", "ep_size_4_rank_0/gradients"], here),
        (["gradients"], here),
        (["gradients", "ep_size_2_rank_0/gradients"], Position(0, 2, 0, 1)),
    ):
        with pytest.raises(StateError, match="the residuals of experts cannot be redistributed"):
            check_experts(saved, stores, position)


def counting(rank: int, stage: int, spread: int, section: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Return bytes sent and uncompressed of a step, and the elements of this rank's experts and of the others."""
    engine = start(Job(stage, {**section, "monitor": {"every": 1}}), spread)
    figures: list[Any] = []
    engine.compression.subscribe(figures.append)
    run(engine, data(rank, Job(steps=2)))
    sizes = {True: 0, False: 0}
    for parameter in engine.module.parameters():
        sizes[is_moe_param(parameter)] += parameter.numel()
    engine.destroy()
    last = figures[-1] if figures else None
    sent, uncompressed = (0, 0) if last is None else (last.bytes_sent, last.bytes_uncompressed)
    return sent, uncompressed, sizes[True], sizes[False]


@pytest.mark.parametrize(("stage", "section"), [(0, RAW), (2, RAW), (2, NONE)])
@pytest.mark.parametrize("spread", [1, 2])
def test_bytes_of_experts_are_those_of_their_group(stage: int, spread: int, section: Mapping[str, Any]) -> None:
    sent, uncompressed, experts, others = run_forks(2, counting, stage, spread, section)[0]
    averaged = others + (experts if spread == 1 else 0)
    assert uncompressed == ring_all_reduce(4 * averaged, 2)
    if section is RAW:
        # An all-reduce sends half of the bucket, and the mean of the other half; a reduce-scatter only the former.
        assert sent == pytest.approx(4 * averaged * (1 if stage == 0 else 0.5), rel=0.1)


def steering(rank: int, stage: int) -> list[str]:
    """Return what an adaptive policy with a guard has decided in twelve steps."""
    adaptive = {"max_error": 0.3, "probe_every": 4, "candidates": [{"bits": 8}, {"bits": 4}, {"bits": 2}]}
    section = {"gradients": {"bits": 8}, "adaptive": adaptive, "guard": {}, "schedule": {"warmup_steps": 2}}
    engine = start(Job(stage, section), 2)
    run(engine, data(rank, Job(steps=12)))
    found = [str(event) for event in engine.compression.events]
    engine.destroy()
    return [*found, engine.compression.settings]


@pytest.mark.parametrize("stage", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_ranks_with_other_experts_decide_alike(stage: int) -> None:
    first, second = run_forks(2, steering, stage)
    assert first == second
    assert any("adapt" in event for event in first)


REFUSED = {
    "islands": {"section": {"islands": {"size": 2, "sync_every": 2}}},
    "gradients/hierarchy": {"section": {"gradients": {"bits": 4, "hierarchy": {"ranks_per_node": 2}}}},
    'ownership is "balanced"': {"section": {**INT4, "ownership": "balanced"}},
    "contiguous_gradients": {"section": INT4, "zero": {"contiguous_gradients": False}},
}


def refusals(rank: int) -> dict[str, str]:
    return {text: refusal(UnsupportedError, start, Job(1, **options), 2) for text, options in REFUSED.items()}


def test_unsupported_settings_with_experts_are_refused_by_name() -> None:
    for found in run_forks(4, refusals):
        for text in REFUSED:
            assert text in found[text]
