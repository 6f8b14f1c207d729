"""Unmodified programs without DeepSpeed: PyTorch's DDP, Accelerate and Trainer."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

import deepspeed_compress
from deepspeed_compress import ConfigError
from deepspeed_compress.config import SECTION
from tests.integrations.trainers import (
    SAVING,
    Job,
    forget_accelerate,
    keep_checkpoint,
    statistics_lines,
    train_with_accelerate,
    trainer_of,
)
from tests.support.forks import run_forks
from tests.support.methods import NONE
from tests.support.processes import run_command
from tests.support.two_branches import FOUR_BITS, Branches, Setting, loss_of, refusal, section, start, take_steps

STEPS = 6


def values(model: torch.nn.Module) -> list[list[float]]:
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def program(rank: int, steps: int = STEPS) -> list[list[float]]:
    """Evaluate once, then train, as a script would."""
    model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with torch.no_grad():
        loss_of(model, rank, 1000)
    return take_steps(model, optimizer, rank, range(steps))


def variants(rank: int, settings: dict[str, Any]) -> list[Any]:
    """Return the weights of the script alone, with `install`, alone again, and with `attach`."""
    start()
    alone = program(rank)
    uninstall = deepspeed_compress.install(section(settings))
    installed = program(rank)
    uninstall()
    again = program(rank)
    model, optimizer, _ = Setting(settings).build()
    return [alone, installed, again, take_steps(model, optimizer, rank, range(STEPS))]


@pytest.mark.parametrize("settings", [FOUR_BITS, NONE], ids=["four_bits", "none"])
def test_install_gives_the_same_bits_as_attach(settings: dict[str, Any]) -> None:
    for alone, installed, again, attached in run_forks(2, variants, settings):
        assert installed == attached
        assert again == alone
        assert (installed == alone) == (settings == NONE)


def test_a_second_section_is_refused() -> None:
    uninstall = deepspeed_compress.install(section(FOUR_BITS))
    try:
        with pytest.raises(ConfigError, match="has a section already"):
            deepspeed_compress.install(section(NONE))
    finally:
        uninstall()
    deepspeed_compress.install(section(NONE))()


def error_with(rank: int, optimizers: int, scalers: int) -> str:
    """Return the error of a forward pass with so many optimizers and enabled scalers; "" if there is none."""
    start()
    deepspeed_compress.install(section(FOUR_BITS))
    model = DistributedDataParallel(Branches())
    kept: list[Any] = [torch.optim.SGD(model.parameters(), lr=0.1) for _ in range(optimizers)]
    kept += [torch.amp.GradScaler("cpu", enabled=number < scalers) for number in range(3)]
    return refusal(lambda: loss_of(model, rank, 0).backward())


def test_a_model_needs_exactly_one_optimizer_and_at_most_one_scaler() -> None:
    assert "0 optimizers step its parameters" in run_forks(2, error_with, 0, 0)[1]
    assert "2 optimizers step its parameters" in run_forks(2, error_with, 2, 0)[1]
    assert "2 gradient scalers" in run_forks(2, error_with, 1, 2)[0]
    assert run_forks(2, error_with, 1, 1) == ["", ""]


def with_accelerate(rank: int, directory: str, resumed: bool) -> list[list[float]]:
    """Train eight steps and save after four, or, if `resumed`, train the last four."""
    deepspeed_compress.install(section(FOUR_BITS))
    accelerator = Accelerator(cpu=True)
    model = train_with_accelerate(accelerator, directory, resumed)
    assert isinstance(model, DistributedDataParallel)
    return values(model)


def test_accelerate_saves_and_loads_residuals(tmp_path: Path) -> None:
    whole = run_forks(2, with_accelerate, str(tmp_path), False)
    assert len(list(tmp_path.glob("deepspeed_compress/model_0/*.safetensors"))) == 2
    assert run_forks(2, with_accelerate, str(tmp_path), True) == whole


def with_trainer(rank: int, job: Job) -> list[Any]:
    """Return the parameters, the losses, and whether the model is compressed."""
    if job.section is not None:
        deepspeed_compress.install({SECTION: dict(job.section)})
    trainer = trainer_of(replace(job, args={**job.args, "deepspeed": None}))
    trainer.train(resume_from_checkpoint=job.resume or None)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    found = [values(trainer.model_wrapped), losses, hasattr(trainer.model_wrapped, "compression")]
    forget_accelerate()
    return found


def test_trainer_saves_and_loads_residuals(tmp_path: Path) -> None:
    job = Job(str(tmp_path), section=FOUR_BITS, args={**SAVING, "max_steps": 6})
    whole = run_forks(2, with_trainer, job)
    assert all(compressed for _, _, compressed in whole)
    keep_checkpoint(job.directory, 2)
    assert run_forks(2, with_trainer, replace(job, resume=True)) == whole
    alone = run_forks(2, with_trainer, replace(job, directory=str(tmp_path / "alone"), section=None))
    assert alone[0][0] != whole[0][0]


def fold(accelerator: Accelerator, network: torch.nn.Module, directory: Path, load: bool) -> int:
    """Train three steps, and return the number of steps that compression has counted."""
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05)
    model, optimizer = accelerator.prepare(network, optimizer)
    if load:
        accelerator.load_state(directory)
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, accelerator.process_index, step).backward()
        optimizer.step()
    accelerator.save_state(directory)
    steps: int = model.compression.steps.count
    accelerator.free_memory()
    return steps


def folds(rank: int, directory: str, loads: list[bool], same: bool) -> list[int]:
    deepspeed_compress.install(section(FOUR_BITS))
    accelerator, network = Accelerator(cpu=True), Branches()
    return [
        fold(accelerator, network if same else Branches(), Path(directory), load) for number, load in enumerate(loads)
    ]


@pytest.mark.parametrize("same", [False, True], ids=["new", "same"])
def test_each_fold_loads_only_the_state_that_it_asks_for(same: bool, tmp_path: Path) -> None:
    """Each fold of a cross-validation has its own model, or wraps the same one again."""
    assert run_forks(2, folds, str(tmp_path), [False, True, False, True], same) == [[3, 6, 3, 6]] * 2
    assert [folder.name for folder in (tmp_path / "deepspeed_compress").iterdir()] == ["model_0"]


def compiled(rank: int) -> list[list[list[float]]]:
    """Return the weights of a compiled DistributedDataParallel model without, with and again without `install`."""
    start()
    found = []
    for settings in (None, FOUR_BITS, None):
        undo = (lambda: None) if settings is None else deepspeed_compress.install(section(settings))
        model = DistributedDataParallel(torch.nn.Linear(12, 3))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.25)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        whole = torch.compile(model, backend="eager")
        for step in range(3):
            optimizer.zero_grad()
            whole(
                torch.randn(4, 12, generator=torch.Generator().manual_seed(10 * step + rank))
            ).square().sum().backward()
            optimizer.step()
        assert hasattr(model, "compression") == (settings is not None)
        found.append(values(model))
        undo()
    return found


def test_a_compiled_model_is_compressed() -> None:
    for alone, installed, again in run_forks(2, compiled, compiled=True):
        assert alone == again != installed


def copied(rank: int) -> list[bool]:
    """Return whether a model and two copies are compressed, and the copies after they were trained."""
    start()
    deepspeed_compress.install(section(FOUR_BITS))
    model = DistributedDataParallel(Branches())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    copies = [copy.deepcopy(model)]
    loss_of(model, rank, 0).backward()
    optimizer.step()
    copies.append(copy.deepcopy(model))
    loss_of(copies[0], rank, 0)
    found = [hasattr(one, "compression") for one in (model, *copies)]
    for one in copies:
        stepping = torch.optim.SGD(one.parameters(), lr=0.05)
        loss_of(one, rank, 1).backward()
        stepping.step()
    return found + [hasattr(one, "compression") for one in copies]


def test_copies_of_a_model_are_left_alone() -> None:
    assert run_forks(2, copied) == [[True, False, False, False, False]] * 2


SCRIPT = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
WRAP
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 64)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
"""
WRAPS = {
    "ddp": "model = torch.nn.parallel.DistributedDataParallel(model)",
    "fsdp2": "for one in (*model, model): fully_shard(one, mesh=dist.device_mesh.init_device_mesh('cpu', (2,)))",
}


@pytest.mark.slow
@pytest.mark.parametrize("engine", WRAPS)
def test_ds_compress_run_compresses_a_script(engine: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT.replace("WRAP", WRAPS[engine]))
    written = {SECTION: {"gradients": {"bits": 4}, "monitor": {"path": str(tmp_path)}}}
    (tmp_path / "compress.json").write_text(json.dumps(written))
    command = ["run", "--launcher", "torchrun", "--section", str(tmp_path / "compress.json"), "--standalone"]
    done = run_command(*command, "--nproc_per_node", "2", str(tmp_path / "train.py"))
    assert done.returncode == 0, done.stderr
    steps = [json.loads(line) for line in statistics_lines(str(tmp_path))]
    assert len(steps) == 3
    assert all(step["bytes_uncompressed"] > 7 * step["bytes_sent"] for step in steps)


@pytest.mark.slow
def test_ds_compress_run_refuses_an_invalid_section(tmp_path: Path) -> None:
    (tmp_path / "compress.json").write_text('{"deepspeed_compress": {"gradients": {"bits": 5}}}')
    command = ["run", "--section", str(tmp_path / "compress.json"), "train.py"]
    done = run_command(*command)
    assert done.returncode == 1
    assert "/deepspeed_compress/gradients" in done.stderr
