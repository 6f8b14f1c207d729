"""Random programs: models of random parts, trained in random ways."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.backends.deepspeed.programs.program import WIDTH, Program, Run

HIDDEN = 17


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, HIDDEN, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.embedding((x[:, :3] > 0).long() @ torch.tensor([4, 2, 1]))


PARTS: Mapping[str, Callable[[], nn.Module]] = {
    "layer": lambda: nn.Linear(HIDDEN, HIDDEN),
    "huge": lambda: nn.Sequential(nn.Linear(HIDDEN, 60), nn.Linear(60, HIDDEN)),
    "frozen": lambda: nn.Linear(HIDDEN, HIDDEN).requires_grad_(False),
    "adapter": lambda: nn.Sequential(nn.Linear(HIDDEN, 2).requires_grad_(False), nn.Linear(2, HIDDEN)),
    "norm": lambda: nn.LayerNorm(HIDDEN),
    "tiny": Tiny,
    "sparse": Rows,
}
"""Parts of a model by name. `huge` is larger than a bucket."""


class Assembled(nn.Module):
    """Parts between a body and a head. If `shared`, the last part is the first one again."""

    def __init__(self, parts: Sequence[str], shared: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, 1)
        made = [PARTS[part]() for part in parts]
        self.parts = nn.ModuleList([*made, made[0]] if shared else made)

    def forward(self, x: Tensor, take: Sequence[int]) -> Tensor:
        x = self.body(x)
        for index in take:
            x = x + torch.tanh(self.parts[index % len(self.parts)](x))
        return self.head(x)


@dataclass(frozen=True)
class Step:
    """Step with an event before it, and the parts that each micro-step uses."""

    event: str
    takes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Drawn:
    """Random program. `style` is the way in which the engine learns of micro-steps."""

    parts: tuple[str, ...]
    shared: bool
    style: str
    steps: tuple[Step, ...]
    config: Mapping[str, Any]

    def __call__(self, run: Run) -> None:
        engine = run.start(Assembled(self.parts, self.shared), self.config)
        for step in self.steps:
            EVENTS[step.event](run, engine)
            STYLES[self.style](run, engine, step.takes)


def no_event(run: Run, engine: Any) -> None:
    pass


def evaluate(run: Run, engine: Any) -> None:
    engine.eval()
    with torch.no_grad():
        run.loss(engine, take=(0, 1))
    engine.train()


def save(run: Run, engine: Any) -> None:
    engine.save_checkpoint(run.directory)


def save_and_load(run: Run, engine: Any) -> None:
    engine.save_checkpoint(run.directory)
    engine.load_checkpoint(run.directory)


EVENTS = MappingProxyType({"": no_event, "evaluation": evaluate, "saving": save, "loading": save_and_load})


def managed(run: Run, engine: Any, takes: Sequence[tuple[int, ...]]) -> None:
    for take in takes:
        engine.backward(run.loss(engine, take=take))
        run.step(engine)


def announced(run: Run, engine: Any, takes: Sequence[tuple[int, ...]]) -> None:
    for index, take in enumerate(takes):
        engine.set_gradient_accumulation_boundary(index == len(takes) - 1)
        engine.backward(run.loss(engine, take=take))
    run.step(engine)


def several(run: Run, engine: Any, takes: Sequence[tuple[int, ...]]) -> None:
    for take in takes:
        engine.backward(run.loss(engine, take=take))
    run.step(engine)


def one_sum(run: Run, engine: Any, takes: Sequence[tuple[int, ...]]) -> None:
    engine.backward(sum(run.loss(engine, take=take) for take in takes))
    run.step(engine)


def no_sync(run: Run, engine: Any, takes: Sequence[tuple[int, ...]]) -> None:
    for index, take in enumerate(takes):
        with nullcontext() if index == len(takes) - 1 else engine.no_sync():
            engine.backward(run.loss(engine, take=take))
    run.step(engine)


def coalesced(run: Run, engine: Any, takes: Sequence[tuple[int, ...]]) -> None:
    with engine.coalesce_grad_reduction():
        for take in takes:
            engine.backward(run.loss(engine, take=take))
    run.step(engine)


STYLES = MappingProxyType(
    {
        "managed": managed,
        "announced": announced,
        "several": several,
        "unmanaged": several,
        "one sum": one_sum,
        "no_sync": no_sync,
        "coalesced": coalesced,
    }
)
OF_STAGE: Mapping[int, tuple[str, ...]] = {
    0: ("managed", "announced", "several", "unmanaged", "one sum", "no_sync"),
    1: ("managed", "announced", "several", "unmanaged", "one sum", "no_sync", "coalesced"),
    2: ("managed", "announced", "several", "unmanaged", "one sum", "coalesced"),
    3: ("managed", "announced", "several", "unmanaged", "one sum", "coalesced"),
}
"""Styles that DeepSpeed supports, by ZeRO stage."""
SGD = {"type": "SGD", "params": {"lr": 0.1, "torch_adam": None}}


@st.composite
def programs(draw: st.DrawFn, stage: int) -> Program:
    kinds = sorted(PARTS) if stage == 0 else sorted(set(PARTS) - {"sparse"})
    parts = tuple(draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=4)))
    style = draw(st.sampled_from(OF_STAGE[stage]))
    micro_steps = draw(st.integers(1, 3))
    count = st.just(micro_steps) if style == "managed" else st.integers(1, 3)
    steps = tuple(draw(st.lists(_steps(len(parts), count), min_size=2, max_size=4)))
    config = {
        "gradient_accumulation_steps": micro_steps if style == "managed" else 1,
        "gradient_clipping": draw(st.sampled_from([0.0, 0.3])),
        "zero_optimization": {
            "reduce_bucket_size": draw(st.sampled_from([600, None])),
        },
        **({"managed_gradient_accumulation": False} if style == "unmanaged" else {}),
        **({"optimizer": SGD} if "sparse" in parts else {}),
        **({"bf16": {"enabled": True}} if "sparse" not in parts and draw(st.booleans()) else {}),
    }
    drawn = Drawn(parts, draw(st.booleans()), style, steps, config)
    return Program(repr(drawn), drawn)


def _steps(parts: int, count: st.SearchStrategy[int]) -> st.SearchStrategy[Step]:
    take = st.lists(st.integers(0, parts), max_size=3).map(tuple)
    takes = count.flatmap(lambda micro_steps: st.tuples(*[take] * micro_steps))
    return st.builds(Step, st.sampled_from(sorted(EVENTS)), takes)
