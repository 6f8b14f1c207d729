"""Tests of `deepspeed_compress.ddp`: DDP programs with and without compression, in the same processes."""

import contextlib
import copy
import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import deepspeed_compress
from deepspeed_compress.backends.sessions import read_section
from tests.backends.contract.ddp import PROGRAMS, UNUSED, synchronising_twice
from tests.support import messages
from tests.support.attached import residuals_by_parameter
from tests.support.forks import run_forks
from tests.support.methods import NONE
from tests.support.seeds import Excess
from tests.support.two_branches import (
    FOUR_BITS,
    LOW_RANK,
    STOCHASTIC,
    WIDTH,
    Branches,
    Setting,
    bits_of,
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


def change_what_is_trained(rank: int, wrapped: bool, attached: bool) -> dict[str, bool]:
    """Train a branch before (`wrapped`) and after (`attached`) DDP wraps the model.

    Return whether all ranks have the same bits, by parameter.
    """
    start()
    network = Branches()
    network.right.requires_grad_(wrapped)
    model = DistributedDataParallel(network, bucket_cap_mb=0.001, find_unused_parameters=wrapped)
    network.right.requires_grad_(attached)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    deepspeed_compress.ddp.attach(model, section(FOUR_BITS), optimizer)
    take_steps(model, optimizer, rank, range(2))
    network.right.requires_grad_(True)
    take_steps(model, optimizer, rank, range(2, 4))
    return {name: same_on_all(parameter) for name, parameter in network.named_parameters()}


def test_what_ddp_reduces_is_decided_when_it_wraps_the_model() -> None:
    """Without compression too, DDP leaves parameters alone that were frozen then, and no others."""
    for found in run_forks(2, change_what_is_trained, True, False):
        assert all(found.values())
    for found in run_forks(2, change_what_is_trained, False, True):
        assert [name for name, same in found.items() if not same] == ["right.weight", "right.bias"]


class Mixed(nn.Module):
    """A network with two types of parameters, which DDP therefore reduces in two buckets from the first pass on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wide, self.narrow = nn.Linear(WIDTH, 31), nn.Linear(31, 1).bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(self.wide(x).bfloat16()).float()


def train_mixed(rank: int) -> bool:
    start()
    model = DistributedDataParallel(Mixed(), static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    deepspeed_compress.ddp.attach(model, section(FOUR_BITS), optimizer)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, WIDTH), 1.0 + rank + step)).square().sum().backward()
        optimizer.step()
    return all(map(same_on_all, model.parameters()))


def test_a_static_graph_may_have_two_types_of_parameters() -> None:
    """DDP gives all buckets of its first pass the number 0 then."""
    assert run_forks(2, train_mixed, timeout=60) == [True] * 2


def fused_overflow(rank: int) -> dict[str, Any]:
    """Step a fused optimizer, which the scaler calls despite an overflow and which skips the step itself."""
    start()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model = DistributedDataParallel(Branches())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    attached = deepspeed_compress.ddp.attach(model, section(FOUR_BITS), optimizer, scaler)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, rank, step) * (math.inf if (step, rank) == (2, 1) else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    values = [v for store in attached.session.residuals.by_name.values() for _, v in store.items()]
    return {
        "residuals": all(v.isfinite().all() for v in values),
        "weights": all(p.isfinite().all() for p in model.parameters()),
    }


def test_a_fused_optimizer_leaves_steps_out_by_itself() -> None:
    assert run_forks(2, fused_overflow) == [{"residuals": True, "weights": True}] * 2


def without_the_scaler(rank: int) -> bool:
    """Step the optimizer itself, as programs do whose scaler is disabled, and train without any scaler."""
    ends = []
    for scaler in (torch.amp.GradScaler("cpu", enabled=False), None):
        model, optimizer, attached = Setting(FOUR_BITS).build(scaler)
        weights = take_steps(model, optimizer, rank, range(4))
        optimizer.zero_grad()
        ends.append((weights, attached.steps.count))
    return ends[0] == ends[1]


def test_steps_without_the_scaler_are_applied_steps() -> None:
    assert run_forks(2, without_the_scaler) == [True] * 2


def two_optimizers(rank: int) -> dict[str, Any]:
    """Use one scaler for two models and update it after each of them, as many GAN programs do."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    pairs = [Setting(FOUR_BITS).build(scaler) for _ in range(2)]
    kept = []
    for step in range(4):
        for model, optimizer, _ in pairs:
            optimizer.zero_grad()
            scaler.scale(loss_of(model, rank, step)).backward()
        for _, optimizer, attached in pairs:
            scaler.step(optimizer)
            scaler.update()
            kept.append(bool(bits_of(attached)))
    return {
        "kept": all(kept),
        "steps": [attached.steps.count for *_, attached in pairs],
        "scales": {attached.session.clock.loss_scale for *_, attached in pairs} == {scaler.get_scale()},
    }


def test_a_scaler_that_is_updated_for_another_optimizer_ends_no_step() -> None:
    for found in run_forks(2, two_optimizers):
        assert found == {"kept": True, "steps": [4, 4], "scales": True}


def interrupt(seen: object) -> Tensor:
    raise ZeroDivisionError


def load_after_an_interruption(rank: int, directory: str, given: Mapping[str, Any], interrupted: bool) -> Any:
    """Return the final weights and DDP's error about another pass in the same wrapper.

    A backward pass raises after most gradients were sent, and a new wrapper of the same process group loads.
    """
    model, optimizer, attached = Setting(given).build()
    take_steps(model, optimizer, rank, range(3, 6))
    attached.save(directory)
    saved, message = {key: value.clone() for key, value in model.module.state_dict().items()}, ""
    if interrupted:
        handle = model.module.first.weight.register_hook(interrupt)
        with contextlib.suppress(ZeroDivisionError):
            plain(model, rank, 50)
        handle.remove()
        attached.load(directory)
        try:
            plain(model, rank, 51)
        except RuntimeError as error:
            message = str(error)
    model, optimizer, attached = Setting(given).build()
    model.module.load_state_dict(saved)
    attached.load(directory)
    return take_steps(model, optimizer, rank, range(3, 6)), message


@pytest.mark.parametrize("given", [FOUR_BITS, STOCHASTIC], ids=["int4", "random"])
def test_nothing_of_an_interrupted_backward_pass_gets_into_what_is_loaded(
    tmp_path: Path, given: Mapping[str, Any]
) -> None:
    """DDP itself refuses another pass in the same wrapper. A new wrapper continues as if nothing had happened."""
    alone = run_forks(2, load_after_an_interruption, str(tmp_path), given, False)
    after = run_forks(2, load_after_an_interruption, str(tmp_path), given, True)
    assert [weights for weights, _ in after] == [weights for weights, _ in alone]
    assert all("Expected to have finished reduction in the prior iteration" in message for _, message in after)


def load_of_another(rank: int, directory: str) -> list[str]:
    """Return the warnings about loading the residuals of other parameters, of larger ones, and of the same ones."""
    start()
    smaller, found = Branches(), []
    smaller.first = nn.Linear(WIDTH - 1, 31)
    for network in (nn.Linear(8, 8), smaller, Branches()):
        model = DistributedDataParallel(network)
        optimizer = torch.optim.SGD(model.parameters())
        attached = deepspeed_compress.ddp.attach(model, section(FOUR_BITS), optimizer)
        found.append(messages.refusal(deepspeed_compress.StateError, attached.load, directory))
    return found


def test_memories_of_another_model_are_refused(tmp_path: Path) -> None:
    run_forks(2, residuals_by_parameter, PROGRAMS["plain"], str(tmp_path), True)
    for other, larger, same in run_forks(2, load_of_another, str(tmp_path)):
        assert "this model has weight, bias" in other
        assert "with another first.weight" in larger
        assert same == ""


def load_nothing(rank: int, directory: str, policy: str) -> tuple[str, int]:
    _, _, attached = Setting({**FOUR_BITS, "on_missing_state": policy}).build()
    with messages.caught_warnings() as texts:
        error = messages.refusal(deepspeed_compress.StateError, attached.load, directory)
    return error or " ".join(texts), attached.steps.count


def test_a_missing_state_is_an_error_or_a_warning(tmp_path: Path) -> None:
    for text, _ in run_forks(2, load_nothing, str(tmp_path), "error"):
        assert "does not exist" in text
    for text, step in run_forks(2, load_nothing, str(tmp_path), "reset"):
        assert "starts with empty residuals" in text
        assert step == 0


def divided(rank: int) -> tuple[bool, bool]:
    """Train two models at once: one on all four ranks, in two levels, and one on each pair of ranks."""
    start()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    nodes = {"gradients": {**FOUR_BITS["gradients"], "hierarchy": {"ranks_per_node": 2}}}
    return train_together(rank, *Setting(nodes).build()[:2], *Setting(FOUR_BITS).build(group=pairs[rank // 2])[:2])


def test_several_models_and_groups() -> None:
    assert run_forks(4, divided) == [(True, True)] * 4


def with_own_settings(rank: int, sections: Sequence[Mapping[str, Any]]) -> str:
    start()
    model = DistributedDataParallel(Branches())
    optimizer = torch.optim.SGD(model.parameters())
    attach = partial(deepspeed_compress.ddp.attach, model, section(sections[rank]), optimizer)
    return messages.refusal(deepspeed_compress.ConfigError, attach)


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"gradients": {"bits": 4}}, {"gradients": {"bits": 8}}, "/gradients/bits: 4 on rank 0, but 8 on rank 1"),
        ({"seed": 1}, {"seed": 2}, "/seed: 1 on rank 0, but 2 on rank 1"),
        ({"monitor": {"path": "figures"}}, {}, "/monitor/path: 'a path' on rank 0, but None on rank 1"),
        ({"gradients": {"bits": 4}}, {"gradients": {"method": "sign"}}, "/gradients: {'"),
        ({"monitor": {"announce": False}}, {"communication": {"max_rate": "1 Gbit/s"}}, ""),
    ],
)
def test_ranks_with_other_settings_are_refused_by_name(
    first: Mapping[str, Any], second: Mapping[str, Any], message: str
) -> None:
    """Otherwise they would misread each other's messages, or wait for a figure that the others do not compute."""
    for text in run_forks(2, with_own_settings, (first, second)):
        assert message in text
        assert bool(text) == bool(message)


def one_alone(rank: int) -> bool:
    """Train in a group of one rank within a larger job, which sends nothing and changes nothing."""
    start()
    groups = [dist.new_group([0]), dist.new_group([1])]
    with pytest.warns(deepspeed_compress.CompressWarning, match="data-parallel size is 1"):
        model, optimizer, _ = Setting(FOUR_BITS).build(group=groups[rank])
    alone, other, _ = Setting(None).build(group=groups[rank])
    return take_steps(model, optimizer, rank, range(3)) == take_steps(alone, other, rank, range(3))


def test_one_rank() -> None:
    assert run_forks(2, one_alone) == [True] * 2


def refusals(rank: int) -> list[str]:
    start()
    found = []
    for given, options in REFUSED.values():
        model = DistributedDataParallel(Branches(), **options)
        optimizer = torch.optim.AdamW(model.parameters())
        found.append(refusal(partial(deepspeed_compress.ddp.attach, model, section(given), optimizer)))
    return found


NODES = {"gradients": {"hierarchy": {"ranks_per_node": 2}}}
REFUSED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "/deepspeed_compress/weights/method": ({"weights": {"method": "blockwise"}}, {}),
    "/deepspeed_compress/gradients/method demo": ({"gradients": {"method": "demo"}}, {}),
    '/deepspeed_compress/gradients/method: "powersgd" with unused parameters': (LOW_RANK, UNUSED),
    "/deepspeed_compress/gradients/hierarchy: with unused parameters": (NODES, UNUSED),
}


def test_unsupported_programs_are_refused_by_name() -> None:
    for texts in run_forks(2, refusals):
        messages.check_contained(REFUSED, texts)


def attach_twice() -> None:
    model, optimizer, _ = Setting(FOUR_BITS).build()
    deepspeed_compress.ddp.attach(model, section(FOUR_BITS), optimizer)


def foreign_optimizer() -> None:
    model = DistributedDataParallel(Branches())
    deepspeed_compress.ddp.attach(model, section(FOUR_BITS), torch.optim.SGD(Branches().parameters()))


def doubles() -> None:
    model = DistributedDataParallel(Branches().double())
    deepspeed_compress.ddp.attach(model, section(FOUR_BITS), torch.optim.SGD(model.parameters()))


def sparse() -> None:
    model = DistributedDataParallel(nn.Embedding(4, 3, sparse=True))
    deepspeed_compress.ddp.attach(model, section(FOUR_BITS), torch.optim.SGD(model.parameters()))


def join() -> None:
    model, _, _ = Setting(FOUR_BITS).build()
    with model.join(enable=False):
        plain(model, dist.get_rank(), 0)
    with model.join():
        plain(model, dist.get_rank(), 0)


def momentum_twice() -> None:
    model, _, _ = Setting({"gradients": {"method": "dgc", "density": 0.1, "min_numel": 0}}).build()
    synchronising_twice(model, dist.get_rank(), 0)


def not_wrapped() -> None:
    model = Branches()
    deepspeed_compress.ddp.attach(model, section(FOUR_BITS), torch.optim.SGD(model.parameters()))


def not_an_optimizer() -> None:
    deepspeed_compress.ddp.attach(DistributedDataParallel(Branches()), section(FOUR_BITS), object())


def to_deepspeed() -> None:
    deepspeed_compress.attach(Branches())


LATE: Mapping[Callable[[], None], str] = {
    attach_twice: "already has a communication hook",
    foreign_optimizer: "updates none",
    doubles: "in torch.float64 (allowed",
    sparse: "sparse=False",
    join: "join()",
    momentum_twice: "in no_sync()",
    not_wrapped: "expected a DistributedDataParallel, got",
    not_an_optimizer: "expected a torch optimizer, or a wrapper with one in its attribute `optimizer`, got object",
    to_deepspeed: "expected a DeepSpeedEngine, got",
}
"""Programs, and a part of the message that refuses each."""


def test_unsupported_programs_that_are_detected_late_are_refused_by_name() -> None:
    for texts in run_forks(2, late_refusals, tuple(LATE)):
        messages.check_contained(LATE.values(), texts)


def test_keys_of_deepspeed_have_no_effect() -> None:
    with pytest.warns(deepspeed_compress.CompressWarning, match="/train_batch_size: no effect without DeepSpeed"):
        read_section({"train_batch_size": 8, **section(FOUR_BITS)})


@pytest.mark.slow
def test_four_bits_send_an_eighth_and_learn_as_much(tmp_path: Path) -> None:
    four_bits = {"gradients": {"method": "blockwise", "bits": 4, "min_numel": 0}}
    wrap, attach = partial(DistributedDataParallel, bucket_cap_mb=0.2), deepspeed_compress.ddp.attach
    exact, ours = (
        run_forks(2, gpts, wrap, attach, given, tmp_path / name)
        for name, given in {"none": NONE, "int4": four_bits}.items()
    )
    losses = [[first[0] + second[0] for first, second in zip(*run, strict=True)] for run in (ours, exact)]
    assert Excess.of(*losses).is_below(0.03)
    [of_none, of_ours] = [run[0][0][1][-1] for run in (exact, ours)]
    assert of_none.bytes_sent == of_none.bytes_uncompressed == of_ours.bytes_uncompressed
    assert 7.3 < of_ours.bytes_uncompressed / of_ours.bytes_sent < 8
    assert len((tmp_path / "int4" / "0" / "compression.jsonl").read_text().splitlines()) == len(ours[0][0][1])
    assert of_ours.samples is None


def with_failing_subscriber(rank: int) -> list[str]:
    """Return the warnings of steps in which a subscriber raises."""
    model, optimizer, attached = Setting(FOUR_BITS).build()
    attached.session.subscribe(interrupt)
    with messages.caught_warnings() as texts:
        take_steps(model, optimizer, rank, range(3))
    return [text for text in texts if "ZeroDivisionError" in text]


def test_a_subscriber_that_fails_does_not_stop_training() -> None:
    """It would fail on one rank only, and the others would wait for that rank."""
    first, second = run_forks(2, with_failing_subscriber)
    assert "a subscriber did not accept the statistics of step 1" in first[0]
    assert not second


def copied(rank: int) -> list[list[list[float]]]:
    """Return the weights after a step of a model, of its copy, and of its pickle, all from the same initial weights."""
    model, optimizer, _ = Setting(FOUR_BITS, options={"find_unused_parameters": True}).build()
    take_steps(model, optimizer, rank, range(1))
    optimizer.zero_grad()
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    assert b"deepspeed_compress" not in written.getvalue()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    found = []
    for one in (copy.deepcopy(model), torch.load(written, weights_only=False)):
        assert not hasattr(one, "compression")
        stepping = torch.optim.SGD(one.parameters(), lr=0.05)
        found.append(take_steps(one, stepping, rank, range(1, 2)))
    # The model itself goes on.
    take_steps(model, optimizer, rank, range(1, 2))
    return found


def test_copies_and_pickles_exclude_the_attached_state() -> None:
    for copy_, saved in run_forks(2, copied):
        assert copy_ == saved


def wrapped_optimizer(kind: str, model: nn.Module) -> Any:
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    if kind == "accelerate":
        from accelerate import Accelerator

        return Accelerator(cpu=True).prepare(inner)
    if kind == "post_local":
        from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
        from torch.distributed.optim import PostLocalSGDOptimizer

        return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=4, warmup_steps=100))
    if kind == "sharded":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)
    if kind == "scheduled":
        torch.optim.lr_scheduler.LambdaLR(inner, lambda epoch: 1.0)
    return inner


def with_wrapped(rank: int, kinds: Sequence[str]) -> list[tuple[list[list[float]], int]]:
    start()
    found = []
    for kind in kinds:
        model = DistributedDataParallel(Branches(), bucket_cap_mb=0.001)
        optimizer = wrapped_optimizer(kind, model)
        attached = deepspeed_compress.ddp.attach(model, section(FOUR_BITS), optimizer)
        found.append((take_steps(model, optimizer, rank, range(3)), attached.steps.count))
    return found


def test_optimizers_that_wrap_another_one() -> None:
    """Every wrapper steps like the optimizer inside."""
    kinds = ("plain", "accelerate", "post_local", "sharded", "scheduled")
    for first, *others in run_forks(2, with_wrapped, kinds):
        assert first[1] == 3
        assert all(other == first for other in others)


def failing(rank: int) -> list[list[list[float]]]:
    """Return the weights without compression, and after attaching failed once: uncompressed, and attached again."""
    found = []
    for attempts in (0, 1, 2):
        model, optimizer, _ = Setting(None).build()
        hooks = len(model._forward_pre_hooks)
        for attempt in range(attempts):
            with contextlib.ExitStack() as stack:
                if not attempt:
                    stack.enter_context(
                        mock.patch("deepspeed_compress.backends.ddp.adapter.Plan", side_effect=MemoryError)
                    )
                    stack.enter_context(pytest.raises(MemoryError))
                deepspeed_compress.ddp.attach(model, section(FOUR_BITS), optimizer)
            if not attempt:
                assert len(model._forward_pre_hooks) == hooks
                assert not optimizer._optimizer_step_post_hooks
                assert "zero_grad" not in vars(optimizer)
        found.append(take_steps(model, optimizer, rank, range(2)))
    return found


def test_nothing_is_left_when_attaching_fails() -> None:
    for alone, failed, again in run_forks(2, failing):
        assert alone == failed != again


def scaled(rank: int) -> bool:
    """Return whether a copy of a scaler still calls the follower of the original."""
    start()
    model = DistributedDataParallel(Branches())
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.05), torch.amp.GradScaler("cpu")
    deepspeed_compress.ddp.attach(model, section(FOUR_BITS), optimizer, scaler)
    return "update" in vars(copy.deepcopy(scaler))


def test_a_copied_scaler_is_a_plain_one() -> None:
    assert run_forks(1, scaled) == [False]
