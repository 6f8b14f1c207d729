"""Muon under ZeRO 1 to 3 with compressed gradients and weights: its results, its momentum, its bytes and its files."""

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import nn

import deepspeed_compress
from deepspeed_compress import ConfigError
from deepspeed_compress.backends.deepspeed import limits
from tests.support.forks import RankError, run_forks
from tests.support.jobs import MUON, Job, data, engines, make_engine, network, run, train, weights
from tests.support.methods import BF16, FP16, FP32_SUMS, NONE, OFFLOAD, RAW
from tests.support.resuming import resume_all, save_and_continue_all

SAMPLED = pytest.mark.sampled(12)

INT4 = {"gradients": {"bits": 4, "block_size": 32}}
BOTH = {**INT4, "weights": {"bits": 4, "block_size": 32}}
WHOLE = {"reduce_scatter": False}
"""Setting of ZeRO 3 that DeepSpeed's Muon requires."""
quiet = pytest.mark.filterwarnings("ignore:.*(matches every|compresses none):deepspeed_compress.CompressWarning")


def muon(stage: int, section: Mapping[str, Any] | None = None, **changes: Any) -> Job:
    """Return a job with Muon. The border between two ranks lies within its largest matrix."""
    zero = {**(WHOLE if stage == 3 else {}), **changes.pop("zero", {})}
    return Job(stage, section, zero, {**MUON, **changes.pop("extra", {})}, **changes)


SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "overlap": {"zero": {"overlap_comm": True}},
    "whole": {"zero": WHOLE},
    "round robin": {"zero": {"round_robin_gradients": True}},
    "aligned": {"zero": {"parameter_alignment": True}},
    "offload": {"zero": OFFLOAD},
    "fp32 sums": {"extra": FP32_SUMS},
    "bf16": {"extra": BF16},
    "fp16": {"extra": FP16},
}
OF_ZERO_3 = ("default", "offload", "bf16")
ROUNDED = {"fp32 sums"}
"""Settings with which DeepSpeed adds gradients in bf16, and we add them in fp32."""


@SAMPLED
@quiet
@pytest.mark.parametrize(
    ("stage", "name"), [(stage, name) for stage in (1, 2, 3) for name in (OF_ZERO_3 if stage == 3 else SETTINGS)]
)
def test_uncompressed_training_is_deepspeed_to_the_bit(stage: int, name: str) -> None:
    """Two addends sum to the same bits in either order, so this holds for our own exchange too."""
    jobs = [muon(stage, one, accumulation=2, **SETTINGS[name]) for one in (None, NONE, RAW)]
    for plain, none, raw in run_forks(2, train, *jobs):
        assert none == plain
        assert raw == plain or name in ROUNDED


def train_and_save(rank: int, *jobs: Job) -> list[tuple[list[float], dict[str, list[float]]]]:
    """Return the losses and the state of the model after each job; the state waits for weights that are under way."""
    found = []
    for job, engine in engines(*jobs):
        losses = run(engine, data(rank, job))
        found.append((losses, {name: value.tolist() for name, value in engine.module.state_dict().items()}))
    return found


@SAMPLED
@quiet
@pytest.mark.parametrize("stage", [1, 2])
def test_overlapped_weights_change_no_bit(stage: int) -> None:
    jobs = [muon(stage, {**BOTH, "weights": {**BOTH["weights"], "overlap": one}}) for one in (False, True)]
    for waiting, overlapped in run_forks(2, train_and_save, *jobs):
        assert overlapped == waiting


MODELS = {
    "four owners": lambda: nn.Sequential(nn.Linear(12, 30, bias=False), nn.Tanh(), nn.Linear(30, 1)),
    "two owners of four ranks": lambda: nn.Sequential(nn.Linear(12, 3).requires_grad_(False), nn.Linear(3, 1)),
}
"""Models whose matrix has several owners; in the second one, it has fewer elements than ranks."""


def train_models(rank: int, stage: int) -> dict[str, list[dict[str, list[float]]]]:
    """Return the weights of every model without the package, uncompressed, and compressed."""
    found: dict[str, list[dict[str, list[float]]]] = {}
    for name, make in MODELS.items():
        for section in (None, RAW, BOTH):
            job = muon(stage, section)
            torch.manual_seed(0)
            model = make()
            engine = make_engine(
                model, job.config(), [parameter for parameter in model.parameters() if parameter.requires_grad]
            )
            run(engine, data(rank, job))
            found.setdefault(name, []).append(weights(engine))
            engine.destroy()
    return found


@SAMPLED
@quiet
@pytest.mark.parametrize("stage", [1, 2])
def test_matrices_of_several_owners_on_four_ranks(stage: int) -> None:
    """With more than two addends, sums may differ from DeepSpeed's in the last bits."""
    results = run_forks(4, train_models, stage)
    for name in MODELS:
        plain, raw, _ = results[0][name]
        assert all(result[name] == results[0][name] for result in results)
        for parameter, values in plain.items():
            assert raw[parameter] == pytest.approx(values, rel=1e-3, abs=1e-4)


def momenta(rank: int, *jobs: Job) -> list[dict[str, list[float]]]:
    """Return Muon's momentum of every matrix that this rank owns a part of, after each job."""
    found = []
    for job, engine in engines(*jobs):
        run(engine, data(rank, job))
        found.append({})
        optimizer = engine.optimizer
        for group, owned in zip(optimizer.optimizer.param_groups, optimizer.params_in_partition, strict=True):
            if group["use_muon"]:
                momentum = optimizer.optimizer.state[group["params"][0]]["momentum_buffer"]
                parts = torch.split(momentum, [parameter.numel() for parameter in owned])
                names = [engine.param_names[parameter] for parameter in owned]
                found[-1] |= {name: part.tolist() for name, part in zip(names, parts, strict=True)}
    return found


COMPRESSED: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "bf16": {"extra": BF16},
}


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2])
def test_owners_of_a_matrix_have_the_same_momentum(stage: int) -> None:
    jobs = [muon(stage, BOTH, accumulation=2, **settings) for settings in COMPRESSED.values()]
    for one, other in zip(*run_forks(2, momenta, *jobs), strict=True):
        common = one.keys() & other.keys()
        assert len(common) == 1
        assert all(one[name] == other[name] for name in common)


@quiet
def test_sums_in_fp32_differ_by_rounding() -> None:
    """Means are compared, since Newton-Schulz amplifies the rounding of directions that a gradient does not have."""
    jobs = [muon(2, section, steps=1, extra=FP32_SUMS) for section in (None, RAW)]
    for plain, raw in run_forks(2, momenta, *jobs):
        for name, values in plain.items():
            assert raw[name] == pytest.approx(values, rel=2**-7, abs=2**-9 * max(map(abs, values)))


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_skipped_step_leaves_no_trace(stage: int) -> None:
    section = {**INT4, "seed": 1}
    poisoned = muon(stage, section, steps=5, poison=(2, 1), accumulation=2)
    without = muon(stage, section, steps=5, skip=(2,), accumulation=2)
    for bad, good in run_forks(2, train, poisoned, without):
        assert bad.skipped == 1
        assert bad.parameters == good.parameters


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", ["default", "bf16", "offload"])
def test_resuming_is_bit_identical_to_going_on(name: str, stage: int, tmp_path: Path) -> None:
    jobs = {name: muon(stage, BOTH, steps=8, **SETTINGS[name])}
    continued = run_forks(2, save_and_continue_all, jobs, str(tmp_path))
    assert run_forks(2, resume_all, jobs, str(tmp_path)) == continued


@SAMPLED
@quiet
@pytest.mark.filterwarnings("ignore:.*on_missing_state:deepspeed_compress.CompressWarning")
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_files_are_those_of_deepspeed(stage: int, tmp_path: Path) -> None:
    """What one of the two saves, the other loads."""
    plain, ours = muon(stage, steps=8), muon(stage, {**RAW, "on_missing_state": "reset"}, steps=8)
    continued = run_forks(2, save_and_continue_all, {"plain": plain, "ours": ours}, str(tmp_path))
    assert run_forks(2, resume_all, {"plain": ours, "ours": plain}, str(tmp_path)) == continued


def test_another_number_of_ranks_is_refused(tmp_path: Path) -> None:
    run_forks(2, save_and_continue_all, {"job": muon(1, INT4, steps=5)}, str(tmp_path))
    with pytest.raises(RankError, match="Muon's momentum under ZeRO 1 and 2 has whole matrices"):
        run_forks(1, resume_all, {"job": muon(1, INT4)}, str(tmp_path))


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ranks_of_an_island_agree(stage: int, compiled: bool) -> None:
    """Matrices are exchanged within an island of two ranks."""
    islands = {"size": 2, "sync_every": 3, "exchange": {"bits": 4, "block_size": 32, "min_numel": 8}}
    job = muon(stage, {**INT4, "islands": islands}, steps=5)
    one, two, three, four = (found[0].parameters for found in run_forks(4, train, job, compiled=compiled))
    assert one == two
    assert three == four
    assert one != three


def balanced(rank: int) -> None:
    """Make an engine whose optimizer the configuration does not name."""
    # This import takes seconds, because DeepSpeed compiles functions of the module. The fork server has done it.
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    model = network()
    model[0].weight.use_muon = True
    groups = [{"params": [parameter], "use_muon": hasattr(parameter, "use_muon")} for parameter in model.parameters()]
    config = Job(1, {**INT4, "ownership": "balanced"}, extra={"zero_allow_untested_optimizer": True}).config()
    config.pop("optimizer")
    deepspeed_compress.initialize(model=model, optimizer=MuonWithAuxAdam(groups), config=config)


def test_balanced_ownership_is_refused_for_an_optimizer_that_the_program_made() -> None:
    with pytest.raises(RankError, match=r"ownership is \"balanced\", but Muon keeps"):
        run_forks(2, balanced)


def test_balanced_ownership_is_refused() -> None:
    config = muon(1, {**INT4, "ownership": "balanced"}).config()
    with pytest.raises(ConfigError, match=r'ownership: "balanced" cannot be combined with /optimizer/type: "Muon"'):
        deepspeed_compress.initialize(model=network(), config=config)


@pytest.mark.parametrize(
    ("version", "stage", "refused"), [("0.19.7", 1, True), ("0.19.7", 0, False), ("0.19.8", 3, False)]
)
def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str, stage: int, refused: bool) -> None:
    monkeypatch.setattr(deepspeed, "__version__", version)
    model = network()
    model[0].weight.use_muon = True
    assert (
        limits._divides_for_older_muon(SimpleNamespace(module=model, zero_optimization_stage=lambda: stage)) is refused
    )
