"""Network of an agent: a small GPT over the last frames, and two heads."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed._functional_collectives import all_to_all_single_autograd

__all__ = ["Policy", "SplitHead", "Trunk"]

WIDTH, LAYERS, HEADS = 32, 2, 4


class Trunk(nn.Module):
    """Causal pre-norm transformer that returns the features of the last frame.

    It maps [batch, frames, seen] to [batch, WIDTH].
    """

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
    """Linear layer whose outputs are computed in equal parts by the ranks of `group`. None computes all outputs here.

    Each rank has its own features [batch, width]. All ranks receive the features of all, compute their part of the
    outputs, and send the parts back. The result [batch, outputs] is that of an unsplit layer. Rows of the weight that
    other ranks compute get no gradient here, so the data-parallel mean is the gradient of the whole layer.
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
        """Return the rows of this rank.

        Raises:
            ValueError: The number of outputs is not divisible by the number of ranks.
        """
        share, left = divmod(self.out_features, group.size())
        if left:
            raise ValueError(f"{self.out_features} outputs are not divisible by {group.size()} ranks")
        first = dist.get_rank(group) * share
        return slice(first, first + share)


def _exchange(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Send the i-th of equal parts of `rows` to rank i, and return the received parts in rank order. Differentiable."""
    return all_to_all_single_autograd(rows.contiguous(), None, None, group)


class Policy(nn.Module):
    """Policy and value network.

    It maps windows [batch, frames, seen] to logits [batch, actions] and values [batch]. The ranks of `group` split the
    policy head.
    """

    def __init__(self, frames: int, seen: int, actions: int, group: ProcessGroup | None = None) -> None:
        super().__init__()
        self.trunk = Trunk(frames, seen)
        self.policy = SplitHead(WIDTH, actions)
        self.policy.group = group
        self.value = nn.Linear(WIDTH, 1)
        for head in (self.policy, self.value):
            # Start with nearly equal probabilities of all actions.
            nn.init.normal_(head.weight, std=0.01)
            nn.init.zeros_(head.bias)

    def forward(self, windows: Tensor) -> tuple[Tensor, Tensor]:
        features = self.trunk(windows)
        return self.policy(features), self.value(features).squeeze(-1)
