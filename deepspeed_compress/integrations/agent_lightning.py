"""Agent-Lightning: an algorithm that trains the policy of any `LitAgent` by GRPO on a DeepSpeed engine.

The first rank runs the algorithm: it queues tasks, collects the traces of their rollouts, and passes samples to the
other ranks, which `follow`. All ranks learn, and publish the new weights to the endpoint that answers the agents.
"""

import asyncio
import itertools
import math
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch.distributed as dist
from agentlightning import LLM, Algorithm, EnqueueRolloutRequest, Rollout, RolloutConfig, Triplet
from agentlightning.types import Dataset

from deepspeed_compress.agents.grpo import Sample
from deepspeed_compress.agents.learner import Checkpoints, Learned, Learner
from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.errors import RolloutError

POLL_S = 0.05
"""Seconds between two questions to the store or to the endpoint."""


@dataclass(frozen=True)
class Endpoint:
    """OpenAI-compatible endpoint whose weights are the ones that training publishes; see `agents.vllm_endpoint`.

    Attributes:
        url: address, for example "http://10.0.0.7:8000".
        model: name of the model.
        secret: key that requests must bring; None if there is none.
        resource: name under which agents find the endpoint among their resources.
        max_tokens: largest number of tokens of a completion.
        temperature: temperature of sampling; the same as the learner's.
    """

    url: str
    model: str = "policy"
    secret: str | None = field(default=None, repr=False)
    resource: str = "main_llm"
    max_tokens: int = 64
    temperature: float = 1.0

    def as_resource(self) -> LLM:
        """Return the resource that agents receive."""
        parameters = {"max_tokens": self.max_tokens, "temperature": self.temperature, "logprobs": True}
        return LLM(endpoint=f"{self.url}/v1", model=self.model, api_key=self.secret, sampling_parameters=parameters)

    async def version(self) -> int:
        """Return the version of the weights that answer requests now.

        Raises:
            RolloutError: the endpoint refuses the secret.
            httpx.HTTPError: it does not answer, or with another error.
            KeyError, TypeError, ValueError: the answer is not that of an endpoint.
        """
        headers = {} if self.secret is None else {"Authorization": f"Bearer {self.secret}"}
        async with httpx.AsyncClient(headers=headers) as client:
            answer = await client.get(f"{self.url}/version")
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            raise RolloutError(f"the endpoint {self.url} refuses its secret")
        answer.raise_for_status()
        return int(answer.json()["version"])


@dataclass(frozen=True)
class RolloutPlan:
    """Which rollouts train the policy.

    Attributes:
        batches: number of batches of rollouts; the policy learns once from each.
        tasks: number of tasks in a batch.
        episodes: number of rollouts of each task, which are compared with each other.
        behind: largest number of versions by which a sample may be behind the weights that learn from it. With 0,
            rollouts wait for the newest weights; with 1, rollouts of the next batch run while this one trains.
        timeout_s: seconds after which rollouts that have not finished count as failed.
        seed: seed of the order of tasks.
    """

    batches: int
    tasks: int = 8
    episodes: int = 8
    behind: int = 0
    timeout_s: float = 600.0
    seed: int = 0


@dataclass(frozen=True)
class BatchFigures:
    """Figures of one batch of rollouts.

    Attributes:
        number: number of the batch, from 1.
        version: version of the weights after it.
        learned: what the learner reports.
        samples: number of samples that were learned from.
        failed: number of rollouts without samples: they failed, did not finish in time, or have no finite reward or no
            completion. Their groups do not count them.
        outdated: number of samples that were dropped, because they were too far behind.
        seconds: seconds since the previous batch.
        tokens: number of tokens that the policy has sampled for it.
    """

    number: int
    version: int
    learned: Learned
    samples: int
    failed: int
    outdated: int
    seconds: float
    tokens: int


class DeepSpeedAlgorithm(Algorithm):  # type: ignore[misc]  # Agent-Lightning has no types
    """Trains the policy of an agent by GRPO.

    The first rank passes it to Agent-Lightning's `Trainer`; the other ranks call `follow`.

    Args:
        learner: the policy that learns.
        publish: publishes the weights, and returns their version. Collective.
        version: version of the weights at the beginning; rollouts wait until the endpoint has it.
        endpoint: the endpoint that answers the agents.
        plan: which rollouts train the policy.
        report: receives the figures of each batch, on the first rank.
        checkpoints: saves the policy, and tells after how many batches a resumed run continues; None to save nothing.

    Examples:
        >>> algorithm = DeepSpeedAlgorithm(learner, publish, 0, Endpoint("http://127.0.0.1:8000"), RolloutPlan(100))
        >>> if algorithm.leads:
        ...     agentlightning.Trainer(algorithm=algorithm, n_runners=2).fit(agent, train_dataset=tasks)
        ... else:
        ...     algorithm.follow()
    """

    def __init__(
        self,
        learner: Learner,
        publish: Callable[[], int],
        version: int,
        endpoint: Endpoint,
        plan: RolloutPlan,
        report: Callable[[BatchFigures], None] = print,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        super().__init__()
        self._learner, self._publish, self._version = learner, publish, version
        self._endpoint, self._plan, self._report = endpoint, plan, report
        self._checkpoints = checkpoints
        self._first_version = version
        self._batches = 0 if checkpoints is None else checkpoints.batches
        """Number of batches that the policy has learned from."""
        self._learning = False
        """True while all ranks learn, and if that has failed."""

    @property
    def leads(self) -> bool:
        """Return True on the rank that runs the algorithm."""
        return dist.get_rank() == 0

    def follow(self) -> None:
        """Learn from the samples that the first rank passes on, until it passes None when it ends."""
        nothing: Sequence[Sample] | None = None
        while (samples := of_first(nothing)) is not None:
            self._learn(samples)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> None:
        """Train on the tasks of `train_dataset`; Agent-Lightning's `Trainer` calls this.

        Raises:
            RolloutError: if there are no tasks, no rollout of a batch leaves samples, or the endpoint does not get the
                weights.
        """
        if train_dataset is None or not len(train_dataset):
            raise RolloutError("there are no tasks: pass train_dataset to Trainer.fit")
        tasks = self._tasks(train_dataset)
        waiting: deque[dict[str, str]] = deque()
        try:
            for number in range(self._batches + 1, self._plan.batches + 1):
                while len(waiting) < min(self._plan.behind + 1, self._plan.batches - number + 1):
                    # The policy learns from this batch after all that wait, and has that many more versions then.
                    # A version before the first one may be of another run, or of batches that a killed run has lost.
                    oldest = self._version + len(waiting) - self._plan.behind
                    await self._served(max(self._first_version, oldest))
                    waiting.append(await self._queue(tasks, f"{number}.{len(waiting)}"))
                await self._take(number, waiting.popleft())
        finally:
            # If learning has failed, the others have left, or wait for something else.
            if not self._learning:
                await asyncio.to_thread(of_first, None)

    def _tasks(self, dataset: Dataset[Any]) -> Iterator[Any]:
        """Yield all tasks in random order, again and again, after those of the batches that were learned before."""
        order = random.Random(self._plan.seed)
        rounds = (order.sample(range(len(dataset)), len(dataset)) for _ in itertools.count())
        indices = itertools.chain.from_iterable(rounds)
        for index in itertools.islice(indices, self._batches * self._plan.tasks, None):
            yield dataset[index]

    async def _served(self, version: int) -> None:
        """Wait until the endpoint answers with weights of `version` or newer. It may start later than training."""
        until, last = time.monotonic() + self._plan.timeout_s, ""
        while time.monotonic() < until:
            try:
                served = await self._endpoint.version()
                if served >= version:
                    return
                last = f"version {served}"
            except (httpx.HTTPError, KeyError, TypeError, ValueError) as error:
                # A proxy may answer while the endpoint starts again.
                last = f"{type(error).__name__}: {error}"
            await asyncio.sleep(POLL_S)
        late = f"has not received version {version} in {self._plan.timeout_s:g} seconds"
        raise RolloutError(f"the endpoint {self._endpoint.url} {late}; its last answer: {last}")

    async def _queue(self, tasks: Iterator[Any], name: str) -> dict[str, str]:
        """Queue the rollouts of a batch. Return the group of each one, by its id."""
        repeated = [
            (f"{name}/{index}", task)
            for index, task in enumerate(itertools.islice(tasks, self._plan.tasks))
            for _ in range(self._plan.episodes)
        ]
        store = self.get_store()
        resources = await store.add_resources({self._endpoint.resource: self._endpoint.as_resource()})
        config = RolloutConfig(timeout_seconds=self._plan.timeout_s)
        rollouts = await store.enqueue_many_rollouts(
            [
                EnqueueRolloutRequest(input=task, mode="train", resources_id=resources.resources_id, config=config)
                for _, task in repeated
            ]
        )
        return {rollout.rollout_id: group for rollout, (group, _) in zip(rollouts, repeated, strict=True)}

    async def _take(self, number: int, groups: Mapping[str, str]) -> None:
        """Learn from a batch of rollouts, whose groups are given by their ids, once all have finished."""
        begin = time.perf_counter()
        finished = await self._finished(list(groups))
        succeeded = [one.rollout_id for one in finished if one.status == "succeeded"]
        found = [await self._samples(rollout, groups[rollout]) for rollout in succeeded]
        sampled = [one for samples in found for one in samples]
        samples = [one for one in sampled if one.version >= self._version - self._plan.behind]
        failed = len(groups) - sum(map(bool, found))
        if not samples:
            raise RolloutError(
                f"batch {number} has no samples: {failed} of {len(groups)} rollouts failed, have not finished "
                f"in {self._plan.timeout_s:g} seconds, or have no finite reward or no traced completion of "
                f"{self._endpoint.model!r}, and {len(sampled)} samples are more than {self._plan.behind} versions "
                "behind: check the runners, their tracer, and the agent's rewards"
            )
        learned = await asyncio.to_thread(self._lead, samples)
        self._report(
            BatchFigures(
                number,
                self._version,
                learned,
                len(samples),
                failed,
                len(sampled) - len(samples),
                time.perf_counter() - begin,
                sum(len(one.completion) for one in sampled),
            )
        )

    async def _finished(self, rollouts: list[str]) -> Sequence[Rollout]:
        """Return these rollouts once all have ended, or those that have ended in time."""
        until = time.monotonic() + self._plan.timeout_s
        finished: Sequence[Rollout] = []
        while len(finished) < len(rollouts) and time.monotonic() < until:
            finished = await self.get_store().wait_for_rollouts(rollout_ids=rollouts, timeout=POLL_S)
            await asyncio.sleep(POLL_S)
        return finished

    async def _samples(self, rollout: str, group: str) -> list[Sample]:
        spans = await self.get_store().query_spans(rollout, attempt_id="latest")
        return samples_of(self.get_adapter().adapt(spans), group, rollout, self._endpoint.model)

    def _lead(self, samples: Sequence[Sample]) -> Learned:
        """Pass `samples` to all ranks, and learn from them together."""
        self._learning = True
        of_first(samples)
        learned = self._learn(samples)
        self._learning = False
        return learned

    def _learn(self, samples: Sequence[Sample]) -> Learned:
        """Learn from `samples`, publish the new weights, and save them if it is time. Collective."""
        learned = self._learner.learn(samples, self._version)
        self._version = self._publish()
        self._batches += 1
        if self._checkpoints is not None:
            self._checkpoints.save_if_due(self._batches, last=self._batches == self._plan.batches)
        return learned


def samples_of(triplets: Iterable[Triplet], group: str, episode: str, policy: str) -> list[Sample]:
    """Return the samples of one rollout, an episode whose last reward counts for all of its completions.

    A rollout whose last reward is not finite, or that has none, has no samples: it says nothing about the policy.
    Completions of other models than `policy`, which an agent may use too, are left out.

    Raises:
        RolloutError: if a trace has no token ids, log-probabilities, or version.
    """
    calls = list(triplets)
    rewards = [call.reward for call in calls if call.reward is not None]
    own = [call for call in calls if _model(call).partition("@")[0] == policy]
    rewarded = bool(rewards) and math.isfinite(rewards[-1])
    return [_sample(one, rewards[-1], group, episode) for one in own] if rewarded else []


def _model(triplet: Triplet) -> str:
    """Return the name of the model that a response names; "" for a call that has failed, so has no response."""
    response = triplet.metadata.get("response")
    return str(response.get("model", "")) if isinstance(response, dict) else ""


def _sample(triplet: Triplet, reward: float, group: str, episode: str) -> Sample:
    prompt, completion = triplet.prompt["token_ids"], triplet.response["token_ids"]
    logprobs = triplet.response.get("logprobs")
    if not prompt or not completion or logprobs is None:
        raise RolloutError(
            "the trace of a completion has no token ids or log-probabilities: agents must ask the endpoint with the "
            "resource's sampling_parameters (logprobs=True), and through the traced OpenAI client"
        )
    model, _, version = _model(triplet).partition("@")
    if not version.isdecimal():
        raise RolloutError(f"the model {model!r} of a response names no version: use the endpoint of this package")
    chosen = tuple(logprob["logprob"] for logprob in logprobs)
    return Sample(tuple(prompt), tuple(completion), chosen, reward, group, int(version), episode=episode)
