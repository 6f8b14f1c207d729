"""Two related tasks with many carts at once: Gymnasium's CartPole, with the last frames as input.

The pole of the second agent has twice the length, and its pushes are reversed. Both agents need the same features but
opposite actions, so they can share a trunk but not a head.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from torch import Tensor

from launch.agents.update import Experience

__all__ = ["ACTIONS", "FRAMES", "SEEN", "TASKS", "Carts", "Task", "collect", "evaluate"]

FRAMES, SEEN, ACTIONS, LONGEST = 4, 4, 2, 500
SCALE = np.array([2.4, 2.0, 0.2095, 2.0], dtype=np.float32)
"""Units of position, velocity, angle and angular velocity. An episode ends when a position or an angle reaches 1."""

Choice = Callable[[Tensor], Tensor]
"""Function from windows [N, frames, seen] to logits [N, actions]."""


@dataclass(frozen=True)
class Task:
    """Variant of the task: half the length of the pole in meters, and the force of action 1 in newtons."""

    half_length: float
    force: float


TASKS = (Task(0.5, 10.0), Task(1.0, -10.0))


@dataclass(frozen=True)
class _Step:
    rewards: Tensor
    terminated: Tensor
    over: Tensor
    valid: Tensor


class Carts:
    """`count` carts of `task`. `windows` [count, FRAMES, SEEN] holds their newest frames."""

    def __init__(self, task: Task, count: int, seed: int) -> None:
        self._envs = CartPoleVectorEnv(count, max_episode_steps=LONGEST)
        self._envs.length, self._envs.force_mag = task.half_length, task.force
        self._envs.polemass_length = self._envs.masspole * task.half_length
        frames, _ = self._envs.reset(seed=seed)
        self._over = torch.zeros(count, dtype=torch.bool)
        self.windows = _frames(frames).unsqueeze(1).repeat(1, FRAMES, 1)

    def step(self, actions: Tensor) -> _Step:
        """Take a step with `actions` [count]. The step after an episode's end starts another and ignores the action."""
        frames, rewards, terminated, truncated, _ = self._envs.step(actions.numpy())
        began, newest = self._over, _frames(frames)
        self.windows = torch.cat((self.windows[:, 1:], newest.unsqueeze(1)), dim=1)
        self.windows[began] = newest[began].unsqueeze(1)
        ended = torch.from_numpy(terminated.copy())
        self._over = ended | torch.from_numpy(truncated.copy())
        return _Step(torch.from_numpy(rewards).float(), ended, self._over, ~began)


def _frames(observations: np.ndarray) -> Tensor:
    return torch.from_numpy(observations.astype(np.float32) / SCALE)


def collect(carts: Carts, choose: Choice, steps: int, generator: torch.Generator) -> Experience:
    """Take `steps` steps with all carts, and draw each action with the probabilities of `choose`."""
    windows, actions, likely, found = [carts.windows], [], [], []
    for _ in range(steps):
        chances = torch.log_softmax(choose(carts.windows), -1)
        action = torch.multinomial(chances.exp(), 1, generator=generator)
        found.append(carts.step(action.squeeze(1)))
        windows.append(carts.windows)
        actions.append(action.squeeze(1))
        likely.append(chances.gather(1, action).squeeze(1))
    rewards, terminated, valid = (
        torch.stack([getattr(one, name) for one in found]) for name in ("rewards", "terminated", "valid")
    )
    return Experience(torch.stack(windows), torch.stack(actions), torch.stack(likely), rewards, terminated, valid)


@torch.no_grad()
def evaluate(task: Task, choose: Choice, count: int, seed: int) -> float:
    """Return the mean return, at most LONGEST, of `count` episodes that take the likeliest action."""
    carts, total, alive = Carts(task, count, seed), 0.0, torch.ones(count, dtype=torch.bool)
    while alive.any():
        step = carts.step(choose(carts.windows).argmax(-1))
        total += float(step.rewards[alive].sum())
        alive &= ~step.over
    return total / count
