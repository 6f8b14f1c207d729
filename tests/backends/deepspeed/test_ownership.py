"""Balanced ownership of parameters: training is unchanged, and checkpoints can be exchanged with DeepSpeed's."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import safe_get_full_fp32_param
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

import deepspeed_compress
from deepspeed_compress import ConfigError, StateError, UnsupportedError
from deepspeed_compress.backends.deepspeed.ownership import balanced_order
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, data, engines, make_engine, network, own_data, run, start, weights
from tests.support.jobs import train as train_alone
from tests.support.methods import BF16, FP32_SUMS, RAW, UNCLIPPED
from tests.support.resuming import residuals_of, resume, save_and_continue, save_and_resume

BALANCED = {**RAW, "ownership": "balanced"}
INT4 = {"gradients": {"bits": 4, "block_size": 32}, "weights": {"bits": 4}, "ownership": "balanced"}
OFFLOAD = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 2}}
KINDS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fp32": ({}, {}),
    "bf16": ({}, BF16),
    "fp16": ({}, FP16),
    "offload": ({"offload_optimizer": {"device": "cpu"}}, OFFLOAD),
}

pytestmark = pytest.mark.filterwarnings("ignore:.*matches every parameter:deepspeed_compress.CompressWarning")
SAMPLED = pytest.mark.sampled(8)


def test_orders_are_permutations_and_level() -> None:
    """In any part of a model of equal layers, each rank owns at most twice its share plus one parameter."""
    layer = [400, 120, 500, 480, 4, 4, 4, 4]
    numels = [3000, 60, *layer * 12, 4]
    for ranks in (2, 3, 4):
        order = balanced_order(numels, ranks)
        assert sorted(order) == list(range(len(numels)))
        share, end, owners = -(-sum(numels) // ranks), 0, {}
        for index in order:
            owners[index], end = end // share, end + numels[index]
        for first in range(2, len(numels) - 3 * len(layer), len(layer)):
            stretch = range(first, first + 3 * len(layer))
            sums = [sum(numels[index] for index in stretch if owners[index] == rank) for rank in range(ranks)]
            assert max(sums) < 2 * sum(sums) / ranks + max(layer)


@pytest.mark.parametrize(("numels", "ranks"), [([5], 2), ([1, 1], 2), ([], 2), ([7, 8, 9], 1)])
def test_few_parameters_stay_as_they_are(numels: Sequence[int], ranks: int) -> None:
    assert balanced_order(numels, ranks) == list(range(len(numels)))


def job(stage: int, section: Mapping[str, Any] | None, kind: str = "fp32", **options: Any) -> Job:
    zero, extra = KINDS[kind]
    # The norm of all gradients is a sum in the order of the parameters in memory.
    return Job(stage, section, zero, {**UNCLIPPED, **extra}, **options)


def owners(engine: Any) -> list[str]:
    return [engine.param_names[parameter] for parameter in engine.optimizer.bit16_groups[0]]


def train(rank: int, *jobs: Job) -> list[tuple[list[float], dict[str, list[float]], list[str]]]:
    return [(run(engine, data(rank, one)), weights(engine), owners(engine)) for one, engine in engines(*jobs)]


@SAMPLED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 2])
def test_training_is_deepspeeds_to_the_bit(stage: int, kind: str) -> None:
    jobs = [job(stage, section, kind, accumulation=2) for section in (None, BALANCED)]
    for plain, ours in run_forks(2, train, *jobs):
        assert ours[:2] == plain[:2]
        assert sorted(ours[2]) == sorted(plain[2])
        assert ours[2] != plain[2]


@SAMPLED
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 2])
def test_checkpoints_go_both_ways(stage: int, kind: str, tmp_path: Path) -> None:
    plain, ours = (job(stage, section, kind) for section in (None, BALANCED))
    ours = Job(stage, {**BALANCED, "on_missing_state": "reset"}, ours.zero, ours.extra)
    for going_on in run_forks(2, both_ways, {"plain": plain, "ours": ours}, str(tmp_path)):
        assert going_on == [going_on[0]] * 6
    assert files(tmp_path / "ours") == files(tmp_path / "plain")


def both_ways(rank: int, jobs: Mapping[str, Job], directory: str) -> list[dict[str, list[float]]]:
    """Return the final weights of two runs that save and continue, and of those that load either checkpoint."""
    saved = [save_and_continue(rank, one, f"{directory}/{name}", 2) for name, one in jobs.items()]
    loaded = [resume(rank, one, f"{directory}/{name}", 2) for name in jobs for one in jobs.values()]
    return [values for values, _ in saved + loaded]


def files(directory: Path) -> list[Any]:
    """Return the description of parameters in checkpoint files, as lists."""
    found = []
    for file in sorted(directory.rglob("*_states.pt")):
        loaded = torch.load(file, weights_only=False)
        state = loaded.get("optimizer_state_dict") or {"param_shapes": loaded["param_shapes"]}
        found.append((file.name, plain_data({key: value for key, value in state.items() if key != "loss_scaler"})))
    assert len(found) == 3
    return found


def plain_data(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.tolist()
    if isinstance(value, Mapping):
        return [(key, plain_data(one)) for key, one in value.items()]
    return [plain_data(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("stage", [1, 2])
def test_compressed_training_resumes_to_the_bit(stage: int, tmp_path: Path) -> None:
    results = run_forks(2, save_and_resume, Job(stage, INT4), str(tmp_path), 2)
    for going_on, again in results:
        assert again == going_on
        assert going_on[0] == results[0][0][0]


def pipelined(rank: int, section: Mapping[str, Any] | None, directory: str) -> tuple[dict[str, list[float]], list[str]]:
    """Train a pipeline of two stages with two ranks each."""
    one = job(1, section, accumulation=2, stages=2)
    engine = start(one)
    run(engine, own_data(engine, rank, one))
    engine.save_checkpoint(directory)
    return weights(engine), owners(engine)


def test_pipelines(tmp_path: Path) -> None:
    plain = run_forks(4, pipelined, None, f"{tmp_path}/plain")
    ours = run_forks(4, pipelined, BALANCED, f"{tmp_path}/ours")
    assert [found for found, _ in ours] == [found for found, _ in plain]
    assert [order for _, order in ours] != [order for _, order in plain]
    assert states(tmp_path / "ours") == states(tmp_path / "plain") != []


def states(directory: Path) -> list[Any]:
    """Return the master weights and optimizer states in the files of all ranks."""
    loaded = [torch.load(file, weights_only=False) for file in sorted(directory.rglob("*optim_states.pt"))]
    return [plain_data({**one["optimizer_state_dict"], "loss_scaler": None}) for one in loaded]


def changed(rank: int, directory: str, *sections: Mapping[str, Any]) -> tuple[bool, list[float], Mapping[str, Any]]:
    """Save under the first section and continue under the second one.

    Return whether the residuals are the same, the losses and the weights.
    """
    first, second = (Job(2, section) for section in sections)
    engine = start(first)
    run(engine, data(rank, first))
    engine.save_checkpoint(directory)
    before = residuals_of(engine)
    other = start(second)
    other.load_checkpoint(directory)
    same = residuals_of(other) == before
    return same, run(other, data(rank, second)), weights(other)


def test_ownership_may_change_in_mid_training(tmp_path: Path) -> None:
    """Residuals of the new owners are applied exactly and then removed. Both ranks hold the same weights."""
    contiguous = {**INT4, "ownership": "contiguous"}
    (same, losses, found), (other_same, _, others) = run_forks(2, changed, str(tmp_path), contiguous, INT4)
    assert same
    assert other_same
    assert found == others
    assert all(loss == loss for loss in losses)


def test_state_that_owners_keep_fixes_the_ownership(tmp_path: Path) -> None:
    delayed = {"parameters": "0.weight", "method": "blockwise", "bits": 4, "every": 2, "spread": True}
    contiguous = {"gradients": {"bits": 4, "block_size": 32, "overrides": [delayed]}}
    with pytest.raises(RankError, match=r"balanced. cannot continue .* with .contiguous., whose owners keep spread \("):
        run_forks(2, changed, str(tmp_path), contiguous, {**contiguous, "ownership": "balanced"})


GROUPS_OF = {"matrices": lambda parameter: parameter.ndim == 2, "vectors": lambda parameter: parameter.ndim == 1}


def grouped(rank: int, section: Mapping[str, Any] | None, directory: str) -> tuple[Any, ...]:
    """Train two parameter groups and a frozen parameter.

    Return master weights by name before and after loading the checkpoint of `plain`, and weights.
    """
    model = network()
    model[2].weight.requires_grad_(False)
    groups = [
        {"params": [one for one in model.parameters() if chosen(one)], "lr": 0.01 * number}
        for number, chosen in enumerate(GROUPS_OF.values(), 1)
    ]
    one = job(2, section)
    engine = make_engine(model, one.config(), groups)
    run(engine, data(rank, one))
    name = "plain" if section is None else "ours"
    engine.save_checkpoint(f"{directory}/{name}")
    before = full(engine)
    run(engine, data(rank, one))
    engine.load_checkpoint(f"{directory}/plain", load_module_only=False)
    return before, full(engine), weights(engine)


def full(engine: Any) -> dict[str, Any]:
    """Return the master weight that DeepSpeed's own function finds for each parameter."""
    return {
        name: safe_get_full_fp32_param(parameter).tolist()
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def put_together(rank: int, directory: str) -> tuple[bool, bool]:
    """Return whether DeepSpeed's tool finds the master weights in the files, and whether loading restores them."""
    engine, batches = start(job(1, INT4)), data(rank, Job(1))
    run(engine, batches)
    engine.save_checkpoint(directory)
    before, found = full(engine), get_fp32_state_dict_from_zero_checkpoint(directory)
    run(engine, batches)
    engine.load_checkpoint(directory)
    return {name: one.tolist() for name, one in found.items()} == before, full(engine) == before


def test_three_ranks(tmp_path: Path) -> None:
    assert run_forks(3, put_together, str(tmp_path)) == [(True, True)] * 3


@SAMPLED
@pytest.mark.parametrize("ranks", [1, 2])
def test_groups_and_frozen_parameters(ranks: int, tmp_path: Path) -> None:
    plain = run_forks(ranks, grouped, None, str(tmp_path))
    assert run_forks(ranks, grouped, {**BALANCED, "on_missing_state": "reset"}, str(tmp_path)) == plain
    assert states(tmp_path / "ours") == states(tmp_path / "plain") != []


def attached_to(rank: int) -> None:
    model, one = network(), Job(1, BALANCED)
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=one.config())[0]
    deepspeed_compress.attach(engine)


def test_an_engine_made_without_it_is_refused() -> None:
    with pytest.raises(RankError, match=f"{UnsupportedError.__name__}: /deepspeed_compress/ownership.*made without it"):
        run_forks(2, attached_to)


def attached_again(rank: int, job: Job) -> dict[str, list[float]]:
    """Detach and attach again. Without error feedback, `detach` drops nothing, so training continues bit for bit."""
    engine, batches = start(job), data(rank, job)
    run(engine, batches[:2])
    deepspeed_compress.detach(engine)
    deepspeed_compress.attach(engine)
    run(engine, batches[2:])
    return weights(engine)


def test_an_engine_of_initialize_can_be_attached_to_again() -> None:
    job = Job(1, BALANCED)
    assert run_forks(2, attached_again, job) == [one.parameters for [one] in run_forks(2, train_alone, job)]


def other_optimizer(rank: int) -> None:
    start(Job(1, BALANCED, extra=FP32_SUMS))


def test_the_bf16_optimizer_is_refused() -> None:
    with pytest.raises(RankError, match=r"ownership is \"balanced\".*BF16_Optimizer"):
        run_forks(2, other_optimizer)


class _Rows(torch.optim.SGD):
    """Optimizer with a state per block of elements, as 8-bit optimizers have."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["scales"] = torch.ones(3)


def with_rows(rank: int, directory: str) -> None:
    model = network()
    config = {**Job(2, BALANCED, extra={"zero_allow_untested_optimizer": True}).config()}
    config.pop("optimizer")
    optimizer = _Rows(model.parameters(), lr=0.1)
    engine = deepspeed_compress.initialize(model=model, optimizer=optimizer, config=config)[0]
    run(engine, data(rank, Job(2)))
    engine.save_checkpoint(directory)


def test_states_of_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=f"{StateError.__name__}.*'scales' of the optimizer, of shape \\(3,\\)"):
        run_forks(2, with_rows, str(tmp_path))


@pytest.mark.parametrize(
    ("stage", "zero", "section"),
    [
        (0, {}, BALANCED),
        (3, {}, BALANCED),
        (1, {"round_robin_gradients": True}, BALANCED),
        (2, {"elastic_checkpoint": True}, BALANCED),
        (2, {}, {"gradients": {"method": "none"}, "ownership": "balanced"}),
    ],
)
def test_unsupported_combinations_are_refused(stage: int, zero: dict[str, Any], section: dict[str, Any]) -> None:
    config = Job(stage, section, zero).config()
    with pytest.raises(ConfigError, match=r"/deepspeed_compress/ownership: \"balanced\" cannot be combined with "):
        deepspeed_compress.initialize(model=nn.Linear(2, 2), config=config)


def test_deepspeeds_class_is_as_it_was() -> None:
    before = DeepSpeedEngine._configure_zero_optimizer
    with pytest.raises(RankError):
        run_forks(2, other_optimizer)
    assert DeepSpeedEngine._configure_zero_optimizer is before
