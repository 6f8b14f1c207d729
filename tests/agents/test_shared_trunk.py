"""Agents that share a trunk: each is a job with its own head and samples, and an island that exchanges the trunk."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress import initialize
from deepspeed_compress.agents.learner import Learner, LearnerSettings
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from tests.agents.models import PAD
from tests.agents.steps import samples
from tests.support.coordinators import become_island, coordinator, own_ports, parameter_server
from tests.support.forks import run_forks
from tests.support.island_jobs import elastic_section, section, wait_for, wait_for_islands
from tests.support.tensor_islands import llama

HEAD = "lm_head.weight"
OWN = [r"^lm_head\."]
AGENTS = 2


@dataclass(frozen=True)
class Run:
    """Batches `first` to `last` of all agents, whose files are below `directory`.

    Attributes:
        sections: section of each agent.
        first: batch with which to begin; from 1 on, the checkpoints of the batch before are loaded, and the last agent
            joins first.
        last: batch before which to end.
        saved: batch after which to save.
    """

    directory: Path
    ports: list[int]
    sections: list[Mapping[str, Any]]
    first: int = 0
    last: int = 4
    saved: int | None = None


@dataclass(frozen=True)
class Seen:
    """Weights of an agent after a batch, and the kinds of its exchanges."""

    weights: dict[str, Tensor]
    kinds: list[str]

    @property
    def trunk(self) -> dict[str, Tensor]:
        return {name: values for name, values in self.weights.items() if name != HEAD}


def start(section: Mapping[str, Any], agent: int) -> Any:
    """Return the engine of an agent, whose head and first trunk no other agent has."""
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * agent)
    config = {
        "train_batch_size": 8,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "deepspeed_compress": dict(section),
    }
    return initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train(rank: int, run: Run) -> list[Seen]:
    """Learn from the batches of an agent, each in one step. Agents begin each batch together."""
    become_island(rank, 1, run.ports)
    if run.first:
        wait_for_islands(run.sections[rank]["islands"]["elastic"]["rendezvous"], AGENTS - 1 - rank)
    engine = start(run.sections[rank], rank)
    checkpoints, store = str(run.directory / f"checkpoints{rank}"), DirectoryStore(run.directory / f"weights{rank}")
    if run.first:
        assert engine.load_checkpoint(checkpoints)[0] is not None
    learner, publisher = Learner(engine, PAD, LearnerSettings(seed=rank)), Publisher(engine, store)
    receiving = llama().to(torch.bfloat16)
    receiver, seen = Receiver(receiving, store), []
    for number in range(run.first, run.last):
        (run.directory / f"from {run.first}, {number}, {rank}").touch()
        wait_for(run.directory, f"from {run.first}, {number},", AGENTS)
        batch = [
            replace(sample, reward=float(sample.completion[0] % (2 + rank))) for sample in samples(8 + 2 * number)[-8:]
        ]
        learner.learn(batch, number)
        if number == run.saved:
            engine.save_checkpoint(checkpoints)
        if "parameter_server" in run.sections[rank]["islands"]["elastic"]:
            engine.compression.islands.exchange.finish(30)
        publisher.publish()
        receiver.update()
        weights = {name: parameter.detach().clone() for name, parameter in engine.module.named_parameters()}
        received = dict(receiving.named_parameters())
        assert all(torch.equal(received[name], values.bfloat16()) for name, values in weights.items())
        seen.append(Seen(weights, [one.kind for one in engine.compression.islands.history]))
    engine.destroy()
    return seen


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_trunks_are_equal_after_a_round_and_a_resumed_run_is_too(tmp_path: Path) -> None:
    found = []
    for run in (Run(tmp_path, [], [], saved=1), Run(tmp_path, [], [], first=2)):
        with coordinator() as address, own_ports(AGENTS) as ports:
            shared = elastic_section(address, timeout="60 s", give_up="300 s", sync_every=2, own=OWN)
            found.append(run_forks(AGENTS, train, replace(run, ports=ports, sections=[shared] * AGENTS)))
    (first, second), resumed = found
    for number, (one, other) in enumerate(zip(first, second, strict=True), 1):
        assert equal(one.trunk, other.trunk) == (number % 2 == 0)
        assert not torch.equal(one.weights[HEAD], other.weights[HEAD])
    assert first[-1].kinds == second[-1].kinds == ["exchange"] * 2
    for whole, part in zip((first, second), resumed, strict=True):
        assert [equal(one.weights, other.weights) for one, other in zip(whole[2:], part, strict=True)] == [True] * 2


def test_agents_with_a_parameter_server_synchronize_at_different_rates(tmp_path: Path) -> None:
    with parameter_server() as server, own_ports(AGENTS) as ports:
        elastic = {"rendezvous": f"127.0.0.1:{server.port}", "parameter_server": {}}
        sections = [section(sync_every=steps, own=OWN, elastic=elastic) for steps in (1, 3)]
        first, second = run_forks(AGENTS, train, Run(tmp_path, ports, sections, last=6))
        assert server.service.store.records.pushes == 6 + 2
    assert not torch.equal(first[-1].weights[HEAD], second[-1].weights[HEAD])
