"""A small model with two branches, its training, and its compression under DDP."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import deepspeed_compress
from deepspeed_compress import UnsupportedError
from deepspeed_compress.config import SECTION
from tests.support import messages
from tests.support.seeds import SEEDS, TEXT

FOUR_BITS = {
    "gradients": {
        "method": "blockwise",
        "bits": 4,
        "block_size": 32,
        "error_feedback": {"dtype": "fp32"},
        "min_numel": 0,
    }
}


QUIET = {"monitor": {"announce": False}}


WIDTH = 12


class Branches(nn.Module):
    """A network with two branches, of which a batch uses one or both."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 31)
        self.left, self.right = nn.Linear(31, 17), nn.Linear(31, 17)
        self.last = nn.Linear(17, 1)

    def forward(self, x: Tensor, ways: str = "both") -> Tensor:
        hidden = torch.tanh(self.first(x))
        taken = [way(hidden) for name, way in (("left", self.left), ("right", self.right)) if ways in (name, "both")]
        return self.last(torch.tanh(torch.stack(taken).sum(0)))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the inputs and targets of a rank in a step."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(5, WIDTH, generator=generator)
    return x, x[:, :3].sum(dim=1, keepdim=True)


def start() -> None:
    """Join the ranks of the job, unless this rank has done so."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")


def section(given: Mapping[str, Any]) -> dict[str, Any]:
    return {SECTION: {**QUIET, **given}}


@dataclass(frozen=True)
class Setting:
    """A model under DDP. Its buckets are small, so there are several, and DDP rebuilds them.

    Attributes:
        section: the section; None to leave the model uncompressed.
        options: arguments of DDP.
        lr: learning rate of SGD.
    """

    section: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.05

    def build(self, scaler: Any = None, group: Any = None) -> tuple[DistributedDataParallel, Any, Any]:
        start()
        model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001, process_group=group, **self.options)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.0)
        attached = None
        if self.section is not None:
            attached = deepspeed_compress.ddp.attach(model, section(self.section), optimizer, scaler)
        return model, optimizer, attached


def loss_of(model: nn.Module, rank: int, step: int, ways: str = "both") -> Tensor:
    x, y = batch(rank, step)
    return (model(x, ways) - y).square().mean()


def residual_sums(attached: Any, sizes: Mapping[str, int], stores: Sequence[str] = ()) -> dict[str, Tensor]:
    """Return the sum of this rank's residual stores, of all or of the named ones, by parameter.

    `sizes` maps parameters to their sizes.
    """
    found = {name: torch.zeros(numel) for name, numel in sizes.items()}
    for kind, store in attached.session.residuals.by_name.items():
        for (name, begin, numel), values in store.items() if not stores or kind in stores else ():
            found[name][begin : begin + numel] += values
    return found


def same_on_all(value: Tensor, group: dist.ProcessGroup | None = None) -> bool:
    """Return True if `value` has the same bits on all ranks of `group`, or of the job if None."""
    every = [torch.empty_like(value) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, value.contiguous(), group=group)
    return all(torch.equal(every[0].nan_to_num(7.0), one.nan_to_num(7.0)) for one in every)


def bits_of(attached: Any) -> dict[str, list[int]]:
    """Return the bytes of all residual stores, without updates that a skipped step would discard."""
    return {
        f"{name}/{layout}": payload.tolist()
        for name, store in attached.session.residuals.by_name.items()
        for layout, payload in store.payloads()
        if payload.any()
    }


STOCHASTIC = {"gradients": {"method": "stochastic_linear", "bits": 4, "block_size": 32, "min_numel": 0}}


NO_FEEDBACK = {"gradients": {"method": "qsgd", "levels": 7, "block_size": 32, "min_numel": 0}}


LOW_RANK = {"gradients": {"method": "powersgd", "rank": 2}}


def plain(model: nn.Module, rank: int, step: int) -> None:
    """Compute the gradients of a step."""
    loss_of(model, rank, step).backward()


def look_first(model: nn.Module, rank: int, step: int) -> None:
    """Compute gradients that are inspected and discarded before those of the step."""
    plain(model, rank, step + 50)
    model.zero_grad()
    plain(model, rank, step)


def whole(parameter: Tensor) -> Tensor:
    """Return the whole of a parameter that may be sharded."""
    return parameter.full_tensor().detach() if isinstance(parameter, DTensor) else parameter.detach()


def take_steps(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: Sequence[int]
) -> list[list[float]]:
    """Train `steps`, and return the weights."""
    for step in steps:
        optimizer.zero_grad()
        plain(model, rank, step)
        optimizer.step()
    return [whole(parameter).flatten().tolist() for parameter in model.parameters()]


def refusal(work: Callable[[], object]) -> str:
    """Return the message of the UnsupportedError that `work` raises, or "" if it raises none."""
    return messages.refusal(UnsupportedError, work)


def loss_on_text(model: nn.Module, optimizer: Any, seed: int, rank: int) -> float:
    """Train a language model on a text, and return the mean loss of the last 20 steps."""
    losses = []
    for rows in _rows_of_text(seed, rank):
        optimizer.zero_grad()
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / 20


def _rows_of_text(seed: int, rank: int, steps: int = 40) -> Iterator[Tensor]:
    """Yield a rank's batches of four rows of a text."""
    text = torch.tensor(list(TEXT.read_bytes()[:8192])).clamp(max=127).view(-1, 64)
    generator = torch.Generator().manual_seed(10 * seed + rank)
    for _ in range(steps):
        yield text[torch.randint(len(text), (4,), generator=generator)]


def train_together(rank: int, all_four: Any, first: Any, of_pair: Any, second: Any) -> tuple[bool, bool]:
    """Train a model of all four ranks and one of each pair of ranks at once, with an optimizer for each of them.

    Return whether all ranks have the same weights of the former, and only the ranks of a pair those of the latter.
    """
    for step in range(4):
        first.zero_grad()
        second.zero_grad()
        (loss_of(all_four, rank, step) + loss_of(of_pair, rank, step)).backward()
        first.step()
        second.step()
    gathered: list[Any] = [None] * 4
    dist.all_gather_object(gathered, [whole(parameter).flatten().tolist() for parameter in of_pair.parameters()])
    apart = gathered[0] == gathered[1] and gathered[2] == gathered[3] and gathered[0] != gathered[2]
    return all(same_on_all(whole(parameter)) for parameter in all_four.parameters()), apart


Gpt = tuple[float, list[Any], int]
"""The loss, the figures of every step, and the number of elements of a model."""


def gpts(
    rank: int, wrap: Callable[[Any], Any], attach: Callable[..., Any], given: Mapping[str, Any], directory: Path
) -> list[Gpt]:
    """Train a small GPT-2 on one text for each seed, after wrapping it and attaching a section to it."""
    start()
    return [_gpt(rank, wrap, attach, {**given, "monitor": {"path": f"{directory}/{seed}"}}, seed) for seed in SEEDS]


def _gpt(rank: int, wrap: Callable[[Any], Any], attach: Callable[..., Any], given: Mapping[str, Any], seed: int) -> Gpt:
    torch.manual_seed(seed)
    config = transformers.GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=64)
    model = wrap(transformers.GPT2LMHeadModel(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    figures: list[Any] = []
    attach(model, section(given), optimizer).session.subscribe(figures.append)
    loss = loss_on_text(model, optimizer, seed, rank)
    assert all(same_on_all(whole(parameter)) for parameter in model.parameters())
    return loss, figures, sum(parameter.numel() for parameter in model.parameters())


def late_refusals(rank: int, works: Sequence[Callable[[], object]]) -> list[str]:
    """Return the message of each refusal that is raised late, or "" without one."""
    start()
    return [refusal(work) for work in works]
