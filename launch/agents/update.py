"""Off-policy actor-critic learning with V-trace (Espeholt et al., arXiv:1802.01561, section 4)."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["Experience", "Objective", "vtrace"]


@dataclass(frozen=True)
class Experience:
    """Record of `T` steps of `N` carts, with time as the first dimension.

    Attributes:
        windows: Frames before each step and after the last, [T + 1, N, frames, seen].
        actions: Chosen actions, [T, N].
        log_likely: Logarithms of the probabilities of these actions when they were chosen, [T, N].
        rewards: Rewards, [T, N].
        terminated: True for the last step of an episode, [T, N].
        valid: False for steps that only started an episode and ignored the action, [T, N].
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
    """Return the targets of values and the advantages of actions, [T, N] each.

    Args:
        ratios: Present over former probabilities of the actions, [T, N], clipped at 1; 0 for ignored actions.
        rewards: Rewards, [T, N].
        discounts: Discounts, [T, N]; 0 where an episode ended.
        values: Values, [T + 1, N].
        trace: Share of a difference that is carried back by one step (lambda).
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
    """Actor-critic loss. `corrected` weights actions by probability ratios; otherwise all ratios are 1."""

    corrected: bool = True
    discount: float = 0.98
    value_weight: float = 0.5
    entropy_weight: float = 0.02

    def __call__(self, logits: Tensor, values: Tensor, seen: Experience) -> Tensor:
        """Return the loss for the `logits` [T + 1, N, actions] and `values` [T + 1, N] of the windows of `seen`."""
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
        # Scale the values to about 1, for any discount.
        rewards = (1 - self.discount) * seen.rewards
        return vtrace(ratios * seen.valid, rewards, discounts, values)


def _scaled(advantages: Tensor, valid: Tensor) -> Tensor:
    """Scale advantages to a mean square of 1 over valid steps. Their mean is kept, so that zeros stay zeros."""
    return advantages / (advantages[valid].square().mean().sqrt() + 1e-6)
