"""A receiver holds the bits of an engine's weights, whatever way its ranks share them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.nn.parallel import DistributedDataParallel

import deepspeed_compress
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.tools.run_directory import read_directory
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, network, start

VERSIONS = 4


def published_weights(engine: Any) -> dict[str, torch.Tensor]:
    """Return all weights in bf16, gathered by DeepSpeed or torch."""
    found = {}
    for name, parameter in engine.named_parameters():
        sharded = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(sharded):
            whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
            found[name.removeprefix("module.")] = whole.detach().to(torch.bfloat16).clone()
    return found


def follow(rank: int, trained: Any, steps: Any, path: Path, versions: int) -> int:
    """Publish and receive each of `versions`. Return the bytes that rank 0 has stored for changes."""
    publisher = Publisher(trained, DirectoryStore(path), full_every=versions // 2)
    module = network().to(torch.bfloat16)
    receiver, total = Receiver(module, DirectoryStore(path)), 0
    for _ in range(versions):
        published = publisher.publish()
        assert published is not None
        assert receiver.update()
        assert receiver.digest == published.digest
        total += published.change_bytes
        weights = published_weights(trained)
        for name, parameter in module.named_parameters():
            assert torch.equal(parameter.view(torch.int16), weights[name].view(torch.int16)), name
        next(steps)
        dist.barrier()
    return total


def engine_steps(engine: Any, batches: Any) -> Any:
    """Take an optimizer step for each of `batches`."""
    for x, y in batches:
        loss = (engine(x.to(next(engine.module.parameters()).dtype)).float() - y).square().mean()
        engine.backward(loss)
        engine.step()
        yield


def zero(rank: int, job: Job, path: Path) -> int:
    engine = start(job)
    return follow(rank, engine, engine_steps(engine, data(rank, job)), path, job.steps)


BF16 = {"bf16": {"enabled": True}}


def job(stage: int, steps: int, lr: float, extra: dict[str, Any]) -> Job:
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": lr, "torch_adam": True}}}
    return Job(stage=stage, steps=steps, extra={**extra, **optimizer})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero(stage: int, tmp_path: Path) -> None:
    run_forks(2, zero, job(stage, VERSIONS, 1e-3, BF16), tmp_path)


def test_zero_3_in_fp32_with_three_ranks(tmp_path: Path) -> None:
    run_forks(3, zero, job(3, VERSIONS, 1e-3, {}), tmp_path)


def test_zero_3_with_parameters_that_stay_gathered(tmp_path: Path) -> None:
    kept = {"stage3_param_persistence_threshold": 300}
    run_forks(2, zero, replace(job(3, VERSIONS, 1e-3, BF16), zero=kept), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_for_200_versions(stage: int, lr: float, tmp_path: Path) -> None:
    run_forks(2, zero, job(stage, 200, lr, BF16), tmp_path)


def torch_steps(model: nn.Module, rank: int, lr: float, versions: int) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for x, y in data(rank, Job(steps=versions)):
        (model(x).float() - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def ddp(rank: int, path: Path) -> int:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(network())
    return follow(rank, model, torch_steps(model, rank, 1e-3, VERSIONS), path, VERSIONS)


def test_ddp(tmp_path: Path) -> None:
    run_forks(2, ddp, tmp_path)


def fsdp2(rank: int, path: Path, sizes: tuple[int, ...], lr: float, versions: int) -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
    model, policy = network(), MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return follow(rank, model, torch_steps(model, rank, lr, versions), path, versions)


@pytest.mark.parametrize("sizes", [(2,), pytest.param((3,), marks=pytest.mark.slow), (2, 2)], ids=str)
def test_fsdp2(sizes: tuple[int, ...], tmp_path: Path) -> None:
    run_forks(torch.tensor(sizes).prod().item(), fsdp2, tmp_path, sizes, 1e-3, VERSIONS)


@pytest.mark.slow
@pytest.mark.parametrize("lr", [1e-6, 1e-5, 1e-4])
def test_fsdp2_for_200_versions(lr: float, tmp_path: Path) -> None:
    run_forks(2, fsdp2, tmp_path, (2,), lr, 200)


def columns(rank: int, path: Path) -> str:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)), shard_placement_fn=lambda _: Shard(1))
    with pytest.raises(UnsupportedError) as raised:
        Publisher(model, DirectoryStore(path)).publish()
    return str(raised.value)


def test_fsdp2_with_shards_of_columns_is_refused(tmp_path: Path) -> None:
    assert all("only Shard(0)" in text for text in run_forks(2, columns, tmp_path))


def by_section(rank: int, path: Path, extra: dict[str, Any], poison: tuple[int, int] | None) -> int | None:
    """Train with the section, and check the newest version at the end of each step."""
    section = {"gradients": {"method": "none"}, **extra}
    section["rollout"] = {"directory": str(path), **extra.get("rollout", {})}
    section["monitor"] = {"path": str(path.with_name("monitor"))}
    engine = start(Job(stage=2, steps=VERSIONS, section=section, extra=BF16, poison=poison))
    module = network().to(torch.bfloat16)
    receiver = Receiver(module, DirectoryStore(path))
    for _ in engine_steps(engine, data(rank, Job(steps=VERSIONS, poison=poison))):
        engine.rollout.report_lag(1.0)
        engine.rollout.wait()
        dist.barrier()
        receiver.update()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, published_weights(engine)[name]), name
    deepspeed_compress.detach(engine)
    assert "rollout" not in vars(engine)
    if rank == 0:
        check_figures(read_directory(path.with_name("monitor")).versions, receiver.version)
    return receiver.version


def check_figures(lines: Any, newest: int | None) -> None:
    """Check the recorded figures of the versions 1 to `newest`."""
    assert [line["rollout_version"] for line in lines] == list(range(1, 1 + (newest or 0)))
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    assert [bool(line["rollout_full_bytes"]) for line in lines] == [True] + [False] * (len(lines) - 1)
    assert [line["rollout_age_ms"] is None for line in lines] == [True] + [False] * (len(lines) - 1)
    assert lines[0]["rollout_lag"] is None
    assert lines[-1]["rollout_lag"] == 1.0
    for line in lines:
        assert 0 < line["rollout_encode_ms"] <= line["rollout_publish_ms"] <= (line["rollout_age_ms"] or 1e9)
        assert 0 < line["rollout_write_ms"] <= line["rollout_publish_ms"]
        assert 0 < line["rollout_changed"] <= 1
        assert line["rollout_bytes"] > 0


@pytest.mark.parametrize(
    ("extra", "poison", "version"),
    [
        ({}, None, 1 + VERSIONS),
        pytest.param({"rollout": {"asynchronous": False, "every": 2}}, None, 3, marks=pytest.mark.slow),
        ({}, (1, 0), VERSIONS),
        ({"weights": {"bits": 4, "block_size": 32}}, None, 1 + VERSIONS),
    ],
    ids=["asynchronous", "every", "skipped step", "compressed weights"],
)
def test_an_engine_publishes_by_its_section(
    extra: dict[str, Any], poison: tuple[int, int] | None, version: int, tmp_path: Path
) -> None:
    """The first version has the initial weights. A step that is skipped makes no version."""
    assert run_forks(2, by_section, tmp_path / "store", extra, poison) == [version] * 2


def tensor_parallel(rank: int, path: Path) -> str:
    dist.init_process_group("gloo")
    engine = start(Job())
    engine.seq_data_parallel_group = dist.new_group([rank], use_local_synchronization=True)
    with pytest.raises(UnsupportedError) as raised:
        Publisher(engine, DirectoryStore(path))
    return str(raised.value)


def test_an_engine_whose_ranks_hold_different_models_is_refused(tmp_path: Path) -> None:
    assert all(
        "only if the data-parallel group has all ranks" in text for text in run_forks(2, tensor_parallel, tmp_path)
    )
