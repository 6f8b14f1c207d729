"""Exploration by parameter noise of adaptive scale (Plappert et al., arXiv:1706.01905, sections 3 and C)."""

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
    """Standard deviation of the noise, the same on all ranks of `group`.

    It grows by `factor` while the divergence of the noisy policy is at most `target`, and shrinks otherwise. Each rank
    draws its own noise.
    """

    std: float
    target: float
    group: ProcessGroup
    factor: float = 1.05

    def adapt(self, found: Tensor) -> None:
        """Adapt the scale to the mean over the ranks of the divergence `found`. Collective."""
        self.std *= self.factor if mean_over(found, self.group) <= self.target else 1 / self.factor


def mean_over(value: Tensor, group: ProcessGroup) -> float:
    """Return the mean of `value` over the ranks of `group`, with the same bits on all of them."""
    total = value.detach().to(torch.float64).clone()
    dist.all_reduce(total, group=group)
    return float(total) / group.size()


def target_divergence(epsilon: float, actions: int) -> float:
    """Return the divergence of a policy from one with a share `epsilon` of random actions (section C.1)."""
    return -math.log(1 - epsilon + epsilon / actions)


def divergence(plain: Tensor, noisy: Tensor) -> Tensor:
    """Return the mean Kullback-Leibler divergence of the policy with logits `noisy` [batch, actions] from `plain`."""
    return F.kl_div(F.log_softmax(noisy, -1), F.log_softmax(plain, -1), reduction="batchmean", log_target=True)


class Actor:
    """Policy that acts with the weights of its last renewal plus noise.

    Args:
        make: Function that returns a policy which needs no other rank.
        generator: Generator of this rank's noise.
    """

    def __init__(self, make: Callable[[], Policy], generator: torch.Generator) -> None:
        self._plain, self._noisy, self._generator = make(), make(), generator

    def renew(self, policy: Policy) -> None:
        """Take the weights of `policy`."""
        self._plain.load_state_dict(policy.state_dict())

    @torch.no_grad()
    def perturb(self, std: float) -> None:
        """Draw new noise of standard deviation `std`."""
        noisy = dict(self._noisy.named_parameters())
        for name, weight in self._plain.named_parameters():
            noise = torch.randn(weight.shape, generator=self._generator)
            noisy[name].copy_(weight if QUIET.search(name) else weight + std * noise)

    @torch.no_grad()
    def logits(self, windows: Tensor) -> Tensor:
        """Return the logits [batch, actions] of the noisy policy."""
        logits: Tensor = self._noisy(windows)[0]
        return logits

    @torch.no_grad()
    def divergence(self, windows: Tensor) -> Tensor:
        """Return the divergence of the noisy policy from the one without noise."""
        return divergence(self._plain(windows)[0], self.logits(windows))
