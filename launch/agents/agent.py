"""An agent on the ranks of its island. It acts, learns, and shares its trunk with the other agent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import deepspeed_compress
from deepspeed_compress.monitor import StepStatistics
from launch.agents.noise import Actor, NoiseScale, mean_over, target_divergence
from launch.agents.policy import Policy
from launch.agents.tasks import ACTIONS, FRAMES, SEEN, TASKS, Carts, collect, evaluate
from launch.agents.update import Objective

__all__ = ["AGENTS", "Agent", "Rules"]

AGENTS = len(TASKS)
EPSILON = 0.1
"""Share of random actions that would change the policy as much as the noise does."""
FIRST_NOISE = 0.02


@dataclass(frozen=True)
class Rules:
    """Training rules of all agents.

    Attributes:
        renew_every: Updates after which actors get the newest weights.
        corrected: If True, V-trace corrects for older weights and for noise.
        carts: Carts of each rank.
        steps: Steps of each cart per update.
    """

    renew_every: int = 10
    corrected: bool = True
    carts: int = 16
    steps: int = 32


class Agent:
    """This rank's part of an agent, on the CPU.

    Args:
        config: DeepSpeed configuration whose islands have the size of `group`.
        rules: Training rules, the same for all agents.
        group: Ranks of the agent. Each rank has its own carts.
        seed: Seed of weights, carts and noise.
    """

    def __init__(self, config: Mapping[str, Any], rules: Rules, group: ProcessGroup, seed: int) -> None:
        self.number, self.rules, self.updates = dist.get_rank() // group.size(), rules, 0
        self._group, self._task = group, TASKS[self.number]
        # Weights differ by agent until islands take the trunk of the first one. Other random numbers differ by rank.
        torch.manual_seed(AGENTS * seed + self.number)
        policy = _make_policy(group)
        place = seed * dist.get_world_size() + dist.get_rank()
        self._generator = torch.Generator().manual_seed(place)
        self._carts, self._seed = Carts(self._task, rules.carts, place), place
        self._actor = Actor(_make_policy, self._generator)
        self._noise = NoiseScale(FIRST_NOISE, target_divergence(EPSILON, ACTIONS), group)
        self._objective = Objective(rules.corrected)
        self.engine = deepspeed_compress.initialize(
            model=policy, model_parameters=list(policy.parameters()), config=dict(config)
        )[0]
        self.traffic: list[StepStatistics] = []
        """Statistics of every update, on the ranks that report."""
        self.engine.compression.subscribe(self.traffic.append)

    @property
    def noise(self) -> float:
        """Standard deviation of the noise, the same on all ranks of the agent."""
        return self._noise.std

    def update(self) -> None:
        """Act for some steps and learn from them. Collective among all agents when they exchange."""
        if self.updates % self.rules.renew_every == 0:
            # Islands exchange at the end of a step, so these are the exchanged weights.
            self._actor.renew(self.engine.module)
        self._actor.perturb(self._noise.std)
        seen = collect(self._carts, self._actor.logits, self.rules.steps, self._generator)
        self._noise.adapt(self._actor.divergence(seen.windows[-1]))
        logits, values = self.engine(seen.windows.flatten(0, 1))
        shape = seen.windows.shape[:2]
        self.engine.backward(self._objective(logits.unflatten(0, shape), values.unflatten(0, shape), seen))
        self.engine.step()
        self.updates += 1

    def score(self, carts: int = 4) -> float:
        """Return the mean return of the newest weights without noise. Collective among the ranks of the agent."""
        alone = _make_policy()
        alone.load_state_dict(self.engine.module.state_dict())
        found = evaluate(self._task, lambda windows: alone(windows)[0], carts, seed=10**6 + self._seed)
        return mean_over(torch.tensor(found), self._group)


def _make_policy(group: ProcessGroup | None = None) -> Policy:
    return Policy(FRAMES, SEEN, ACTIONS, group)
