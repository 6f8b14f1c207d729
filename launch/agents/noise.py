"""Exploration by noise in parameters whose scale adapts (Plappert et al., arXiv:1706.01905, sections 3 and C)."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from launch.agents.policy import Policy

__all__ = ["Actor", "NoiseScale", "divergence", "mean_over", "target_divergence"]

QUIET = re.compile(r"norm|^value\.")
"""Parameters without noise."""


@dataclass
class NoiseScale:
    """Standard deviation of the noise, which grows while the noisy policy is nearer than `target` to the other one, and
    shrinks while it is not, by `factor`. Equal on all ranks of `group`, though each has noise of its own."""

    std: float
    target: float
    group: ProcessGroup
    factor: float = 1.05

    def adapt(self, found: Tensor) -> None:
        """After the divergence `found` on this rank: the mean over the ranks counts. Collective."""
        self.std *= self.factor if mean_over(found, self.group) <= self.target else 1 / self.factor


def mean_over(value: Tensor, group: ProcessGroup) -> float:
    """Of a number of every rank of `group`: the same bits on all of them."""
    total = value.detach().to(torch.float64).clone()
    dist.all_reduce(total, group=group)
    return float(total) / group.size()


def target_divergence(epsilon: float, actions: int) -> float:
    """Of a policy from the one that, with probability `epsilon`, takes any of `actions` instead (section C.1)."""
    return -math.log(1 - epsilon + epsilon / actions)


def divergence(plain: Tensor, noisy: Tensor) -> Tensor:
    """Mean Kullback-Leibler divergence of the policy of logits `noisy` [batch, actions] from that of `plain`."""
    return F.kl_div(F.log_softmax(noisy, -1), F.log_softmax(plain, -1), reduction="batchmean", log_target=True)


class Actor:
    """Acts with the weights that it got when it was last renewed, and noise in them.

    `make`: a policy that needs no other rank. `generator`: of the noise of this rank.
    """

    def __init__(self, make: Callable[[], Policy], generator: torch.Generator) -> None:
        self._plain, self._noisy, self._generator = make(), make(), generator

    def renew(self, policy: Policy) -> None:
        self._plain.load_state_dict(policy.state_dict())

    @torch.no_grad()
    def perturb(self, std: float) -> None:
        """New noise, of standard deviation `std`."""
        noisy = dict(self._noisy.named_parameters())
        for name, weight in self._plain.named_parameters():
            noise = torch.randn(weight.shape, generator=self._generator)
            noisy[name].copy_(weight if QUIET.search(name) else weight + std * noise)

    @torch.no_grad()
    def logits(self, windows: Tensor) -> Tensor:
        """[batch, actions] of the noisy policy."""
        logits: Tensor = self._noisy(windows)[0]
        return logits

    @torch.no_grad()
    def divergence(self, windows: Tensor) -> Tensor:
        """Of the noisy policy from the one without noise."""
        return divergence(self._plain(windows)[0], self.logits(windows))
