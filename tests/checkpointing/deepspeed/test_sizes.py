"""DeepSpeed checkpoints resume with another number of ranks, and every saved element is restored."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

from deepspeed_compress import StateError
from deepspeed_compress.checkpointing.deepspeed import resharding
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, make_engine, network, run, start, weights
from tests.support.messages import caught_warnings
from tests.support.methods import FP32_SUMS, NONE

pytestmark = pytest.mark.sampled(16)

INT8 = {"gradients": {"bits": 8, "block_size": 32, "error_feedback": {"dtype": "fp32"}}}
SAVED = 3
GLOBAL = 4
"""Number of micro-batches per step, over all ranks."""


def batches(rank: int, ranks: int, steps: range) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of this rank. A step has the same ones with any number of ranks."""
    found = []
    for step in steps:
        for index in range(rank, GLOBAL, ranks):
            generator = torch.Generator().manual_seed(GLOBAL * step + index)
            x = torch.randn(3, 12, generator=generator)
            found.append((x, x[:, :3].sum(dim=1, keepdim=True)))
    return found


def moments(engine: Any) -> dict[str, list[list[float]]]:
    """Return the whole fp32 master weights and both moments of Adam, by parameter."""
    link = getattr(engine.optimizer, "_lazy_init_hp_params_optimizer_state", None)
    if link is not None:
        # A step does it before it is needed; with a loaded state there is something to link already.
        link()
    return {
        name: [
            safe_get_full_fp32_param(parameter).flatten().tolist(),
            *(safe_get_full_optimizer_state(parameter, key).flatten().tolist() for key in ("exp_avg", "exp_avg_sq")),
        ]
        for name, parameter in engine.module.named_parameters()
        if parameter.requires_grad
    }


def on(job: Job, ranks: int) -> Job:
    return replace(job, accumulation=GLOBAL // ranks)


SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 10}}}


def save(rank: int, job: Job, ranks: int, directory: str) -> dict[str, Any]:
    """Save, continue, and return the saved state and the final weights."""
    engine = start(on(job, ranks))
    run(engine, batches(rank, ranks, range(SAVED)))
    engine.save_checkpoint(directory, client_state={"position": SAVED})
    return state_of(engine) | {"after": go_on(engine, rank, ranks)}


def load(rank: int, job: Job, ranks: int, directory: str) -> dict[str, Any]:
    engine = start(on(job, ranks))
    with caught_warnings() as texts:
        _, client_state = engine.load_checkpoint(directory)
    assert texts == []
    assert client_state["position"] == SAVED
    return state_of(engine) | {"after": go_on(engine, rank, ranks)}


def go_on(engine: Any, rank: int, ranks: int) -> dict[str, list[float]]:
    run(engine, batches(rank, ranks, range(SAVED, SAVED + 2)))
    return weights(engine)


def state_of(engine: Any) -> dict[str, Any]:
    found = {"steps": engine.global_steps, "lr": engine.get_lr(), "weights": weights(engine)}
    return found | ({"moments": moments(engine)} if engine.zero_optimization_stage() else {})


KEPT = ("steps", "lr", "weights", "moments")


def compare(saved: dict[str, Any], loaded: dict[str, Any], rel: float, kept: tuple[str, ...] = KEPT) -> None:
    for key in kept:
        assert loaded.get(key) == saved.get(key), key
    for name, values in saved["after"].items():
        assert loaded["after"][name] == pytest.approx(values, rel=rel, abs=rel), name


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (2, 1), (1, 2)])
@pytest.mark.parametrize("stage", range(4))
def test_every_element_is_restored(stage: int, before: int, after: int, tmp_path: Path) -> None:
    """With `none`, training continues as before, up to the order of sums."""
    job = Job(stage, NONE, extra=SCHEDULER)
    saved = run_forks(before, save, job, before, str(tmp_path))[0]
    for loaded in run_forks(after, load, job, after, str(tmp_path)):
        compare(saved, loaded, rel=1e-4)


SETTINGS: dict[str, Job] = {
    "round_robin": Job(2, zero={"round_robin_gradients": True}),
    "offload": Job(2, zero={"offload_optimizer": {"device": "cpu"}}, extra={"zero_force_ds_cpu_optimizer": False}),
    "bf16": Job(1, extra=FP32_SUMS),
    "sub_groups": Job(3, zero={"sub_group_size": 100}),
    "persistent": Job(3, zero={"stage3_param_persistence_threshold": 50}),
}


@pytest.mark.parametrize(("before", "after"), [(4, 2), (1, 4)])
@pytest.mark.parametrize("name", SETTINGS)
def test_other_orders_and_types(name: str, before: int, after: int, tmp_path: Path) -> None:
    job = replace(SETTINGS[name], section=NONE)
    saved = run_forks(before, save, job, before, str(tmp_path))[0]
    for loaded in run_forks(after, load, job, after, str(tmp_path)):
        # DeepSpeed tells the moments of other parameters than it is asked for where they are dealt out.
        kept = KEPT[: 3 if name == "round_robin" else 4]
        compare(saved, loaded, rel=2e-2 if name == "bf16" else 1e-4, kept=kept)


@pytest.mark.parametrize(
    ("before", "after"), [("balanced", "balanced"), ("balanced", "contiguous"), ("contiguous", "balanced")]
)
def test_other_owners(before: str, after: str, tmp_path: Path) -> None:
    """Files are in the order of the program, whichever rank owns a parameter."""
    jobs = [Job(1, {**NONE, "gradients": {"bits": 8}, "ownership": name}) for name in (before, after)]
    saved = run_forks(4, save, jobs[0], 4, str(tmp_path))[0]
    for loaded in run_forks(2, load, jobs[1], 2, str(tmp_path)):
        for key in KEPT:
            assert loaded[key] == saved[key], key


def save_frozen(rank: int, directory: str) -> dict[str, Any]:
    return frozen_of(frozen_engine(changed=True), directory, save=True)


def load_frozen(rank: int, directory: str) -> dict[str, Any]:
    return frozen_of(frozen_engine(changed=False), directory, save=False)


def frozen_engine(changed: bool) -> Any:
    model = network()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("0", "4")))
        if changed and not parameter.requires_grad:
            parameter.data.add_(1.0)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return make_engine(model, Job(3, NONE).config(), trained)


def frozen_of(engine: Any, directory: str, save: bool) -> dict[str, Any]:
    if save:
        run(engine, batches(0, GLOBAL, range(2)))
        engine.save_checkpoint(directory)
    else:
        engine.load_checkpoint(directory)
    return {"weights": weights(engine), "moments": moments(engine)}


def test_frozen_parameters_of_zero_3(tmp_path: Path) -> None:
    saved = run_forks(3, save_frozen, str(tmp_path))[0]
    for loaded in run_forks(2, load_frozen, str(tmp_path)):
        assert loaded == saved


def test_a_missing_file_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    job = Job(2, NONE)
    run_forks(4, save, job, 4, str(tmp_path))
    [file] = tmp_path.rglob("zero_pp_rank_3_mp_rank_00_optim_states.pt")
    file.unlink()
    with pytest.raises(RankError) as raised:
        run_forks(2, load, job, 2, str(tmp_path))
    assert str(raised.value).count(f"{StateError.__name__}: ") >= 2
    assert "zero_pp_rank_3" in str(raised.value)


def test_compressed_runs_go_on_too(tmp_path: Path) -> None:
    """The sum of the residuals is conserved, so later steps are close to those of the run that continued."""
    job = Job(2, INT8)
    saved = run_forks(4, save, job, 4, str(tmp_path))[0]
    for loaded in run_forks(2, load, job, 2, str(tmp_path)):
        for key in KEPT:
            assert loaded[key] == saved[key], key
        for name, values in saved["after"].items():
            assert loaded["after"][name] == pytest.approx(values, rel=0.1, abs=0.02), name


def unreadable(file: Path) -> Any:
    raise StateError(f"{file} cannot be read")


def load_on_a_rank_that_cannot_read(rank: int, directory: str) -> str:
    """Return the error of each rank if the last one cannot read the states."""
    engine = start(on(Job(1, NONE), 2))
    if rank:
        resharding.read_states = unreadable
    with pytest.raises(StateError) as raised:
        engine.load_checkpoint(directory)
    return str(raised.value)


def test_a_rank_that_cannot_read_the_states_tells_the_others(tmp_path: Path) -> None:
    run_forks(2, save, Job(1, NONE), 2, str(tmp_path))
    one, other = run_forks(2, load_on_a_rank_that_cannot_read, str(tmp_path))
    assert one == other
    assert "mp_rank_00_model_states.pt cannot be read" in one
