"""What an agent is made of: a small GPT over what it has seen, and two heads."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd

__all__ = ["Policy", "SplitHead", "Trunk"]

WIDTH, LAYERS, HEADS = 32, 2, 4


class Trunk(nn.Module):
    """A causal transformer with layer norms before its blocks; the features of the last of `frames` frames of `seen`
    numbers: [batch, frames, seen] to [batch, WIDTH]."""

    def __init__(self, frames: int, seen: int) -> None:
        super().__init__()
        self.embed = nn.Linear(seen, WIDTH)
        self.place = nn.Parameter(0.02 * torch.randn(frames, WIDTH))
        block = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(frames), persistent=False)

    def forward(self, windows: Tensor) -> Tensor:
        hidden: Tensor = self.blocks(self.embed(windows) + self.place, mask=self.mask, is_causal=True)
        return hidden[:, -1]


class SplitHead(nn.Linear):
    """A linear layer whose outputs are computed in equal parts by the ranks of `group`; None computes all here.

    Each rank has features of its own [batch, width]. Those of all go to all, every rank makes its part of the outputs
    of them, and parts go back to whom they belong: [batch, outputs], as of the layer that is not split. Rows of the
    weight that others compute get no gradient here, so the mean over the ranks that data parallelism takes is the
    gradient of the whole layer.
    """

    group: ProcessGroup | None = None

    def forward(self, features: Tensor) -> Tensor:
        if self.group is None or self.group.size() == 1:
            return super().forward(features)
        ranks, rows = self.group.size(), self._rows(self.group)
        everyone = _exchange(features.repeat(ranks, 1), self.group)
        parts = _exchange(F.linear(everyone, self.weight[rows], self.bias[rows]), self.group)
        return torch.cat(parts.chunk(ranks), dim=1)

    def _rows(self, group: ProcessGroup) -> slice:
        """Of this rank. ValueError where the ranks do not divide the outputs."""
        share, left = divmod(self.out_features, group.size())
        if left:
            raise ValueError(f"{self.out_features} outputs are not divisible by {group.size()} ranks")
        first = dist.get_rank(group) * share
        return slice(first, first + share)


def _exchange(rows: Tensor, group: ProcessGroup) -> Tensor:
    """The i-th of equal runs of `rows` goes to rank i of `group`; what came, in order of ranks. Differentiable."""
    return all_to_all_single_autograd(rows.contiguous(), None, None, group)


class Policy(nn.Module):
    """Windows [batch, frames, seen] to logits of actions [batch, actions] and values [batch].

    `group`: of the ranks that share the policy's head.
    """

    def __init__(self, frames: int, seen: int, actions: int, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.trunk = Trunk(frames, seen)
        self.policy = SplitHead(WIDTH, actions)
        self.policy.group = group
        self.value = nn.Linear(WIDTH, 1)
        for head in (self.policy, self.value):
            # All actions are about as likely at the beginning.
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(windows)
        return self.policy(features), self.value(features).squeeze(-1)
