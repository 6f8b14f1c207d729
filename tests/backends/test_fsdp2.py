"""Tests of `deepspeed_compress.fsdp2`: FSDP2 programs with and without compression, in the same processes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import deepspeed_compress
from tests.backends.contract.branches import gradients
from tests.backends.contract.fsdp2 import BF16, HSDP, KEPT, freeze, reducing_twice
from tests.support import messages
from tests.support.forks import run_forks
from tests.support.methods import NONE
from tests.support.seeds import Excess
from tests.support.sharded import WEIGHTS, Setting
from tests.support.two_branches import (
    FOUR_BITS,
    LOW_RANK,
    STOCHASTIC,
    WIDTH,
    Branches,
    batch,
    gpts,
    late_refusals,
    loss_of,
    plain,
    refusal,
    same_on_all,
    section,
    start,
    take_steps,
    train_together,
)

pytestmark = pytest.mark.sampled(20)


def interrupt(module: Any, gradients: Any) -> None:
    raise ZeroDivisionError


def load_after_an_interruption(rank: int, directory: str, interrupted: bool) -> list[list[float]]:
    """Return the final weights after a backward pass raised with two units reduced, and a new model loaded."""
    model, optimizer, attached = Setting(STOCHASTIC).build()
    take_steps(model, optimizer, rank, range(3))
    attached.save(directory)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    if interrupted:
        handle = model.first.register_full_backward_pre_hook(interrupt)
        with pytest.raises(ZeroDivisionError):
            plain(model, rank, 50)
        handle.remove()
        attached.load(directory)
    model, optimizer, attached = Setting(STOCHASTIC).build()
    model.load_state_dict(saved)
    attached.load(directory)
    return take_steps(model, optimizer, rank, range(3, 6))


def test_nothing_of_an_interrupted_backward_pass_gets_into_a_new_model(tmp_path: Path) -> None:
    alone = run_forks(2, load_after_an_interruption, str(tmp_path), False)
    assert run_forks(2, load_after_an_interruption, str(tmp_path), True) == alone


def load_other_copies(rank: int, directory: str) -> str:
    for mesh in (HSDP, (4,)):
        model, optimizer, attached = Setting(FOUR_BITS, mesh).build()
        if mesh == HSDP:
            take_steps(model, optimizer, rank, range(2))
            attached.save(directory)
    return messages.refusal(deepspeed_compress.StateError, attached.load, directory)


def test_copies_cannot_become_other_copies(tmp_path: Path) -> None:
    for text in run_forks(4, load_other_copies, str(tmp_path)):
        assert "saved by 4 ranks, 2 of them on each node, but this run has 4" in text


def sent_between(rank: int, given: Mapping[str, Any], setting: Setting) -> tuple[dict[str, Any], int, int]:
    """Return the statistics of a step, and the numbers of elements of a rank's shard and of the model."""
    model, optimizer, attached = replace(setting, section={**given, "monitor": {"announce": False}}).build()
    figures: list[Any] = []
    attached.session.subscribe(figures.append)
    take_steps(model, optimizer, rank, range(2))
    shapes = [parameter.shape for parameter in model.parameters()]
    part = sum(-(-shape[0] // 2) * shape[1:].numel() for shape in shapes)
    # The first rank tells of itself.
    return (vars(figures[-1]) if figures else {}), part, sum(shape.numel() for shape in shapes)


def test_between_copies_parts_are_compressed_and_inside_nothing() -> None:
    none, part, numel = run_forks(4, sent_between, NONE, Setting(mesh=HSDP))[0]
    ours, *_ = run_forks(4, sent_between, FOUR_BITS, Setting(mesh=HSDP))[0]
    # gloo reduce-scatters two ranks by an all-reduce, and the copies of a part are two as well.
    assert none["bytes_sent"] == none["bytes_uncompressed"] == ours["bytes_uncompressed"] == 4 * (2 * part + part)
    inside = 4 * (numel - part)
    assert abs(ours["bytes_raw"] - inside) <= 4 * 40
    assert ours["bytes_sent"] - ours["bytes_raw"] < part * 4 / 6


def divided(rank: int) -> tuple[bool, bool]:
    """Train two models at once: one on all four ranks, in two levels, and one on each pair, on a part of a mesh."""
    start()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "place"))
    nodes = {"gradients": {**FOUR_BITS["gradients"], "hierarchy": {"ranks_per_node": 2}}}
    return train_together(rank, *Setting(nodes).build()[:2], *Setting(FOUR_BITS).build(mesh=mesh["place"])[:2])


def test_several_models_and_meshes() -> None:
    assert run_forks(4, divided) == [(True, True)] * 4


def one_alone(rank: int) -> bool:
    """Train on a mesh of one rank within a larger job, which sends nothing and changes nothing."""
    start()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"]
    both = {**FOUR_BITS, "weights": {"bits": 4}}
    with pytest.warns(deepspeed_compress.CompressWarning, match="data-parallel size is 1"):
        model, optimizer, _ = Setting(both).build(mesh=mesh)
    alone, other, _ = Setting().build(mesh=mesh)
    return take_steps(model, optimizer, rank, range(3)) == take_steps(alone, other, rank, range(3))


def test_one_rank() -> None:
    assert run_forks(2, one_alone) == [True] * 2


class Watched(nn.Linear):
    """Layer that records its whole weights at every use, in forward and backward."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.note()
        if y.requires_grad:
            y.register_hook(self.note)
        return 1.0 * y

    def note(self, gradient: Tensor | None = None) -> None:
        self.seen.append({name: parameter.detach().clone() for name, parameter in self.named_parameters()})


def watch(model: Branches) -> None:
    before = model.left
    model.left = Watched(before.in_features, before.out_features)
    model.left.load_state_dict(before.state_dict())
    model.left.seen = []


def true_weights(model: Any) -> dict[str, Tensor]:
    model.left.reshard()
    return {name: parameter.full_tensor().clone() for name, parameter in model.left.named_parameters()}


def gathered(rank: int, options: Mapping[str, Any], early: bool) -> dict[str, Any]:
    """Return whether ranks see the same weights, and which of forward, backward and evaluation see exact weights.

    With `early`, the program requests weights before they are needed.
    """
    model, optimizer, _ = Setting(WEIGHTS, prepare=watch, options=options).build()
    if early:
        model.set_modules_to_forward_prefetch([model.left, model.right])
    seen, found = model.left.seen, {"same": [], "rounded": [], "exact": []}
    for step in range(4):
        true = true_weights(model)
        optimizer.zero_grad()
        if early and step % 2:
            model.left.unshard(async_op=True)
        plain(model, rank, step)
        forward, backward = seen
        found["same"] += [torch.equal(forward[n], backward[n]) and same_on_all(forward[n]) for n in true]
        found["rounded"].append(any(not torch.equal(forward[n].float(), true[n]) for n in true))
        optimizer.step()
        true = true_weights(model)
        # A forward pass in training may leave weights here, and evaluation comes after it.
        loss_of(model, rank, step)
        seen.clear()
        model.eval()
        with torch.no_grad():
            loss_of(model, rank, step)
        found["exact"] += [torch.equal(seen[0][n], true[n].to(seen[0][n].dtype)) for n in true]
        model.train()
        seen.clear()
    return found


# Every case runs by default, because each shards weights in another way.
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("ranks", "options", "early"),
    [
        (2, {}, False),
        (2, {}, True),
        (3, {"reshard_after_forward": False}, False),
        (4, {"reshard_after_forward": 2}, True),
        (2, {"mp_policy": BF16}, False),
    ],
)
def test_weights_are_rounded_equally_on_all_ranks_and_only_in_training(
    ranks: int, options: Mapping[str, Any], early: bool
) -> None:
    for found in run_forks(ranks, gathered, options, early):
        assert all(found["same"])
        assert all(found["rounded"])
        assert all(found["exact"])


def warned_in(rank: int, *modes: bool) -> list[str]:
    """Return the warnings of a run whose steps are in training mode, or in evaluation mode if False."""
    model, optimizer, _ = Setting({"gradients": {"method": "none"}, **WEIGHTS}).build()
    with messages.caught_warnings() as texts:
        for step, training in enumerate(modes):
            model.train(training)
            plain(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
    return texts


def test_training_in_evaluation_mode_warns_once() -> None:
    [[text], others] = run_forks(2, warned_in, True, False, False)
    assert "/deepspeed_compress/weights has no effect, because gradients are reduced while the model is in" in text
    assert others == []


class Adapted(Watched):
    """Layer whose unit also has a frozen matrix, and packed codes in the dtype of what is trained; some are NaN."""

    def __init__(self) -> None:
        super().__init__(31, 17)
        self.frozen = nn.Parameter(torch.randn(17, 17), requires_grad=False)
        codes = torch.randint(0, 256, (31, 40), dtype=torch.uint8)
        codes[0] = 255
        self.codes = nn.Parameter(codes.view(torch.float32), requires_grad=False)
        self.seen = []


class Packed(nn.Module):
    """Layer of packed codes alone, which passes its input on."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randint(0, 256, (31, 7), dtype=torch.uint8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.codes.detach().clone()
        return x


def adapt(model: Branches) -> None:
    model.left, model.packed = Adapted(), Packed()
    model.left.register_forward_pre_hook(lambda module, inputs: model.packed(*inputs))


def gathered_exactly(rank: int, weights: Mapping[str, Any]) -> list[set[str]]:
    """Return the parameters that forward and backward of each step see exactly, and all ranks alike."""
    given = {"gradients": {"method": "none"}, "weights": weights}
    model, optimizer, _ = Setting(given, prepare=adapt, units=("packed", "left")).build()
    found = []
    for step in range(3):
        true = true_weights(model)
        model.packed.reshard()
        codes = model.packed.codes.full_tensor().clone()
        model.left.seen.clear()
        plain(model, rank, step)
        forward, backward = ({n: p.view(torch.uint8) for n, p in seen.items()} for seen in model.left.seen)
        assert all(torch.equal(forward[n], backward[n]) for n in true)
        assert all(map(same_on_all, forward.values()))
        found.append({n for n in true if torch.equal(forward[n], true[n].view(torch.uint8))})
        found[-1] |= {"packed"} if torch.equal(model.packed.seen, codes) else set()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("weights", [WEIGHTS["weights"], {**WEIGHTS["weights"], "bits": 8}], ids=["4 bits", "8 bits"])
def test_weights_that_are_not_trained_are_gathered_exactly(weights: Mapping[str, Any]) -> None:
    assert run_forks(3, gathered_exactly, weights) == [[{"frozen", "codes", "packed"}] * 3] * 3


def test_frozen_weights_are_rounded_if_they_are_named() -> None:
    weights = {**WEIGHTS["weights"], "frozen": True}
    assert run_forks(2, gathered_exactly, weights) == [[{"packed"}] * 3] * 2


def by_method(model: Any, rank: int) -> Tensor:
    """Evaluate by a method other than `forward`, as `generate` of a language model."""
    model.__class__.generate = lambda self, x: self.forward(x)
    register_fsdp_forward_method(model, "generate")
    return model.generate(batch(rank, 0)[0]).sum()


def by_part(model: Any, rank: int) -> Tensor:
    return model.left(torch.ones(2, 31)).sum()


EVALUATIONS = [(lambda model, rank: loss_of(model, rank, 0), Setting()), (by_method, Setting()), (by_part, KEPT)]


def evaluated(rank: int) -> list[bool]:
    """Return whether evaluation is exact after a training forward pass, which keeps the weights of the root."""
    found = []
    for evaluate, setting in EVALUATIONS:
        results = []
        for given in (WEIGHTS, None):
            model, *_ = replace(setting, section=given).build()
            loss_of(model, rank, 0)
            results.append(evaluate(model.eval(), rank).item())
        found.append(results[0] == results[1])
    return found


def test_evaluation_is_exact_whatever_was_gathered_before() -> None:
    assert run_forks(2, evaluated) == [[True] * len(EVALUATIONS)] * 2


def discarded(rank: int) -> list[tuple[int, float]]:
    """Return the steps and the residuals after a step whose gradients the program removes, by way of the forward."""
    found = []
    for name in ("forward", "compute"):
        model, optimizer, attached = Setting(FOUR_BITS, lr=0.0).build()
        model.__class__.compute = lambda self, x: self.forward(x)
        register_fsdp_forward_method(model, name)
        for step in range(3):
            x, y = batch(rank, step)
            (getattr(model, name)(x) - y).square().mean().backward()
            if step != 1:
                optimizer.step()
            for parameter in model.parameters():
                parameter.grad = None
        kept = sum(values.abs().sum().item() for _, values in attached.session.residuals.by_name["gradients"].items())
        found.append((attached.steps.count, kept))
    return found


def test_a_discarded_step_is_noticed_in_every_method() -> None:
    for forward, compute in run_forks(2, discarded):
        assert forward == compute
        assert forward[0] == 3


def by_columns(parameter: Any) -> Shard | None:
    """Return the dimension of sharding for the matrix whose columns can be divided evenly."""
    return Shard(1) if parameter.shape == (31, WIDTH) else None


def refusals(rank: int) -> list[str]:
    start()
    return [refusal(setting.build) for _, setting in REFUSED]


def in_bf16_left(model: Branches) -> None:
    model.left.bfloat16()


FOUR_EACH = {"gradients": {"hierarchy": {"ranks_per_node": 4}}}
OF_FP16 = MixedPrecisionPolicy(reduce_dtype=torch.float16)
REFUSED: list[tuple[str, Setting]] = [
    ("/deepspeed_compress/gradients/method demo", Setting({"gradients": {"method": "demo"}}, momentum=0.9)),
    ("/deepspeed_compress/weights: ", Setting({"weights": {"bits": 2}})),
    ("/deepspeed_compress/weights: ", Setting({"weights": {"method": "sign"}})),
    ("/deepspeed_compress/weights/overlap: true has no effect with FSDP2", Setting({"weights": {"overlap": True}})),
    ('/deepspeed_compress/gradients/method: "powersgd" with copies', Setting(LOW_RANK, HSDP)),
    ("/deepspeed_compress/gradients/hierarchy/ranks_per_node: 4", Setting(FOUR_EACH, HSDP)),
    ("/deepspeed_compress/monitor/cosine_every: 2", Setting({"monitor": {"cosine_every": 2}}, HSDP)),
    ("its mesh shards nothing", Setting(FOUR_BITS, (4, 1))),
    ("reduced in torch.float16", Setting(FOUR_BITS, options={"mp_policy": OF_FP16})),
    ("several dtypes (allowed: one for all)", Setting(FOUR_BITS, units=(), prepare=in_bf16_left)),
    ("sharded along dimension 1", Setting(FOUR_BITS, units=(), options={"shard_placement_fn": by_columns})),
]


def test_unsupported_programs_are_refused_by_name() -> None:
    for texts in run_forks(4, refusals):
        messages.check_contained((message for message, _ in REFUSED), texts)


def scheduled(rank: int, mesh: tuple[int, ...]) -> tuple[list[bool], list[bool], list[float | None]]:
    """Return whether gradients and weights are exact in steps with a warm-up, and the cosines."""
    start()
    given = {**FOUR_BITS, "weights": {"bits": 4, "block_size": 32}, "schedule": {"warmup_steps": 2}}
    exact, _, _ = run_sections(None, mesh, rank)
    seen, weights, figures = run_sections({**given, "monitor": {"cosine_every": 0 if mesh else 1}}, mesh, rank)
    close = [
        all(torch.allclose(one[n], other[n], atol=1e-6) for n in one) for one, other in zip(exact, seen, strict=True)
    ]
    return close, weights, [figure.cosine for figure in figures]


def run_sections(given: Any, mesh: tuple[int, ...], rank: int) -> tuple[list[dict[str, Tensor]], list[bool], list[Any]]:
    model, optimizer, attached = Setting(given, mesh, prepare=watch, lr=0.0).build()
    figures: list[Any] = []
    if attached is not None:
        attached.session.subscribe(figures.append)
    true, seen, exact = true_weights(model), [], []
    for _ in range(4):
        optimizer.zero_grad()
        model.left.seen.clear()
        # A gradient of weights that are not rounded: what is looked at is how it is reduced.
        model.eval()
        plain(model, rank, 0)
        seen.append(gradients(model))
        optimizer.step()
        model.train()
        model.left.seen.clear()
        loss_of(model, rank, 0)
        exact.append(all(torch.equal(model.left.seen[0][name], true[name]) for name in true))
        for module in (model.left, model.right, model):
            module.reshard()
    return seen, exact, figures


@pytest.mark.parametrize(("ranks", "mesh"), [(2, ()), (4, HSDP)])
def test_steps_of_a_warm_up_are_exact(ranks: int, mesh: tuple[int, ...]) -> None:
    for number, (close, exact, cosines) in enumerate(run_forks(ranks, scheduled, mesh)):
        assert close == [True, True, False, False]
        # After a step the next one has begun.
        assert exact == [True, False, False, False]
        if number == 0 and not mesh:
            assert cosines[:2] == [None, None]
            assert all(cosine > 0.9 for cosine in cosines[2:])


def attach_twice() -> None:
    model, optimizer, _ = Setting(NONE).build()
    deepspeed_compress.fsdp2.attach(model, section(NONE), optimizer)


def foreign_optimizer() -> None:
    model, *_ = Setting().build()
    deepspeed_compress.fsdp2.attach(model, section(FOUR_BITS), torch.optim.SGD(Branches().parameters()))


def undivided() -> None:
    model = Branches()
    deepspeed_compress.fsdp2.attach(model, section(FOUR_BITS), torch.optim.SGD(model.parameters()))


def tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def split(model: Branches) -> None:
        parallelize_module(model, mesh["tensor"], {"first": ColwiseParallel()})

    Setting(FOUR_BITS, prepare=split).build(mesh=mesh["data"])


def several_meshes() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = Branches()
    fully_shard(model.left, mesh=mesh["b"])
    fully_shard(model, mesh=mesh)
    deepspeed_compress.fsdp2.attach(model, section(FOUR_BITS), torch.optim.SGD(model.parameters()))


def momentum_twice() -> None:
    model, *_ = Setting({"gradients": {"method": "dgc", "density": 0.1, "min_numel": 0}}).build()
    reducing_twice(model, dist.get_rank(), 0)


def shards_alone() -> None:
    model, *_ = Setting(FOUR_BITS, HSDP).build()
    model.set_requires_all_reduce(False)
    plain(model, dist.get_rank(), 0)


def replaced() -> None:
    model, *_ = Setting(FOUR_BITS).build()
    model.left.set_custom_reduce_scatter(DefaultReduceScatter())
    plain(model, dist.get_rank(), 0)


def replaced_gather() -> None:
    model, *_ = Setting(WEIGHTS).build()
    model.left.set_custom_all_gather(DefaultAllGather())
    plain(model, dist.get_rank(), 0)


def thawed() -> None:
    model, *_ = Setting(FOUR_BITS, prepare=freeze).build()
    plain(model, dist.get_rank(), 0)
    model.left.requires_grad_(True)
    plain(model, dist.get_rank(), 0)


def mixed_weights() -> None:
    def half(model: Branches) -> None:
        model.left.to(torch.bfloat16).requires_grad_(False)

    Setting(WEIGHTS, prepare=half, units=()).build()


def other_gradients() -> None:
    model, optimizer, _ = Setting().build()
    next(model.left.parameters()).grad_dtype = torch.bfloat16
    deepspeed_compress.fsdp2.attach(model, section(FOUR_BITS), optimizer)


LATE = {
    attach_twice: "it is already attached",
    foreign_optimizer: "updates none",
    undivided: "call fully_shard first",
    tensor_parallel: "tensor parallelism",
    several_meshes: "one mesh for all",
    momentum_twice: "set_requires_gradient_sync(False)",
    replaced: "was replaced after fsdp2.attach",
    replaced_gather: "the all-gather of left.weight was replaced",
    shards_alone: "set_requires_all_reduce(False)",
    thawed: "frozen when fsdp2.attach was called",
    mixed_weights: "torch.bfloat16, torch.float32",
    other_gradients: "and do not set grad_dtype",
}


def test_unsupported_programs_that_are_detected_late_are_refused_by_name() -> None:
    for texts in run_forks(4, late_refusals, tuple(LATE)):
        messages.check_contained(LATE.values(), texts)


def sharded(model: Any) -> Any:
    for block in model.transformer.h:
        fully_shard(block)
    return fully_shard(model)


@pytest.mark.slow
def test_four_bits_send_an_eighth_and_learn_as_much(tmp_path: Path) -> None:
    both = {"gradients": {"method": "blockwise", "bits": 4, "min_numel": 0}}
    attach = deepspeed_compress.fsdp2.attach
    exact, ours = (
        run_forks(2, gpts, sharded, attach, given, tmp_path / name)
        for name, given in {"none": NONE, "int4": both}.items()
    )
    losses = [[first[0] + second[0] for first, second in zip(*ranks, strict=True)] for ranks in (ours, exact)]
    assert Excess.of(*losses).is_below(0.005)
    (_, [*_, of_none], numel), (_, [*earlier, of_ours], _) = exact[0][0], ours[0][0]
    # What reduce-scatters in fp32 sends; gloo, which all-reduces instead, sends twice that.
    alone = 4 * numel / 2
    assert of_none.bytes_sent == of_none.bytes_uncompressed == of_ours.bytes_uncompressed == 2 * alone
    assert alone / of_ours.bytes_sent > 7.5
    assert of_ours.samples is None
    assert of_ours.bytes_weights == of_none.bytes_weights > 0
    assert len((tmp_path / "int4" / "0" / "compression.jsonl").read_text().splitlines()) == len(earlier) + 1
