"""If `initialize` refuses or fails, the process is as before, so that later engines are DeepSpeed's own."""

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero import partition_parameters, stage_1_and_2
from deepspeed.utils import groups

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.local_sgd.coordinator.client import status
from tests.support.coordinators import become_island, coordinator, own_ports
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, make_engine, network, run, weights
from tests.support.messages import refusal

SAMPLED = pytest.mark.sampled(4)

PACKAGE = "deepspeed_compress."
ENGINE = PACKAGE + "backends.deepspeed."
STEPS = (
    "backends.deepspeed.initialize.divide_call",
    "backends.deepspeed.division._tensor_group",
    "backends.deepspeed.division._check_tensor",
    "backends.deepspeed.initialize.keep_file_order",
    "backends.deepspeed.initialize.attach_section",
    "backends.deepspeed.checks.check_ownership",
    "backends.deepspeed.attach.find_parameters",
    "backends.deepspeed.attach.Session",
    "backends.deepspeed.attach.follow_losses",
    "backends.deepspeed.attach._replace_collectives",
    "backends.deepspeed.attach.attach_participants",
    "backends.deepspeed.attach.attach_islands",
    "local_sgd.deepspeed.divided.copy_weights",
    "local_sgd.deepspeed.divided.FixedExchange",
    "backends.deepspeed.attach.OptimizerStep",
    "backends.deepspeed.attach.attach_heartbeat",
    "backends.deepspeed.attach.announce",
    "backends.deepspeed.initialize.resume_newest",
    "backends.deepspeed.initialize._with_data",
)
DEEPSPEED = (
    "deepspeed.runtime.engine.DeepSpeedEngine._configure_zero_optimizer",
    "deepspeed.runtime.engine.DeepSpeedEngine._configure_distributed_model",
    "deepspeed.runtime.engine.DeepSpeedEngine._configure_lr_scheduler",
)
ISLANDS: Mapping[str, Any] = {
    "gradients": {"method": "none"},
    "guard": {},
    "islands": {"size": 1, "sync_every": 2},
    "monitor": {"announce": False},
}
BALANCED: Mapping[str, Any] = {"weights": {}, "ownership": "balanced", "monitor": {"announce": False}}


class InjectedError(Exception):
    """Error raised instead of a step of `initialize`."""


def process_state() -> list[Any]:
    """Return the state that engines of this process share."""
    names = [name for name in vars(groups) if name.isupper() or name in ("mpu", "mesh_device")]
    return [
        *(getattr(groups, name) for name in sorted(names)),
        DeepSpeedEngine._configure_zero_optimizer,
        deepspeed.initialize,
        stage_1_and_2.all_gather_dp_groups,
        bf16_optimizer.all_gather_dp_groups,
        partition_parameters._dist_allgather_fn,
        signal.getsignal(signal.SIGTERM),
    ]


def fails(rank: int, job: Job, name: str) -> list[Any]:
    """Return whether the process is as before, and the results of plain DeepSpeed with the model of the failure."""
    deepspeed.init_distributed("gloo")
    model, before = network(), process_state()
    with mock.patch(name, side_effect=InjectedError), pytest.raises(InjectedError):
        make_engine(model, job.config(), training_data=[torch.zeros(1)] * 8)
    after = process_state()
    dist.barrier()
    unchanged = [one is other or one == other for one, other in zip(before, after, strict=True)]
    plain = replace(job, section=None)
    if name in DEEPSPEED:
        # A failure inside DeepSpeed leaves hooks on the model, with and without this package.
        model = network()
    engine = make_engine(model, plain.config())
    run(engine, data(rank, plain))
    return [all(unchanged), engine.seq_data_parallel_group.size(), weights(engine)]


def plainly(rank: int, job: Job) -> dict[str, list[float]]:
    deepspeed.init_distributed("gloo")
    engine = make_engine(network(), job.config())
    run(engine, data(rank, job))
    return weights(engine)


@pytest.fixture(scope="module")
def expected() -> list[dict[str, list[float]]]:
    return run_forks(2, plainly, Job(1, section=None, steps=3))


@SAMPLED
@pytest.mark.parametrize("name", [*(PACKAGE + step for step in STEPS), *DEEPSPEED])
def test_a_failure_at_any_step_leaves_no_division(name: str, expected: list[dict[str, list[float]]]) -> None:
    job = Job(1, section=ISLANDS, steps=3)
    for found, plain in zip(run_forks(2, fails, job, name), expected, strict=True):
        assert found == [True, 2, plain]


@SAMPLED
@pytest.mark.parametrize("name", [ENGINE + "initialize.keep_file_order", ENGINE + "attach.announce", *DEEPSPEED[1:]])
def test_a_failure_leaves_neither_patches_nor_another_order(name: str, expected: list[dict[str, list[float]]]) -> None:
    job = Job(1, section=BALANCED, steps=3)
    for found, plain in zip(run_forks(2, fails, job, name), expected, strict=True):
        assert found == [True, 2, plain]


def refused_as(rank: int, job: Job) -> tuple[str, bool, int]:
    deepspeed.init_distributed("gloo")
    model, before = network(), process_state()
    message = refusal(UnsupportedError, make_engine, model, job.config())
    same = process_state() == before
    dist.barrier()
    engine = make_engine(network(), replace(job, section=None).config())
    return message, same, engine.seq_data_parallel_group.size()


def test_a_refusal_leaves_no_division() -> None:
    """Adam with amsgrad has no second moments for islands. This is known only once the engine exists."""
    section = {**ISLANDS, "islands": {"size": 1, "second_moments": {}}}
    params = {"lr": 0.01, "amsgrad": True, "torch_adam": True}
    job = Job(1, section=section, extra={"optimizer": {"type": "Adam", "params": params}})
    for text, same, ranks in run_forks(2, refused_as, job):
        assert "second_moments" in text
        assert (same, ranks) == (True, 2)


def former_mpu(rank: int, job: Job) -> list[bool]:
    """Return whether the process has its own `mpu` after islands fail, while their engine exists, and when it ends."""
    deepspeed.init_distributed("gloo")
    groups.mpu = own = object()
    model = network()
    with mock.patch(ENGINE + "attach.announce", side_effect=InjectedError), pytest.raises(InjectedError):
        make_engine(model, job.config())
    after_failure = groups.mpu is own
    model = network()
    engine = make_engine(model, job.config())
    beside = groups.mpu is own
    engine.destroy()
    return [after_failure, beside, groups.mpu is own]


def test_the_former_division_is_restored() -> None:
    assert run_forks(2, former_mpu, Job(1, section=ISLANDS)) == [[True] * 3] * 2


def elastic_fails(rank: int, job: Job, ports: list[int], name: str) -> list[Any]:
    """Fail once, and then join successfully. The coordinator must keep no island of the failed attempt."""
    become_island(rank, 1, ports)
    address = job.section["islands"]["elastic"]["rendezvous"]  # type: ignore[index]
    model = network()
    with mock.patch(name, side_effect=InjectedError), pytest.raises(InjectedError):
        make_engine(model, job.config())
    left = len(status(address)["islands"])
    engine = make_engine(model, job.config())
    return [left, len(status(address)["islands"]), "compression" in vars(engine)]


@pytest.mark.parametrize(
    "step",
    [
        "local_sgd.deepspeed.elastic.ElasticExchange",
        "local_sgd.elastic_exchange.ElasticExchange.start",
        "backends.deepspeed.attach.announce",
    ],
)
def test_an_elastic_island_that_fails_leaves_the_others(step: str) -> None:
    with coordinator() as address, own_ports(1) as ports:
        elastic = {"rendezvous": address, "timeout": "2 s", "give_up": "20 s"}
        section = {"gradients": {"method": "none"}, "islands": {"elastic": elastic}, "monitor": {"announce": False}}
        found = run_forks(1, elastic_fails, Job(1, section=section), ports, PACKAGE + step)
        assert found == [[0, 1, True]]
