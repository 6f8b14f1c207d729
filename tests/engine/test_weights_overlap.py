"""Weights on their way while forward begins: the bits of a step that waits for them, whoever reads them and when."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import deepspeed_compress
from deepspeed_compress import ConfigError, UnsupportedError
from deepspeed_compress.communication import reduction
from deepspeed_compress.communication.gather import DifferenceGather
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, pipeline

WIDTH, STEPS = 12, 5


class Block(nn.Module):
    """Computes with the matrix of a part that it does not call, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(torch.tanh(self.inner(self.norm(x))), self.out.weight, self.out.bias)


class Layers(nn.Module):
    """A tied first and last matrix, a block that is used twice, one in a checkpoint, one that is left out at times, and
    one that is never trained."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.blocks[3].requires_grad_(False)
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        x = self.blocks[0](self.blocks[0](self.first(x) + self.shift))
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        if self.calls % 3:
            x = self.blocks[2](x)
        return self.last(self.blocks[4](self.blocks[3](x)))


def nothing(engine: Any, x: Tensor) -> None:
    return None


def state(engine: Any, x: Tensor) -> list[float]:
    return torch.cat([value.flatten() for value in engine.module.state_dict().values()]).tolist()


def state_of_a_part(engine: Any, x: Tensor) -> list[float]:
    return engine.module.blocks[4].state_dict()["out.weight"].flatten().tolist()


def evaluation(engine: Any, x: Tensor) -> list[float]:
    engine.eval()
    with torch.no_grad():
        found = engine(x).flatten().tolist()
    engine.train()
    return found


def outside(engine: Any, x: Tensor) -> list[float]:
    """A part of the model, called without the engine."""
    return engine.module.blocks[4](x).flatten().tolist()


def loading(engine: Any, x: Tensor) -> None:
    """What is loaded must not be overtaken by what was under way."""
    engine.module.blocks[4].load_state_dict(
        {name: torch.full_like(one, 0.1) for name, one in Block().state_dict().items()}
    )


def copied(engine: Any, x: Tensor) -> list[float]:
    """A copy of the model, and what it computes; the parameter of the model itself is copied before its hooks."""
    twin = copy.deepcopy(engine.module)
    values = torch.cat([one.detach().flatten() for one in twin.parameters()])
    return [*values.tolist(), *twin(x).flatten().tolist()]


def exact(engine: Any, x: Tensor) -> None:
    engine.compression.synchronise()


BETWEEN: Mapping[str, Callable[[Any, Tensor], Any]] = MappingProxyType(
    {one.__name__: one for one in (nothing, state, state_of_a_part, evaluation, outside, loading, copied, exact)}
)


def section(overlap: bool, **extra: Any) -> dict[str, Any]:
    weights = {"bits": 4, "block_size": 32, "overlap": overlap}
    return {"gradients": {"bits": 4, "block_size": 32}, "weights": weights, **extra}


def train(engine: Any, rank: int, between: Callable[[Any, Tensor], Any], micro_steps: int) -> list[Any]:
    """What `between` sees after each step, the losses, and all weights at the end."""
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        for _ in range(micro_steps):
            x = torch.randn(3, WIDTH, generator=generator)
            loss = engine(x).square().mean()
            engine.backward(loss)
            found.append(float(loss))
            engine.step()
        found.append(between(engine, x))
    return [*found, state(engine, x)]


def start(stage: int, given: Mapping[str, Any], micro_steps: int, groups: bool) -> Any:
    model = Layers()
    parameters: Any = [one for one in model.parameters() if one.requires_grad]
    if groups:
        flat = [one for one in parameters if one.ndim == 1]
        parameters = [{"params": [one for one in parameters if one.ndim == 2]}, {"params": flat, "weight_decay": 0.0}]
    config = Job(stage, given, accumulation=micro_steps).config()
    return deepspeed_compress.initialize(model=model, model_parameters=parameters, config=config)[0]


def compare(rank: int, stage: int, ownership: str) -> dict[str, bool]:
    """By program, whether it sees the same bits with and without overlap. Messages of 64 elements: many rounds."""
    reduction.DifferenceGather = partial(DifferenceGather, chunk_numel=64)
    same = {}
    for number, (name, between) in enumerate(BETWEEN.items()):
        seen = []
        for overlap in (False, True):
            engine = start(stage, section(overlap, ownership=ownership), 1 + number % 2, bool(number % 3))
            seen.append(train(engine, rank, between, 1 + number % 2))
            engine.destroy()
        same[name] = seen[0] == seen[1]
    return same


@pytest.mark.parametrize(("stage", "ownership"), [(1, "contiguous"), (2, "balanced")])
def test_bits_are_those_of_waiting(stage: int, ownership: str) -> None:
    for same in run_forks(2, compare, stage, ownership):
        assert same == dict.fromkeys(BETWEEN, True)


def stale(rank: int) -> list[bool]:
    """After a step: whether the last block's weights are still to come; after each of: its forward, a step without
    forward, `detach`, whether nothing is."""
    reduction.DifferenceGather = partial(DifferenceGather, chunk_numel=64)
    engine = start(1, section(True), 1, False)
    weight, x = engine.module.blocks[4].out.weight, torch.ones(3, WIDTH)
    found = []
    for look in (
        engine.module.blocks[4],
        lambda _: engine.module.state_dict(),
        lambda _: deepspeed_compress.detach(engine),
    ):
        engine.backward(engine(x).square().mean())
        engine.step()
        before = weight.detach().clone()
        look(x)
        found.append(not torch.equal(before, weight))
    return found


def test_weights_come_later_and_when_they_are_needed() -> None:
    assert run_forks(2, stale) == [[True] * 3] * 2


def with_pipeline(rank: int) -> None:
    import deepspeed

    deepspeed.init_distributed("gloo")
    model, job = pipeline(2), Job(1, section(True))
    deepspeed_compress.initialize(model=model, model_parameters=list(model.parameters()), config=job.config())


def test_pipelines_are_refused() -> None:
    with pytest.raises(RankError, match=f"{UnsupportedError.__name__}: /deepspeed_compress/weights/overlap.*pipeline"):
        run_forks(2, with_pipeline)


@pytest.mark.parametrize("extra", [{"parallelism": {"zero_stage": 3}}, {"parallelism": {"pipeline": 2}}])
def test_what_it_cannot_be_combined_with(extra: dict[str, Any]) -> None:
    given = section(True, **extra)
    given["weights"]["bits"] = 8
    config = {key: value for key, value in Job(1, given).config().items() if key != "zero_optimization"}
    with pytest.raises(ConfigError, match="/deepspeed_compress/weights/overlap: true"):
        deepspeed_compress.initialize(model=nn.Linear(2, 2), config={**config, "zero_optimization": {}})
