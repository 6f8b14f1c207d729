"""Hybrid sharding: ZeRO within nodes of two ranks, and the mean of gradient shards over two nodes."""

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param

import deepspeed_compress
from deepspeed_compress.backends.deepspeed.division import divide_call
from deepspeed_compress.backends.deepspeed.units import NodeUnit
from deepspeed_compress.config import SECTION
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import ConfigError, SeamError, UnsupportedError
from tests.support.forks import run_forks
from tests.support.jobs import (
    BATCH,
    Job,
    data,
    figures_of,
    largest_difference,
    make_engine,
    network,
    run,
    start,
    train,
    weights,
)
from tests.support.methods import BF16, FP16, FP32_SUMS
from tests.support.resuming import resume, save_and_continue
from tests.support.tensor_islands import AUTO_TP, start_tensor, take_steps

SAMPLED = pytest.mark.sampled(6)

NODES: Mapping[str, Any] = {"shard_within": 2}
UNCOMPRESSED: Mapping[str, Any] = {"gradients": {"method": "none"}, "parallelism": NODES}
INT4: Mapping[str, Any] = {"gradients": {"bits": 4, "block_size": 32, "min_numel": 0}, "parallelism": NODES}


@pytest.mark.case_a_stage
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_uncompressed_equals_data_parallelism(stage: int) -> None:
    """Sums are added in another order, so the last bits differ."""
    jobs = [Job(stage, accumulation=accumulation, steps=5) for accumulation in (1, 2)]
    jobs.append(Job(stage, extra=BF16 if stage == 1 else FP32_SUMS, steps=3))
    divided = [replace(job, section=UNCOMPRESSED) for job in jobs]
    for found in run_forks(4, train, *jobs, *divided):
        for whole, nodes, tolerance in zip(found[:3], found[3:], (1e-5, 1e-5, 2e-2), strict=True):
            assert nodes.losses == pytest.approx(whole.losses, rel=tolerance)
            assert largest_difference(nodes.parameters, whole.parameters) < tolerance


def train_from_unequal_weights(rank: int, job: Job) -> dict[str, list[float]]:
    """Train a model, one layer of which is frozen, that begins with other weights in each node."""
    model = network(seed=1 + rank // 2)
    model[2].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = make_engine(model, job.config(), trained)
    run(engine, data(rank, job))
    return weights(engine)


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_all_nodes_begin_with_the_weights_of_the_first(stage: int) -> None:
    found = run_forks(4, train_from_unequal_weights, Job(stage, section=INT4))
    assert all(one == found[0] for one in found)
    first = network(seed=1)[2].weight.flatten().tolist()
    assert found[3]["2.weight"] == first


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_four_bits_on_all_ranks_alike(stage: int) -> None:
    """Every rank ends with the same weights, near those of uncompressed training, also after accumulation."""
    job = Job(stage, section=INT4, steps=6, accumulation=2)
    found = run_forks(4, train, job, replace(job, section=UNCOMPRESSED))
    assert all(compressed.parameters == found[0][0].parameters for compressed, _ in found)
    assert 0 < largest_difference(found[0][0].parameters, found[0][1].parameters) < 0.1


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_sends_its_share_once_a_step(stage: int) -> None:
    """With accumulation too, and no weights."""
    numel = sum(parameter.numel() for parameter in network().parameters())
    monitor = {"every": 1}
    job = Job(stage, section={**INT4, "monitor": monitor}, accumulation=3, steps=3)
    sizes = ("bytes_sent", "bytes_weights", "bytes_uncompressed")
    uncompressed = replace(job, section={**UNCOMPRESSED, "monitor": monitor})
    ours, exact = (run_forks(4, figures_of, one, *sizes) for one in (job, uncompressed))
    for compressed, plain in zip(ours, exact, strict=True):
        for (sent, weights_sent, alone), (whole, _, same) in zip(compressed, plain, strict=True):
            # A share of the model, twice half of it; shards are padded at most by a few elements.
            assert whole == same == pytest.approx(4 * numel / 2, rel=0.05)
            assert alone == pytest.approx(whole, rel=0.05)
            assert weights_sent == 0
            assert sent < 0.3 * whole


def overflow(rank: int, stage: int) -> list[tuple[float, int, dict[str, list[float]]]]:
    """Return loss scale, skipped steps and weights after each step; one gradient of the last rank is infinite."""
    job, seen = Job(stage, section=INT4, extra=FP16, steps=6), []
    engine = start(job)
    for step, (x, y) in enumerate(data(rank, job)):
        run(engine, [(x * 3e4 if (step, rank) == (3, 3) else x, y)])
        scale = engine.optimizer.cur_scale if hasattr(engine.optimizer, "cur_scale") else engine.optimizer.loss_scale
        seen.append((float(scale), engine.skipped_steps, weights(engine)))
    return seen


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_in_one_node_is_skipped_by_all(stage: int) -> None:
    found = run_forks(4, overflow, stage)
    assert all(one == found[0] for one in found)
    assert [skipped for _, skipped, _ in found[0]] == [0, 0, 0, 1, 1, 1]
    assert found[0][3][2] == found[0][2][2]


def test_a_skipped_step_leaves_no_trace() -> None:
    job = Job(2, section={**INT4, "seed": 1}, steps=5)
    for bad, good in run_forks(4, train, replace(job, poison=(2, 3)), replace(job, skip=(2,))):
        assert (bad.skipped, bad.parameters) == (1, good.parameters)


@SAMPLED
@pytest.mark.parametrize("background", [{}, {"checkpointing": {}}], ids=["at once", "in the background"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_resume_is_exact_and_files_are_written_once(stage: int, background: Mapping[str, Any], tmp_path: Path) -> None:
    job = Job(stage, section={**INT4, **background}, steps=6)
    saved = run_forks(4, save_and_continue, job, str(tmp_path), 3)
    assert run_forks(4, resume, job, str(tmp_path), 3) == saved
    names = sorted(os.listdir(tmp_path / "global_step3"))
    assert len([name for name in names if name.endswith("optim_states.pt")]) == 2
    assert len([name for name in names if name.startswith("deepspeed_compress_rank") and name.endswith("json")]) == 4


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
def test_checkpoints_at_other_sizes(stage: int, tmp_path: Path) -> None:
    """DeepSpeed alone loads what two ranks share; six ranks in three nodes, and four without nodes, go on too."""
    job = Job(stage, section=INT4, steps=6)
    run_forks(4, save_and_continue, job, str(tmp_path), 3)
    alone = run_forks(2, resume, replace(job, section=None), str(tmp_path), job.steps)
    assert alone[0] == alone[1]
    more = run_forks(6, resume, job, str(tmp_path), 3)
    assert all(found == more[0][0] for found, _ in more)
    reset = {"gradients": INT4["gradients"], "on_missing_state": "reset"}
    whole = run_forks(4, resume, replace(job, section=reset), str(tmp_path), 3)
    assert all(found == whole[0][0] for found, _ in whole)
    assert largest_difference(whole[0][0], more[0][0]) < 0.1


def train_tensor(rank: int, *jobs: Job) -> list[tuple[list[float], dict[str, list[float]]]]:
    """Train models whose layers two ranks share, and return losses and weights."""
    found = []
    for job in jobs:
        engine = start_tensor(job)
        found.append((take_steps(engine, rank, job), weights(engine)))
        engine.destroy()
    return found


@SAMPLED
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_nodes_of_two_shards_whose_layers_two_ranks_share(stage: int) -> None:
    """Two nodes of four ranks: uncompressed as without nodes, and equal on all nodes with four bits."""
    job = Job(stage, extra={**AUTO_TP, "gradient_clipping": 1.0}, steps=3)
    jobs = (job, replace(job, section=UNCOMPRESSED), replace(job, section=INT4))
    found = run_forks(8, train_tensor, *jobs, timeout=600)
    for whole, nodes, _ in found:
        assert nodes[0] == pytest.approx(whole[0], rel=1e-5)
        assert largest_difference(nodes[1], whole[1]) < 1e-4
    assert [found[rank][2][1] for rank in range(4)] == [found[rank][2][1] for rank in range(4, 8)]


def attach_afterwards(rank: int, job: Job) -> None:
    engine = deepspeed.initialize(model=network(), config=job.config())[0]
    with pytest.raises(ConfigError, match="shard_within divides ranks before an engine is made"):
        deepspeed_compress.attach(engine)


def detach(rank: int, job: Job) -> None:
    with pytest.raises(UnsupportedError, match="cannot be detached"):
        deepspeed_compress.detach(start(job))


def made_in_init(rank: int, job: Job) -> None:
    deepspeed.init_distributed("gloo")
    with deepspeed.zero.Init(config_dict_or_path={key: job.config()[key] for key in job.config() if key != SECTION}):
        model = network()
    with pytest.raises(UnsupportedError, match="divided the parameters over other ranks"):
        make_engine(model, job.config())


def train_from_init(rank: int, job: Job) -> dict[str, list[float]]:
    """Train a model that `zero.Init` has sharded over the ranks of this node."""
    deepspeed.init_distributed("gloo")
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    file = {key: value for key, value in job.config().items() if key != SECTION}
    with deepspeed.zero.Init(config_dict_or_path=file, data_parallel_group=nodes[rank // 2]):
        model = network()
    engine = make_engine(model, job.config())
    run(engine, data(rank, job))
    return weights(engine)


def test_a_model_may_be_sharded_within_nodes_from_the_start() -> None:
    found = run_forks(4, train_from_init, Job(3, section=INT4))
    assert found == [run_forks(4, train, Job(3, section=INT4))[0][0].parameters] * 4


def whole_gradients(rank: int, job: Job) -> None:
    with pytest.raises(UnsupportedError, match="BF16_Optimizer clips whole gradients"):
        start(replace(job, extra=FP32_SUMS))


def changed_seam(rank: int, job: Job) -> None:
    with (
        patch.object(DeepSpeedZeroOptimizer, "update_lp_params", lambda self, more: None),
        pytest.raises(SeamError, match="update_lp_params takes"),
    ):
        start(job)


REFUSED = (
    (attach_afterwards, 1),
    (whole_gradients, 1),
    (changed_seam, 1),
    (detach, 2),
    (made_in_init, 3),
)


def test_refusals_of_engines() -> None:
    for work, stage in REFUSED:
        run_forks(4, work, Job(stage, section=INT4))


@pytest.mark.parametrize(
    ("section", "file", "pointer"),
    [
        ({"islands": {"size": 2, "sync_every": 4}}, {}, "/deepspeed_compress/islands"),
        ({"weights": {"bits": 8}}, {}, "/deepspeed_compress/weights/method"),
        ({"gradients": {"hierarchy": {"ranks_per_node": 2}}}, {}, "/deepspeed_compress/gradients/hierarchy"),
        ({"gradients": {"method": "powersgd"}}, {}, "/deepspeed_compress/gradients/method"),
        ({"gradients": {"method": "dgc", "clip_norm": 1.0}}, {}, "/deepspeed_compress/gradients/clip_norm"),
        (
            {"checkpointing": {"directory": "saved", "memory": {"every": 5}}},
            {},
            "/deepspeed_compress/checkpointing/memory",
        ),
        ({"ownership": "balanced"}, {}, "/deepspeed_compress/ownership"),
        ({"parallelism": {**NODES, "pipeline": 2}}, {}, "/deepspeed_compress/parallelism/pipeline"),
        ({}, {"stage": 0}, "/deepspeed_compress/parallelism/shard_within"),
        ({}, {"offload_optimizer": {"device": "nvme"}}, "/zero_optimization/offload_optimizer/device"),
        ({}, {"stage": 3, "offload_param": {"device": "nvme"}}, "/zero_optimization/offload_param/device"),
        ({"parallelism": {"shard_within": 3}}, {}, "/deepspeed_compress/parallelism/shard_within"),
        ({"parallelism": {"shard_within": "host"}}, {}, "/deepspeed_compress/parallelism/shard_within"),
        ({"gradients": {"method": "none"}}, {"zenflow": {}}, "/zero_optimization/zenflow"),
    ],
)
def test_contradictions(section: Mapping[str, Any], file: Mapping[str, Any], pointer: str) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 1, **file},
        SECTION: {"parallelism": NODES, **section},
    }
    found = find_problems(json.loads(json.dumps(config)), world_size=4)
    assert [problem.pointer for problem in found] == [pointer]


@pytest.mark.parametrize(
    ("call", "config"),
    [
        ({"mpu": SimpleNamespace()}, {}),
        ({"mesh_param": (2, 2)}, {}),
        ({}, {"sequence_parallel_size": 2, "data_parallel_size": 2}),
    ],
)
def test_another_division_of_the_ranks_is_refused(call: dict[str, Any], config: dict[str, Any]) -> None:
    unit = NodeUnit((0, 1), 0, 2, 1, *([None] * 5))
    with pytest.raises(UnsupportedError, match="shard_within divides the ranks itself"):
        divide_call(unit, call, config)


def shares(rank: int, job: Job) -> tuple[list[int], list[int]]:
    """Return the indices that this rank reads of a dataset of 24 samples, and batch sizes before and after a change."""
    config = {**job.config(), "train_batch_size": 24}
    engine, _, loader, _ = deepspeed_compress.initialize(
        model=network(), training_data=torch.utils.data.TensorDataset(torch.arange(24)), config=config
    )
    read = sorted(loader.data_sampler)
    sizes = [engine.train_batch_size(), engine.gradient_accumulation_steps()]
    engine.set_train_batch_size(48)
    return read, [*sizes, engine.train_batch_size(), engine.gradient_accumulation_steps()]


def test_data_and_batches_are_those_of_the_job() -> None:
    found = run_forks(4, shares, Job(1, section=UNCOMPRESSED, accumulation=2))
    assert sorted(index for read, _ in found for index in read) == list(range(24))
    assert [sizes for _, sizes in found] == [[24, 2, 48, 4]] * 4


def sharing_ranks(rank: int, job: Job) -> list[int]:
    """Return what the engine answers to a program that divides its own data, and to DeepSpeed's timer."""
    engine = start(job)
    group = engine.data_parallel_group
    return [dist.get_rank(group), dist.get_world_size(group), engine.dp_world_size, engine.tput_timer.batch_size]


def test_an_engine_names_all_ranks_that_share_the_data() -> None:
    found = run_forks(4, sharing_ranks, Job(1, section=UNCOMPRESSED))
    assert found == [[rank, 4, 4, 4 * BATCH] for rank in range(4)]


def saved_on_hosts(rank: int, job: Job, directory: Path) -> list[str]:
    """Save on two emulated hosts, each with its own directory, resume from there, and return the names of the files."""
    os.environ.update(LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2")
    host = directory / f"host-{rank // 2}"
    engine = start(job)
    run(engine, data(rank, job)[:2])
    engine.save_checkpoint(str(host), tag="saved")
    run(engine, data(rank, job)[2:])
    expected = weights(engine)
    engine.destroy()
    engine = start(job)
    assert engine.load_checkpoint(str(host), tag="saved")[0] is not None
    run(engine, data(rank, job)[2:])
    assert weights(engine) == expected
    return sorted(one.name for one in (host / "saved").glob("*_states.pt"))


@pytest.mark.parametrize("stage", [1, 3])
def test_each_host_saves_what_its_ranks_load(stage: int, tmp_path: Path) -> None:
    local = {"checkpoint": {"use_node_local_storage": True}}
    found = run_forks(4, saved_on_hosts, Job(stage, section=INT4, extra=local), tmp_path)
    assert len(found[0]) == (4 if stage == 3 else 3)
    assert found == [found[0]] * 4


def set_masters(rank: int, *jobs: Job) -> list[dict[str, list[float]]]:
    """Return the weights of runs in which the program halves all master weights after the second step."""
    found = []
    for job in jobs:
        engine, batches = start(job), data(rank, job)
        run(engine, batches[:2])
        for parameter in engine.module.parameters():
            safe_set_full_fp32_param(parameter, parameter.detach().float() / 2)
        run(engine, batches[2:])
        found.append(weights(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 2])
def test_master_weights_that_a_program_sets_are_those_of_the_whole_job(stage: int) -> None:
    for whole, nodes in run_forks(4, set_masters, Job(stage), Job(stage, section=UNCOMPRESSED)):
        assert largest_difference(nodes, whole) < 1e-5


def read_masters(rank: int, job: Job) -> list[str]:
    """Return the names of parameters for which DeepSpeed returns other master weights than its own."""
    named = start(job).module.named_parameters()
    return [name for name, parameter in named if not torch.equal(safe_get_full_fp32_param(parameter), parameter)]


def test_deepspeed_alone_reads_other_master_weights_with_round_robin_gradients() -> None:
    """If this fails, DeepSpeed has been repaired: take the limit out of docs/hybrid.md."""
    assert run_forks(2, read_masters, Job(1, zero={"round_robin_gradients": True}))[0]
    assert not run_forks(2, read_masters, Job(1))[0]
