"""Unmodified FSDP2 programs: `fully_shard` alone, and with Accelerate."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import deepspeed_compress
from tests.integrations.trainers import train_with_accelerate
from tests.support.forks import run_forks
from tests.support.methods import NONE
from tests.support.sharded import WEIGHTS, Setting
from tests.support.two_branches import FOUR_BITS, Branches, loss_of, refusal, section, start, take_steps

SAMPLED = pytest.mark.sampled(4)

STEPS = 5
BOTH_DIRECTIONS = {**FOUR_BITS, "weights": WEIGHTS["weights"]}


def values(model: nn.Module) -> list[list[float]]:
    """Return this rank's shards."""
    local: list[Any] = [parameter.detach() for parameter in model.parameters()]
    return [one.to_local().flatten().tolist() for one in local]


def train(model: Any, optimizer: Any, rank: int) -> list[list[float]]:
    """Evaluate once, then train."""
    with torch.no_grad():
        loss_of(model, rank, 1000)
    take_steps(model, optimizer, rank, range(STEPS))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return values(model)


def variants(rank: int, settings: dict[str, Any], mesh: tuple[int, ...]) -> list[Any]:
    """Return the weights of the script alone, with `install`, alone again, and with `attach`."""
    found = [train(*Setting(None, mesh).build()[:2], rank)]
    uninstall = deepspeed_compress.install(section(settings))
    found.append(train(*Setting(None, mesh).build()[:2], rank))
    uninstall()
    return [*found, *(train(*Setting(one, mesh).build()[:2], rank) for one in (None, settings))]


@SAMPLED
@pytest.mark.parametrize(
    ("settings", "mesh"),
    [(FOUR_BITS, ()), (NONE, ()), (BOTH_DIRECTIONS, ()), (FOUR_BITS, (2, 2))],
    ids=["four_bits", "none", "both_directions", "hsdp"],
)
def test_install_gives_the_same_bits_as_attach(settings: dict[str, Any], mesh: tuple[int, ...]) -> None:
    for alone, installed, again, attached in run_forks(4 if mesh else 2, variants, settings, mesh):
        assert installed == attached
        assert again == alone
        assert (installed == alone) == (settings == NONE)


def error_with(rank: int, case: str) -> str:
    """Return the error of a forward pass; "" if there is none."""
    start()
    deepspeed_compress.install(section(FOUR_BITS))
    model = Branches()
    for part in (model.left, model.right):
        fully_shard(part)
    if case != "no root module":
        fully_shard(model)
    count = {"no optimizer": 0, "two optimizers": 2}.get(case, 1)
    living = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(count)]
    assert len(living) == count
    return refusal(lambda: loss_of(model, rank, 0).backward())


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("no root module", "one optimizer steps 2 separate fully_shard modules"),
        ("no optimizer", "a fully_shard model cannot be compressed automatically: 0 optimizers"),
        ("two optimizers", "2 optimizers step its parameters"),
    ],
)
def test_a_model_needs_one_root_module_and_one_optimizer(case: str, message: str) -> None:
    assert all(message in error for error in run_forks(2, error_with, case))


def with_a_teacher(rank: int) -> tuple[bool, bool, bool]:
    """Return whether each is compressed: a frozen sharded model, a trained sharded model, and a DDP model."""
    start()
    deepspeed_compress.install(section(FOUR_BITS))
    teacher, student, other = Branches().requires_grad_(False), Branches(), Branches()
    for model in (teacher, student):
        fully_shard(model)
    ddp = nn.parallel.DistributedDataParallel(other)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (student, other)]
    loss = loss_of(teacher, rank, 0) + loss_of(student, rank, 0)
    loss.backward()
    loss_of(ddp, rank, 0).backward()
    for optimizer in optimizers:
        optimizer.step()
    return tuple(hasattr(one, "compression") for one in (teacher, student, ddp))  # type: ignore[return-value]


def test_only_trained_models_are_compressed() -> None:
    assert run_forks(2, with_a_teacher) == [(False, True, True)] * 2


def with_accelerate(rank: int, directory: str, resumed: bool) -> list[list[float]]:
    """Train eight steps and save after four, or, if `resumed`, train the last four."""
    deepspeed_compress.install(section(FOUR_BITS))
    # Accelerate supports FSDP only on accelerators, so pretend that there is one.
    PartialState(cpu=True).distributed_type = DistributedType.MULTI_XPU
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_XPU
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="transformer_based_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = train_with_accelerate(accelerator, directory, resumed)
    assert isinstance(model, FSDPModule)
    model.reshard()
    return values(model)


def test_accelerate_saves_and_loads_residuals(tmp_path: Path) -> None:
    whole = run_forks(2, with_accelerate, str(tmp_path), False)
    assert len(list(tmp_path.glob("deepspeed_compress/model_*/*.safetensors"))) == 2
    assert run_forks(2, with_accelerate, str(tmp_path), True) == whole
    shutil.rmtree(tmp_path / "deepspeed_compress")
    with pytest.raises(Exception, match="does not exist"):
        run_forks(2, with_accelerate, str(tmp_path), True)
