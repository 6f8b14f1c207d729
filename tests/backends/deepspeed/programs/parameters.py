"""Programs with unusual parameters: shared, unused, conditional, frozen, sparse, huge, tiny."""

import random
from typing import Any

import deepspeed
import torch
from torch import nn

from tests.backends.deepspeed.programs.models import (
    Adapted,
    Branches,
    Checkpointed,
    Choosing,
    Chosen,
    Late,
    Nested,
    Odd,
    Quantized,
    Returning,
    Scripted,
    Words,
    network,
)
from tests.backends.deepspeed.programs.program import WIDTH, Program, Run

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "torch_adam": None}}, "zero_allow_untested_optimizer": True}
TWO = {"gradient_accumulation_steps": 2}

REDUCED_TWICE = {2: "has already been reduced"}
ALL = (0, 1, 2, 3)


class Branching:
    """Steps with one micro-step for each of `takes`, which names the branches that it uses."""

    def __init__(self, *takes: tuple[int, ...]) -> None:
        self.takes = takes

    def __call__(self, run: Run) -> None:
        engine = run.start(Branches(3), {"gradient_accumulation_steps": len(self.takes)})
        for _ in range(3):
            for take in self.takes:
                engine.backward(run.loss(engine, take=take))
                run.step(engine)


def other_branch_each_step(run: Run) -> None:
    engine = run.start(Branches(3))
    for step in range(6):
        engine.backward(run.loss(engine, take=(step % 3,)))
        run.step(engine)


def other_branch_on_each_rank(run: Run) -> None:
    engine = run.start(Branches(2))
    for _ in range(3):
        engine.backward(run.loss(engine, take=(run.rank,)))
        run.step(engine)


def leaf_module(run: Run) -> None:
    """Use different branches of a leaf module on the ranks, which ZeRO 3 allows."""
    model = Choosing()
    deepspeed.utils.set_z3_leaf_modules(model, [Chosen])
    engine = run.start(model)
    for step in range(4):
        engine.backward(run.loss(engine, number=step + run.rank))
        run.step(engine)


def layer_drop(run: Run) -> None:
    """Drop random layers, the same on every rank."""
    engine, choice = run.start(Branches(4), TWO), random.Random(5)
    for _ in range(10):
        take = tuple(layer for layer in range(4) if choice.random() < 0.5)
        engine.backward(run.loss(engine, take=take))
        run.step(engine)


def first_parameter_without_gradient(run: Run) -> None:
    run.learn(run.start(Late(), TWO), steps=4)


def frozen(run: Run) -> None:
    model = network()
    model[0].requires_grad_(False)
    model[4].bias.requires_grad_(False)
    run.learn(run.start(model, TWO), steps=4)


def frozen_and_left_out(run: Run) -> None:
    """Pass only the trained parameters to the optimizer."""
    model = network()
    model[0].requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run.learn(run.start(model, model_parameters=trained))


def unfrozen_later(run: Run) -> None:
    model = network()
    model[0].requires_grad_(False)
    engine = run.start(model)
    run.learn(engine, steps=2)
    model[0].requires_grad_(True)
    run.learn(engine, steps=2)


def frozen_later(run: Run) -> None:
    model = network()
    engine = run.start(model)
    run.learn(engine, steps=2)
    model[0].requires_grad_(False)
    run.learn(engine, steps=2)
    model[0].requires_grad_(True)
    run.learn(engine, steps=2)


def added_later(run: Run) -> None:
    """Add a layer to the model and to the optimizer of an engine, which only ZeRO 0 allows."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    engine = run.start(model, {"optimizer": None}, optimizer=optimizer)
    run.learn(engine, steps=2)
    model.append(nn.Linear(1, 1))
    optimizer.add_param_group({"params": list(model[-1].parameters())})
    run.learn(engine, steps=3)


def removed_later(run: Run) -> None:
    """Replace a layer of an engine's model by a frozen one."""
    model = network()
    engine = run.start(model)
    run.learn(engine, steps=3)
    model[2] = nn.Linear(31, 17).requires_grad_(False)
    run.learn(engine, steps=3)


class Learning:
    """Three steps of two micro-steps each, with the model that `build(*given)` returns."""

    def __init__(self, build: Any, *given: Any) -> None:
        self.build, self.given = build, given

    def __call__(self, run: Run) -> None:
        run.learn(run.start(self.build(*self.given), TWO), steps=6)


def tied(run: Run) -> None:
    run.learn(run.start(Words(tied=True), TWO), steps=6)


def sparse_embedding(run: Run) -> None:
    """Use `nn.Embedding(sparse=True)`, whose gradient is sparse, with an optimizer that accepts it."""
    model = Words(sparse=True)
    run.learn(run.start(model, SGD))


def sparse_adam(run: Run) -> None:
    """Use a client optimizer that consists of two, one of them SparseAdam."""
    model = Words(sparse=True)
    dense = [parameter for name, parameter in model.named_parameters() if name != "embedding.weight"]
    optimizer = _Both(dense, [model.embedding.weight])
    run.learn(run.start(model, {"optimizer": None, "gradient_clipping": 0.0}, optimizer=optimizer))


class _Both(torch.optim.Optimizer):
    def __init__(self, dense: list[nn.Parameter], sparse: list[nn.Parameter]) -> None:
        super().__init__([*dense, *sparse], {})
        self.inner = [torch.optim.Adam(dense, lr=1e-2), torch.optim.SparseAdam(sparse, lr=1e-2)]

    def step(self, closure: Any = None) -> None:
        for optimizer in self.inner:
            optimizer.step()


def huge_first_gradient(run: Run) -> None:
    """Use a last layer, whose gradient is ready first, that is larger than a bucket."""
    model = nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, 90), nn.Flatten(), nn.AdaptiveAvgPool1d(1))
    run.learn(run.start(model, TWO), steps=4)


def groups(run: Run) -> None:
    """Use parameter groups with their own learning rates. One group has a single small parameter."""
    model = network()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1][1:]
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    given = [
        {"params": decayed, "lr": 1e-2, "weight_decay": 0.1},
        {"params": biases[:1], "lr": 1e-3},
        {"params": [*biases[1:], model[0].weight]},
    ]
    run.learn(run.start(model, TWO, model_parameters=given), steps=4)


def empty_group(run: Run) -> None:
    model = network()
    given = [{"params": list(model.parameters())}, {"params": []}]
    run.learn(run.start(model, model_parameters=given))


def normalised(run: Run) -> None:
    """Use dropout, and buffers that forward changes differently on each rank."""
    model = nn.Sequential(nn.Linear(WIDTH, 17), nn.BatchNorm1d(17), nn.Dropout(0.2), nn.Linear(17, 1))
    run.learn(run.start(model, TWO), steps=4)
    run.keep("running mean", model[1].running_mean)


def not_contiguous(run: Run) -> None:
    """Use parameters whose elements are transposed in memory."""
    model = network()
    model[2].weight = nn.Parameter(model[2].weight.detach().t().contiguous().t())
    run.learn(run.start(model))


def parametrised(run: Run) -> None:
    model = network()
    torch.nn.utils.parametrizations.weight_norm(model[2])
    run.learn(run.start(model))


def many_small(run: Run) -> None:
    run.learn(run.start(Odd(*[(1 + index % 5,) for index in range(60)])))


PROGRAMS = (
    Program("used in the first of two micro-steps only", Branching((0, 1), (1,))),
    Program("used in the last of two micro-steps only", Branching((1,), (0, 1))),
    Program("used in every other of four micro-steps", Branching((0,), (1,), (0, 1), ())),
    Program("never used", Branching((0,))),
    Program(
        "never used, buckets of default size",
        Branching((0,), (1,)),
        config={"zero_optimization": {"reduce_bucket_size": None}},
    ),
    Program("another branch in each step", other_branch_each_step),
    Program("another branch on each rank", other_branch_on_each_rank, stages=(0,)),
    Program("another branch on each rank, leaf module", leaf_module, stages=(3,)),
    Program("layer drop", layer_drop),
    Program("first parameter without gradient", first_parameter_without_gradient),
    Program("frozen", frozen),
    Program("frozen, not given to the optimizer", frozen_and_left_out),
    Program("unfrozen later", unfrozen_later),
    Program("frozen later, for a time", frozen_later),
    Program("added later", added_later, stages=(0,)),
    Program("replaced later by frozen ones", removed_later, stages=(0, 1, 2)),
    Program("LoRA", Learning(Adapted)),
    Program("LoRA in a reentrant checkpoint", Learning(Adapted, 17, True)),
    Program("LoRA in a checkpoint", Learning(Adapted, 17, False)),
    Program("LoRA on packed codes in bytes", Learning(Quantized)),
    Program("LoRA on packed codes in fp32", Learning(Quantized, torch.float32)),
    Program(
        "LoRA on packed codes, gathered again",
        Learning(Quantized),
        stages=(3,),
        config={"zero_optimization": {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1}},
    ),
    Program("a part in TorchScript", Learning(Scripted), fails={3: "not supported on ScriptModules"}),
    Program(
        "layer shared between reentrant checkpoints",
        Learning(Checkpointed, True),
        fails={**REDUCED_TWICE, 3: "NoneType"},
    ),
    Program("layer shared between checkpoints", Learning(Checkpointed, False)),
    Program("several reentrant checkpoints", Learning(Checkpointed, True, 3), fails=REDUCED_TWICE),
    Program("tied embedding", tied),
    Program("module registered twice, nested", Learning(Nested)),
    Program("sparse embedding", sparse_embedding, fails={1: "Sparse", 2: "Sparse", 3: "sparse"}),
    Program("sparse embedding, SparseAdam", sparse_adam, stages=(0,)),
    Program("huge first gradient", huge_first_gradient),
    Program("huge embedding", Learning(Words, 300)),
    Program("parameter groups", groups),
    Program("an empty parameter group", empty_group),
    Program("fewer elements than ranks", Learning(Odd, (1,), (1, 1))),
    Program("0-dim parameters", Learning(Odd, (), (2,), ()), fails=dict.fromkeys(ALL, "dim() cannot be 0")),
    Program("zero-element parameters", Learning(Odd, (0,), (3,), (0, 4)), fails={3: "non-empty list"}),
    Program("sixty small parameters", many_small),
    Program("batch norm and dropout", normalised),
    Program("parameters that are not contiguous", not_contiguous, fails=dict.fromkeys(ALL, "stride(-1) must be 1")),
    Program("weight norm", parametrised),
    Program("dictionaries and tuples between modules", Learning(Returning)),
)
