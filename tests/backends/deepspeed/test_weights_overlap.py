"""Overlapped weights: the bits are those of steps that wait for them, whatever reads the weights and when."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import deepspeed_compress
from deepspeed_compress import ConfigError, UnsupportedError
from deepspeed_compress.collectives import weight_reduction
from deepspeed_compress.collectives.gather import DifferenceGather
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, make_engine, pipeline, train_on
from tests.support.methods import OFFLOAD

SAMPLED = pytest.mark.sampled(8)

WIDTH, STEPS = 12, 5
OWN_ADAM = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}


class Block(nn.Module):
    """Block that uses the matrix of a submodule without calling it, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.linear(torch.tanh(self.inner(self.norm(x))), self.out.weight, self.out.bias)


class Layers(nn.Module):
    """Model with unusual uses of layers.

    The first and last matrix are tied. One block is used twice, one is in a checkpoint, one is left out at times, and
    one is never trained.
    """

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
    """Call a part of the model without the engine."""
    return engine.module.blocks[4](x).flatten().tolist()


def loading(engine: Any, x: Tensor) -> None:
    """Load weights, which messages in flight must not overwrite."""
    engine.module.blocks[4].load_state_dict(
        {name: torch.full_like(one, 0.1) for name, one in Block().state_dict().items()}
    )


def copied(engine: Any, x: Tensor) -> list[float]:
    """Return a copy of the model's weights, and its outputs.

    Copying reads the model's parameters before its hooks run.
    """
    twin = copy.deepcopy(engine.module)
    values = torch.cat([parameter.detach().flatten() for parameter in twin.parameters()])
    return [*values.tolist(), *twin(x).flatten().tolist()]


def exact(engine: Any, x: Tensor) -> None:
    engine.compression.synchronise()


BETWEEN: Mapping[str, Callable[[Any, Tensor], Any]] = {
    one.__name__: one for one in (nothing, state, state_of_a_part, evaluation, outside, loading, copied, exact)
}


def section(overlap: bool, **extra: Any) -> dict[str, Any]:
    weights = {"bits": 4, "block_size": 32, "overlap": overlap}
    return {"gradients": {"bits": 4, "block_size": 32}, "weights": weights, **extra}


def train(engine: Any, rank: int, between: Callable[[Any, Tensor], Any], micro_steps: int) -> list[Any]:
    """Return the results of `between` after each step, the losses, and the final weights."""
    generator, found = torch.Generator().manual_seed(rank), []
    for _ in range(STEPS):
        for _ in range(micro_steps):
            x = torch.randn(3, WIDTH, generator=generator)
            found.append(train_on(engine, engine(x).square().mean()))
        found.append(between(engine, x))
    return [*found, state(engine, x)]


def start(stage: int, given: Mapping[str, Any], micro_steps: int, groups: bool, offloads: bool = False) -> Any:
    model = Layers()
    parameters: Any = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if groups:
        flat = [parameter for parameter in parameters if parameter.ndim == 1]
        parameters = [
            {"params": [parameter for parameter in parameters if parameter.ndim == 2]},
            {"params": flat, "weight_decay": 0.0},
        ]
    zero, extra = (OFFLOAD, OWN_ADAM) if offloads else ({}, {})
    config = Job(stage, given, zero, extra, accumulation=micro_steps).config()
    return make_engine(model, config, parameters)


def compare(rank: int, stage: int, ownership: str, name: str, offloads: bool = False) -> bool:
    """Return True if the results of a program are the same with and without overlap.

    Messages have 64 elements, so there are many rounds.
    """
    weight_reduction.DifferenceGather = partial(DifferenceGather, chunk_numel=64)
    seen, number = [], list(BETWEEN).index(name)
    for overlap in (False, True):
        engine = start(stage, section(overlap, ownership=ownership), 1 + number % 2, bool(number % 3), offloads)
        seen.append(train(engine, rank, BETWEEN[name], 1 + number % 2))
        engine.destroy()
    return seen[0] == seen[1]


class Scaled(nn.Module):
    """Parametrization that scales a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.scale


class Unseen(nn.Module):
    """Model that reads weights without calling the modules that own them.

    Its list of modules makes it compute layer by layer.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        matrices = (nn.Parameter(torch.randn(WIDTH, WIDTH) / 4) for _ in range(8))
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.adapters = nn.ModuleList(nn.Module() for _ in range(1))
        self.adapters[0].lora_embedding_A = nn.ParameterDict({"default": next(matrices)})
        self.listed = nn.ParameterList([next(matrices), next(matrices)])
        self.child, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.owner = nn.Module()
        self.owner.encode, self.owner.matrix = self.encode, next(matrices)
        self.parametrized = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.parametrized, "weight", Scaled())
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.calls = 0

    def encode(self, x: Tensor) -> Tensor:
        return x @ self.owner.matrix

    def forward(self, x: Tensor, how: str) -> Tensor:
        self.calls += self.training
        return torch.tanh(self.blocks[1](torch.tanh(getattr(self, how)(self.blocks[0](x)))))

    def in_a_dict(self, x: Tensor) -> Tensor:
        return x @ self.adapters[0].lora_embedding_A["default"]

    def in_a_list(self, x: Tensor) -> Tensor:
        return torch.stack([x @ one for one in self.listed]).sum(0)

    def stacked(self, x: Tensor) -> Tensor:
        return x @ torch.stack(list(self.listed))[0]

    def of_a_child(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, weight=self.child.weight, bias=self.child.bias)

    def now_and_then(self, x: Tensor) -> Tensor:
        """Call a child in some passes, and only read its weights in others."""
        return self.other(x) if self.calls % 2 else x @ self.other.weight

    def by_a_method(self, x: Tensor) -> Tensor:
        return self.owner.encode(x)

    def by_a_parametrization(self, x: Tensor) -> Tensor:
        return x @ self.parametrized.weight

    def by_its_data(self, x: Tensor) -> Tensor:
        return x @ torch.from_numpy(self.child.weight.data.numpy().copy())

    def of_the_lstm(self, x: Tensor) -> Tensor:
        return x @ self.lstm.weight_hh_l0[:WIDTH]


READS = [name for name, one in vars(Unseen).items() if callable(one) and name not in ("__init__", "encode", "forward")]


def compare_reads(rank: int, how: str) -> bool:
    """Return True if a way to read weights leads to the same losses with and without overlap."""
    weight_reduction.DifferenceGather = partial(DifferenceGather, chunk_numel=64)
    seen = []
    for overlap in (False, True):
        model = Unseen()
        engine = make_engine(model, Job(1, section(overlap, monitor={"announce": False})).config())
        generator, losses = torch.Generator().manual_seed(rank), []
        for _ in range(STEPS):
            x = torch.randn(3, WIDTH, generator=generator)
            loss = engine(x, how).square().mean()
            # Train all weights, so that a stale read has a different value. This also reads all weights after forward.
            loss = loss + sum((parameter.square().mean() for parameter in model.parameters()), torch.zeros(()))
            losses.append(train_on(engine, loss))
        seen.append(losses)
        engine.destroy()
    return seen[0] == seen[1]


@SAMPLED
@pytest.mark.parametrize("how", READS)
def test_weights_that_are_read_without_a_call_of_their_module(how: str) -> None:
    assert run_forks(2, compare_reads, how) == [True] * 2


def fail_in_forward(rank: int) -> bool:
    """Return True if a forward pass that raises leaves no function mode of torch behind, and the next one works."""
    weight_reduction.DifferenceGather = partial(DifferenceGather, chunk_numel=64)
    engine, x = start(1, section(True), 1, False), torch.ones(3, WIDTH)
    train_on(engine, engine(x).square().mean())
    with pytest.raises(RuntimeError):
        engine(torch.ones(3, WIDTH + 1))
    train_on(engine, engine(x).square().mean())
    return len(torch.overrides._get_current_function_mode_stack()) == 0


def test_a_forward_pass_that_raises_leaves_nothing_behind() -> None:
    assert run_forks(2, fail_in_forward) == [True, True]


@SAMPLED
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize(("stage", "ownership"), [(1, "contiguous"), (2, "balanced")])
def test_bits_are_those_of_waiting(stage: int, ownership: str, name: str) -> None:
    assert run_forks(2, compare, stage, ownership, name) == [True] * 2


@pytest.mark.parametrize("stage", [1, 2])
def test_bits_are_those_of_waiting_with_optimizer_states_on_the_host(stage: int) -> None:
    assert run_forks(2, compare, stage, "contiguous", "state", True) == [True] * 2


def stale(rank: int) -> list[bool]:
    """Return whether the last block's weights are stale after a step until each of three calls waits for them."""
    weight_reduction.DifferenceGather = partial(DifferenceGather, chunk_numel=64)
    engine = start(1, section(True), 1, False)
    weight, x = engine.module.blocks[4].out.weight, torch.ones(3, WIDTH)
    found = []
    for look in (
        engine.module.blocks[4],
        lambda _: engine.module.state_dict(),
        lambda _: deepspeed_compress.detach(engine),
    ):
        train_on(engine, engine(x).square().mean())
        before = weight.detach().clone()
        look(x)
        found.append(not torch.equal(before, weight))
    return found


def test_weights_come_later_and_when_they_are_needed() -> None:
    assert run_forks(2, stale) == [[True] * 3] * 2


def log_norms(rank: int, waits: bool) -> tuple[bool, bool]:
    """Read all parameters after each step.

    Return whether each element was that of the step before or of this one, and whether all were of this one.
    """
    weight_reduction.DifferenceGather = partial(DifferenceGather, chunk_numel=64)
    engine, x = start(1, section(True), 1, False), torch.ones(3, WIDTH)
    one_of_both, all_new = True, True
    for _ in range(STEPS):
        before = torch.tensor(state(engine, x))
        train_on(engine, engine(x).square().mean())
        if waits and rank == 0:
            engine.module.state_dict()
        # Use the order of `state`, which has a tied matrix twice.
        tied = engine.module.named_parameters(remove_duplicate=False)
        order = {name: parameter.detach().clone() for name, parameter in tied}
        seen = torch.cat([order[name].flatten() for name in engine.module.state_dict()])
        after = torch.tensor(state(engine, x))
        one_of_both &= bool(((seen == before) | (seen == after)).all())
        all_new &= torch.equal(seen, after)
    return one_of_both, all_new


def test_readers_before_the_next_forward_find_old_or_new_weights() -> None:
    assert run_forks(2, log_norms, False) == [(True, False)] * 2


def test_a_state_dict_on_one_rank_waits_for_weights_without_the_others() -> None:
    """`compare` shows that these weights equal those without overlap."""
    assert run_forks(2, log_norms, True)[0] == (True, True)


def with_pipeline(rank: int) -> None:
    deepspeed.init_distributed("gloo")
    make_engine(pipeline(2), Job(1, section(True)).config())


def test_pipelines_are_refused() -> None:
    with pytest.raises(RankError, match=f"{UnsupportedError.__name__}: /deepspeed_compress/weights/overlap.*pipeline"):
        run_forks(2, with_pipeline)


def with_script(rank: int) -> None:
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    make_engine(model, Job(1, section(True)).config())


def test_a_scripted_module_is_refused_by_name() -> None:
    refusal = f"{UnsupportedError.__name__}: /deepspeed_compress/weights/overlap: true cannot be combined with 1, which"
    with pytest.raises(RankError, match=refusal):
        run_forks(2, with_script)


@pytest.mark.parametrize("extra", [{"parallelism": {"zero_stage": 3}}, {"parallelism": {"pipeline": 2}}])
def test_unsupported_combinations_are_refused(extra: dict[str, Any]) -> None:
    given = section(True, **extra)
    given["weights"]["bits"] = 8
    config = {key: value for key, value in Job(1, given).config().items() if key != "zero_optimization"}
    with pytest.raises(ConfigError, match="/deepspeed_compress/weights/overlap: true"):
        deepspeed_compress.initialize(model=nn.Linear(2, 2), config={**config, "zero_optimization": {}})
