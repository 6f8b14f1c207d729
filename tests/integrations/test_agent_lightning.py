"""Agent-Lightning's algorithm: samples from traces, the order of rollouts and weights, and a whole run."""

import asyncio
import contextlib
import json
import math
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import AsyncMock, patch

import pytest
import torch

pytest.importorskip("agentlightning", reason="agentlightning is not installed: pip install -e .[agents]")

from agentlightning import Triplet

from deepspeed_compress import initialize
from deepspeed_compress.agents.grpo import Sample
from deepspeed_compress.agents.learner import Checkpoints, Learned, Learner, LearnerSettings
from deepspeed_compress.errors import RolloutError
from deepspeed_compress.integrations import agent_lightning
from deepspeed_compress.integrations.agent_lightning import (
    BatchFigures,
    DeepSpeedAlgorithm,
    Endpoint,
    RolloutPlan,
    samples_of,
)
from deepspeed_compress.rollout import DirectoryStore, Publisher
from tests.agents.models import PAD, network
from tests.support import http_servers
from tests.support.forks import RankError, run_forks


def triplet(version: int = 3, reward: float | None = 1.0, **changes: Any) -> Triplet:
    parts: dict[str, Any] = {
        "prompt": {"token_ids": [1, 2]},
        "response": {"token_ids": [3, 4], "logprobs": [{"logprob": -0.5}, {"logprob": -1.5}]},
        "metadata": {"response": {"model": f"policy@{version}"}},
    }
    return Triplet(reward=reward, **{**parts, **changes})


def samples(*triplets: Triplet) -> list[Sample]:
    return samples_of(triplets, "task", "rollout", "policy")


def test_the_last_reward_of_an_episode_counts_for_all_of_its_completions() -> None:
    expected = Sample((1, 2), (3, 4), (-0.5, -1.5), 0.25, "task", 3, episode="rollout")
    found = samples(triplet(reward=None), triplet(reward=1.0), triplet(4, reward=0.25))
    assert found == [expected, expected, replace(expected, version=4)]


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_an_episode_without_a_finite_reward_has_no_samples(reward: float | None) -> None:
    assert samples(triplet(reward=reward)) == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"prompt": {"token_ids": []}},
        {"response": {"token_ids": [3, 4]}},
        {"response": {"token_ids": [], "logprobs": []}},
        {"metadata": {"response": {"model": "policy"}}},
    ],
)
def test_a_trace_without_tokens_log_probabilities_or_a_version_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(RolloutError, match=r"sampling_parameters|names no version"):
        samples(triplet(**wrong))


@pytest.mark.parametrize("metadata", [{"response": None}, {}, {"response": {}}])
def test_a_call_that_has_failed_is_left_out(metadata: dict[str, Any]) -> None:
    failed = triplet(prompt={"token_ids": []}, response={"token_ids": []}, reward=None, metadata=metadata)
    assert samples(failed, triplet()) == samples(triplet())


def test_the_secret_of_an_endpoint_is_not_printed() -> None:
    assert "hidden" not in repr(Endpoint("http://a:1", secret="hidden"))


def test_completions_of_other_models_are_left_out() -> None:
    judge = triplet(prompt={"token_ids": []}, metadata={"response": {"model": "judge-2026"}})
    assert samples(triplet(), judge) == samples(triplet())


@dataclass
class World:
    """An endpoint, a store, runners, and a learner that note what they do."""

    version: int = 1
    served: int = 1
    answers: int | None = None
    """Version that answers; None for the one that is served."""

    def __post_init__(self) -> None:
        self.events: list[Any] = []
        self.batches: dict[str, int] = {}
        self.figures: list[BatchFigures] = []

    async def add_resources(self, resources: Any) -> Any:
        return SimpleNamespace(resources_id="r")

    async def enqueue_many_rollouts(self, requests: Sequence[Any]) -> list[Any]:
        self.events.append(("queued", self.served))
        names = [f"{len(self.events)}/{index}" for index in range(len(requests))]
        self.batches |= dict.fromkeys(names, self.served if self.answers is None else self.answers)
        return [
            SimpleNamespace(rollout_id=name, input=request.input) for name, request in zip(names, requests, strict=True)
        ]

    async def wait_for_rollouts(self, rollout_ids: list[str], timeout: float) -> list[Any]:
        return [SimpleNamespace(rollout_id=name, status="succeeded") for name in rollout_ids]

    async def query_spans(self, rollout: str, attempt_id: str) -> Any:
        return [triplet(self.batches[rollout])]

    def adapt(self, spans: Any) -> Any:
        return spans

    def learn(self, samples: Sequence[Sample], version: int) -> Learned:
        self.events.append(("learned", len(samples), version))
        return Learned(1, 0.0, 1.0, 0.0)

    def publish(self) -> int:
        self.version += 1
        return self.version


def run(world: World, plan: RolloutPlan, monkeypatch: pytest.MonkeyPatch, told: list[Any] | None = None) -> None:
    """Run the algorithm on one rank; the endpoint gets a version whenever it is asked.

    Samples for the other ranks, and None at the end, go to `told`.
    """
    passed = [] if told is None else told

    async def version(self: Endpoint) -> int:
        world.served = min(world.served + 1, world.version)
        return world.served

    monkeypatch.setattr(Endpoint, "version", version)
    monkeypatch.setattr(agent_lightning, "POLL_S", 0.0)
    monkeypatch.setattr(agent_lightning, "of_first", passed.append)
    algorithm = DeepSpeedAlgorithm(
        world, world.publish, world.version, Endpoint("http://nowhere"), plan, world.figures.append
    )
    algorithm.set_store(world)
    algorithm.set_adapter(world)
    asyncio.run(algorithm.run([{"first": 1}, {"first": 2}, {"first": 3}]))


class Troubled(World):
    """A store whose first three rollouts of a batch have no finite reward, fail, or never finish."""

    taken: Sequence[Sample] = ()

    async def wait_for_rollouts(self, rollout_ids: list[str], timeout: float) -> list[Any]:
        statuses = {one: "failed" if one.endswith("/1") else "succeeded" for one in rollout_ids if one[-2:] != "/2"}
        return [SimpleNamespace(rollout_id=one, status=status) for one, status in statuses.items()]

    async def query_spans(self, rollout: str, attempt_id: str) -> Any:
        return [triplet(self.batches[rollout], math.nan if rollout.endswith("/0") else 1.0)]

    def learn(self, samples: Sequence[Sample], version: int) -> Learned:
        self.taken = samples
        return super().learn(samples, version)


def test_a_bad_rollout_costs_that_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Troubled()
    run(world, RolloutPlan(2, tasks=2, episodes=3, timeout_s=0.3), monkeypatch)
    assert [(figure.samples, figure.failed) for figure in world.figures] == [(3, 3)] * 2
    assert sorted({one.reward for one in world.taken}) == [1.0]


class Answers(http_servers.Handler, BaseHTTPRequestHandler):
    """Answers of a proxy in front of an endpoint, the last one again and again."""

    given: ClassVar[list[tuple[int, bytes]]] = []

    def do_GET(self) -> None:
        status, body = self.given.pop(0) if len(self.given) > 1 else self.given[0]
        self.answer(body, status)


def served(answers: list[tuple[int, bytes]], timeout_s: float) -> None:
    """Wait for version 1 of an endpoint with these answers."""
    handler = type("Handler", (Answers,), {"given": answers})
    with http_servers.serving(HTTPServer(("127.0.0.1", 0), handler)) as url:
        plan = RolloutPlan(1, timeout_s=timeout_s)
        asyncio.run(DeepSpeedAlgorithm(None, lambda: 0, 1, Endpoint(url), plan)._served(1))


BAD = [(502, b"bad gateway"), (503, b""), (404, b"{}"), (200, b"<html>"), (200, b"{}"), (200, b"[]")]


def test_passing_errors_of_the_endpoint_are_waited_out() -> None:
    served([*BAD, (200, b'{"version": 1}')], timeout_s=60.0)


@pytest.mark.parametrize(
    ("answer", "words"), [((502, b""), "502 Bad Gateway"), ((200, b"{}"), "KeyError"), ((401, b""), "its secret")]
)
def test_errors_of_the_endpoint_that_do_not_pass_are_named(answer: tuple[int, bytes], words: str) -> None:
    with pytest.raises(RolloutError, match=words):
        served([answer], timeout_s=0.5)


@pytest.mark.parametrize("behind", [0, 1, 3])
def test_rollouts_are_never_further_behind_than_allowed(behind: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world, plan = World(), RolloutPlan(6, tasks=2, episodes=3, behind=behind)
    run(world, plan, monkeypatch)
    learned = [event for event in world.events if event[0] == "learned"]
    queued = [event for event in world.events if event[0] == "queued"]
    assert [event[1:] for event in learned] == [(6, version) for version in range(1, 7)]
    assert len(queued) == 6
    assert all(figures.outdated == 0 for figures in world.figures)
    # So many batches are queued before the policy learns from the first one.
    assert world.events.index(learned[0]) == behind + 1
    for batch, (_, served) in enumerate(queued):
        assert served >= batch + 1 - behind
    assert all(later[1] >= former[1] for former, later in pairwise(queued))


def test_rollouts_wait_for_the_first_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Older ones in the store are of another run, or of batches that a killed run has lost."""
    world = World(version=5, served=2)
    run(world, RolloutPlan(2, tasks=1, episodes=1, behind=3), monkeypatch)
    assert [event for event in world.events if event[0] == "queued"] == [("queued", 5)] * 2


class Runners(World):
    """A store with runners whose answers depend on the task and on the number of the rollout alone."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.tasks: list[int] = []

    async def enqueue_many_rollouts(self, requests: Sequence[Any]) -> list[Any]:
        begin = len(self.tasks)
        self.tasks += [request.input for request in requests]
        return [SimpleNamespace(rollout_id=f"{number}") for number in range(begin, len(self.tasks))]

    async def query_spans(self, rollout: str, attempt_id: str) -> Any:
        task, number = self.tasks[int(rollout)], int(rollout) % EPISODES
        response = {"token_ids": [task, (3 * task + number) % 10], "logprobs": [{"logprob": -2.5}] * 2}
        return [triplet(self.version, float((task + number) % 2), response=response)]


TASKS, EPISODES, BATCHES = 3, 4, 6


class KilledLearner(Learner):
    """Learner that is killed before it learns for the fourth time."""

    calls = 0

    def learn(self, samples: Sequence[Sample], version: int) -> Learned:
        self.calls += 1
        if self.calls == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().learn(samples, version)


def trained(rank: int, directory: Path, learner: type[Learner]) -> tuple[Any, list[int], list[BatchFigures]]:
    """Return the final weights of a run that resumes if it can, the tasks that it queued, and its figures."""
    model, world = network(), Runners()
    config = {
        "train_batch_size": TASKS * EPISODES,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}},
    }
    engine, *_ = initialize(model=model, model_parameters=list(model.parameters()), config=config)
    checkpoints = Checkpoints(engine, directory / "checkpoints", every=2, resume=True)
    publisher = Publisher(engine, DirectoryStore(directory / "weights"))

    def publish() -> int:
        published = publisher.publish()
        assert published is not None
        world.version = world.served = published.version
        return published.version

    algorithm = DeepSpeedAlgorithm(
        learner(engine, PAD, LearnerSettings()),
        publish,
        publish(),
        Endpoint("http://nowhere"),
        RolloutPlan(BATCHES, TASKS, EPISODES, behind=1),
        world.figures.append,
        checkpoints,
    )
    if algorithm.leads:
        algorithm.set_store(world)
        algorithm.set_adapter(world)
        with patch.object(Endpoint, "version", AsyncMock(side_effect=lambda: world.served)):
            asyncio.run(algorithm.run(range(5)))
    else:
        algorithm.follow()
    engine.destroy()
    return (
        {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
        world.tasks,
        world.figures,
    )


def test_a_killed_run_continues_from_its_last_checkpoint(tmp_path: Path) -> None:
    (whole, tasks, figures), _ = run_forks(2, trained, tmp_path / "whole", Learner)
    assert [figure.number for figure in figures] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(RankError):
        run_forks(2, trained, tmp_path / "killed", KilledLearner, grace=0.1)
    for resumed, again, later in run_forks(2, trained, tmp_path / "killed", Learner):
        assert all(torch.equal(resumed[name], values) for name, values in whole.items())
        if later:
            assert [one.number for one in later] == [3, 4, 5, 6]
            # The killed run published versions 1 to 4.
            assert [one.version for one in later] == [6, 7, 8, 9]
            assert again == tasks[2 * TASKS * EPISODES :]


def test_samples_that_are_too_far_behind_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(version=5, served=5, answers=4)
    with pytest.raises(RolloutError, match="6 samples are more than 0 versions behind"):
        run(world, RolloutPlan(1, tasks=2, episodes=3), monkeypatch)
    assert not world.figures


@pytest.mark.parametrize("failing", [True, False])
def test_the_other_ranks_are_notified_of_the_end_unless_they_have_failed_too(
    failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, told = World(), []

    def learn(samples: Sequence[Sample], version: int) -> Learned:
        if failing:
            raise RolloutError("the disk is full")
        return Learned(1, 0.0, 1.0, 0.0)

    world.learn = learn
    with contextlib.suppress(RolloutError):
        run(world, RolloutPlan(1, tasks=1, episodes=1), monkeypatch, told)
    assert [samples is None for samples in told] == ([False] if failing else [False, True])


def test_training_without_tasks_is_refused() -> None:
    algorithm = DeepSpeedAlgorithm(None, lambda: 0, 0, Endpoint("http://nowhere"), RolloutPlan(1))
    with pytest.raises(RolloutError, match="there are no tasks"):
        asyncio.run(algorithm.run([]))


@pytest.mark.slow
@pytest.mark.parametrize("behind", [0, 1])
def test_a_whole_run_with_agent_lightnings_own_trainer_store_and_runners(tmp_path: Any, behind: int) -> None:
    from launch.train_agents import main

    output = tmp_path / "run"
    sizes = ["--supervised-steps", "20", "--batches", "3", "--tasks", "8"]
    main(["--output-dir", str(output), *sizes, "--behind", str(behind)])
    main(["--output-dir", str(output), *sizes, "--behind", str(behind), "--batches", "4", "--resume"])
    rows = [json.loads(line) for line in (output / "figures.jsonl").read_text().splitlines()]
    assert [row["number"] for row in rows] == [1, 2, 3, 4]
    assert [row["version"] for row in rows] == [2, 3, 4, 5]
    assert all(row["samples"] == 64 and row["failed"] == row["outdated"] == 0 for row in rows)
    assert all(row["learned"]["lag"] <= behind for row in rows)
    assert (output / "reward.png").stat().st_size > 1000


@pytest.mark.slow
def test_two_agents_that_share_a_trunk(tmp_path: Path) -> None:
    from launch.train_agents import main

    output = tmp_path / "run"
    sizes = ["--supervised-steps", "20", "--batches", "6", "--tasks", "4", "--ranks", "1", "--runners", "1"]
    main(["--output-dir", str(output), *sizes, "--agents", "2"])
    for agent in range(2):
        rows = [json.loads(line) for line in (output / f"agent{agent}" / "figures.jsonl").read_text().splitlines()]
        assert [row["number"] for row in rows] == [1, 2, 3, 4, 5, 6]
    # The server of the trunk keeps it here.
    assert (output / "trunk.safetensors").exists()
    assert (output / "reward.png").stat().st_size > 1000
