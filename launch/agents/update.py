"""Learning from what another policy has done: V-trace (Espeholt et al., arXiv:1802.01561, section 4)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Experience", "Objective", "vtrace"]


@dataclass(frozen=True)
class Experience:
    """`T` steps of `N` carts, time first.

    windows: [T + 1, N, frames, seen], before each step and after the last. actions, log_likely, rewards, terminated,
    valid: [T, N]; `log_likely` is the logarithm of the probability with which the action was chosen. What is not
    valid only began an episode, and its action did nothing.
    """

    windows: Tensor
    actions: Tensor
    log_likely: Tensor
    rewards: Tensor
    terminated: Tensor
    valid: Tensor


def vtrace(
    ratios: Tensor, rewards: Tensor, discounts: Tensor, values: Tensor, trace: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Targets of values, and advantages of actions, [T, N] each.

    Args:
        ratios: [T, N], how much likelier an action is now than when it was taken; 0 where it did nothing. Cut at 1.
        rewards: [T, N].
        discounts: [T, N], 0 where the episode ended.
        values: [T + 1, N].
        trace: how much of a difference is carried back by one step (lambda).
    """
    cut = ratios.clamp(max=1.0)
    differences = cut * (rewards + discounts * values[1:] - values[:-1])
    carried, found = torch.zeros_like(values[0]), []
    for step in reversed(range(len(rewards))):
        carried = differences[step] + discounts[step] * trace * cut[step] * carried
        found.append(carried)
    targets = values[:-1] + torch.stack(found[::-1])
    after = torch.cat((targets[1:], values[-1:]))
    return targets, cut * (rewards + discounts * after - values[:-1])


@dataclass(frozen=True)
class Objective:
    """What is minimised: an actor-critic loss. `corrected`: by ratios of probabilities; else all are taken for 1."""

    corrected: bool = True
    discount: float = 0.98
    value_weight: float = 0.5
    entropy_weight: float = 0.02

    def __call__(self, logits: Tensor, values: Tensor, seen: Experience) -> Tensor:
        """Of `logits` [T + 1, N, actions] and `values` [T + 1, N] of the windows of `seen`."""
        likely = F.log_softmax(logits[:-1], -1)
        chosen = likely.gather(-1, seen.actions.unsqueeze(-1)).squeeze(-1)
        targets, advantages = self._targets(chosen.detach() - seen.log_likely, values.detach(), seen)
        valid = seen.valid.to(values.dtype)
        policy = -(_scaled(advantages, seen.valid) * chosen)
        value = (targets - values[:-1]).square()
        entropy = -(likely.exp() * likely).sum(-1)
        each = policy + self.value_weight * value - self.entropy_weight * entropy
        return (valid * each).sum() / valid.sum()

    def _targets(self, log_ratios: Tensor, values: Tensor, seen: Experience) -> tuple[Tensor, Tensor]:
        ratios = log_ratios.exp() if self.corrected else torch.ones_like(log_ratios)
        discounts = self.discount * (~seen.terminated)
        # Of values about 1, whatever the discount.
        rewards = (1 - self.discount) * seen.rewards
        return vtrace(ratios * seen.valid, rewards, discounts, values)


def _scaled(advantages: Tensor, valid: Tensor) -> Tensor:
    """With a mean square of 1 over what is valid. Their mean is left: what was cut to nothing must stay nothing."""
    return advantages / (advantages[valid].square().mean().sqrt() + 1e-6)
