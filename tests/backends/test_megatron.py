"""Tests of `deepspeed_compress.megatron`: Megatron programs with and without compression."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress import UnsupportedError
from deepspeed_compress.config import SECTION
from tests.support import messages
from tests.support.attached import norms_of
from tests.support.forks import run_forks
from tests.support.megatron import Options, checkpointing, start
from tests.support.methods import METHODS, NONE, WITHOUT_MOMENTUM
from tests.support.two_branches import FOUR_BITS, LOW_RANK, STOCHASTIC, WIDTH, batch, bits_of, same_on_all

pytestmark = pytest.mark.sampled(32)

NODES = {"gradients": {**FOUR_BITS["gradients"], "hierarchy": {"ranks_per_node": 2}}}
CASES = [(distributed, overlap) for distributed in (False, True) for overlap in (False, True)]


class Net(nn.Module):
    """Model with sizes that Megatron pads, and with layers that backward does not reach in the order of buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.middle = nn.Linear(WIDTH, 31), nn.Linear(17, 1), nn.Linear(31, 17)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Run:
    """A training run, under Megatron alone if `given` is None."""

    def __init__(self, given: Mapping[str, Any] | None, options: Options, rank: int) -> None:
        self.rank, self.dtype = rank, options.dtype
        [self.model], self.optimizer = options.wrap([Net().to(options.dtype)], options.config(num_layers=1))
        self.attached: Any = None
        if given is not None:
            section = {SECTION: {"monitor": {"announce": False}, **given}}
            self.attached = deepspeed_compress.megatron.attach(self.model, self.optimizer, section)

    def loss(self, step: int) -> Tensor:
        x, y = batch(self.rank, step)
        return (self.model(x.to(self.dtype)).float() - y).square().mean()

    def clear(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def backward(self, step: int, factor: float = 1.0) -> float:
        """Run one micro-batch without synchronization, and one with it."""
        with self.model.no_sync():
            self.optimizer.scale_loss(self.loss(step + 100) / 2).backward()
        loss = self.loss(step) / 2 * factor
        self.optimizer.scale_loss(loss).backward()
        self.model.finish_grad_sync()
        return loss.item()

    def step(self, step: int, factor: float = 1.0) -> tuple[float, bool]:
        self.clear()
        loss = self.backward(step, factor)
        applied, _, _ = self.optimizer.step()
        return loss, applied

    def after(self, steps: Iterable[int]) -> list[list[float]]:
        """Train `steps`, and return the weights."""
        for step in steps:
            self.step(step)
        return self.weights()

    def weights(self) -> list[list[float]]:
        self.gathered()
        return [parameter.flatten().tolist() for parameter in self.model.parameters()]

    def gathered(self) -> None:
        """Return the weights of all ranks, gathered if forward would gather them."""
        if self.model.ddp_config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)

    def own(self) -> dict[str, list[tuple[int, Tensor]]]:
        """Return the gradients that this rank's optimizer reads, by parameter: (first element, values)."""
        found: dict[str, list[tuple[int, Tensor]]] = {}
        names = {parameter: name for name, parameter in self.model.module.named_parameters()}
        for group in self.model.bucket_groups:
            for bucket in group.buckets:
                share = bucket.grad_data.numel() // dist.get_world_size()
                for parameter in bucket.params_list:
                    grad = parameter.main_grad
                    begin, end = 0, grad.numel()
                    if self.model.ddp_config.use_distributed_optimizer:
                        offset = (grad.data_ptr() - bucket.grad_data.data_ptr()) // 4
                        first, last = share * dist.get_rank() - offset, share * (dist.get_rank() + 1) - offset
                        begin, end = max(begin, first), min(end, last)
                    if begin < end:
                        found.setdefault(names[parameter], []).append((begin, grad.flatten()[begin:end].clone()))
        return found


def options_of(case: tuple[bool, bool], **more: Any) -> Options:
    distributed, overlap = case
    ddp = {"overlap_param_gather": overlap} if distributed else {}
    return Options(distributed, overlap, **more, ddp=ddp, optimizer={"overlap_param_gather": overlap and distributed})


def train_none(rank: int, dtype: str) -> list[str]:
    """Return the cases in which method "none" differs from Megatron."""
    start()
    wrong = []
    for case in CASES:
        alone, ours = (Run(given, options_of(case, dtype=getattr(torch, dtype)), rank) for given in (None, NONE))
        losses = [[run.step(step) for step in range(20)] for run in (alone, ours)]
        if losses[0] != losses[1] or alone.weights() != ours.weights() or not losses[0][-1][1]:
            wrong.append(f"{case}: {losses[0][-1]} {losses[1][-1]}")
    return wrong


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_method_none_is_megatron_bit_for_bit(dtype: str) -> None:
    assert run_forks(2, train_none, dtype) == [[]] * 2


def conserve(rank: int, ranks: int) -> list[str]:
    """Return the cases whose summed gradients differ from the true ones minus the residuals."""
    start()
    wrong = []
    for case in CASES:
        options = replace(options_of(case), optimizer={"lr": 0.0, "clip_grad": 0.0})
        sums: list[dict[tuple[str, int], Tensor]] = []
        runs = [Run(given, options, rank) for given in (None, FOUR_BITS)]
        for run in runs:
            total: dict[tuple[str, int], Tensor] = {}
            for step in range(7):
                run.clear()
                run.backward(step)
                for name, pieces in run.own().items():
                    for begin, values in pieces:
                        key = (name, begin)
                        total[key] = total[key] + values if key in total else values
                run.optimizer.step()
            sums.append(total)
        sizes = {name: parameter.numel() for name, parameter in runs[0].model.module.named_parameters()}
        kept = {name: torch.zeros(numel) for name, numel in sizes.items()}
        means = {name: torch.zeros(numel) for name, numel in sizes.items()}
        for store_name, store in runs[1].attached.session.stores.items():
            for (name, begin, numel), values in store.items():
                (means if store_name == "means" else kept)[name][begin : begin + numel] += values
        for name in sizes:
            dist.all_reduce(kept[name])
            dist.all_reduce(means[name])
        if not any(one.any() for one in kept.values()):
            wrong.append(f"{case}: nothing was compressed")
        for name, begin in sums[0]:
            true, seen = sums[0][name, begin], sums[1][name, begin]
            part = slice(begin, begin + true.numel())
            left = kept[name][part] / ranks + means[name][part]
            if not torch.allclose(true - seen, left, atol=2e-6):
                wrong.append(f"{case}: {name} {begin}")
    return wrong


@pytest.mark.parametrize("ranks", [2, 3])
def test_error_feedback_keeps_all_gradients(ranks: int) -> None:
    assert run_forks(ranks, conserve, ranks) == [[]] * ranks


def overflow(rank: int) -> list[str]:
    """Return the problems after a step with a NaN on rank 1, by case."""
    start()
    wrong = []
    scale = {"initial_loss_scale": 64.0, "min_loss_scale": 1.0, "loss_scale_window": 3, "hysteresis": 1}
    for case in CASES:
        options = options_of(case, dtype=torch.float16)
        run = Run(FOUR_BITS, replace(options, optimizer={**options.optimizer, **scale}), rank)
        applied, scales = [], []
        for step in range(6):
            before = norms_of(run.attached)
            applied.append(run.step(step, math.nan if (step, rank) == (2, 1) else 1.0)[1])
            scales.append(run.attached.session.clock.loss_scale)
            if step == 2:
                after = norms_of(run.attached)
                if not all(math.isclose(before[name], 4.0 * after[name], rel_tol=1e-6) for name in before):
                    wrong.append(f"{case}: {before} -> {after}")
        run.gathered()
        if applied != [True, True, False, True, True, True] or scales != [64.0, 64.0, 32.0, 32.0, 32.0, 64.0]:
            wrong.append(f"{case}: {applied} {scales}")
        if not all(
            same_on_all(parameter.detach()) and parameter.isfinite().all() for parameter in run.model.parameters()
        ):
            wrong.append(f"{case}: weights")
    return wrong


def test_a_step_that_overflows_leaves_no_trace() -> None:
    assert run_forks(2, overflow) == [[]] * 2


def checks(rank: int) -> list[tuple[str, str]]:
    """Return Megatron's errors about a non-finite gradient if it checks before reducing, without and with us."""
    start()
    options = replace(options_of((True, False)), ddp={"check_for_nan_in_grad": True})
    texts = []
    for given in (None, FOUR_BITS):
        run = Run(given, options, rank)
        run.clear()
        with pytest.raises(Exception, match="NaN") as caught:
            run.backward(0, math.nan)
        texts.append((type(caught.value).__name__, str(caught.value)))
    return texts


def test_megatron_checks_gradients_before_they_are_reduced() -> None:
    for alone, ours in run_forks(2, checks):
        assert ours == alone


def repeat_an_iteration(rank: int) -> list[str]:
    """Return the cases in which a repeated iteration leaves a trace."""
    start()
    wrong = []
    for case in CASES:
        run = Run(FOUR_BITS, options_of(case), rank)
        run.step(0)
        before = bits_of(run.attached)
        run.clear()
        run.backward(50)
        run.clear()
        if before != bits_of(run.attached) or run.attached.dense.steps.count != 2:
            wrong.append(str(case))
    return wrong


def test_an_iteration_that_is_repeated_leaves_no_trace() -> None:
    assert run_forks(2, repeat_an_iteration) == [[]] * 2


def resume(rank: int, directory: str, given: Mapping[str, Any]) -> list[tuple[bool, bool]]:
    """Return, by case, whether resuming equals continuing, and whether resuming without residuals differs."""
    start()
    found = []
    for number, case in enumerate(CASES):
        ends = continue_and_resume(given, options_of(case), rank, Path(directory) / str(number))
        found.append((ends[0] == ends[1], ends[0] != ends[2]))
    return found


def continue_and_resume(given: Mapping[str, Any], options: Options, rank: int, place: Path) -> list[list[list[float]]]:
    """Return the weights after a save: of the same run, and of new ones that load the residuals, and do not."""
    run = Run(given, options, rank)
    run.after(range(3))
    run.attached.save(place)
    model = {key: value.clone() for key, value in run.model.state_dict().items()}
    masters = states(run.optimizer)
    ends = [run.after(range(3, 6))]
    for loads in (True, False):
        run = Run(given, options, rank)
        run.model.load_state_dict(model)
        put(run.optimizer, masters)
        if loads:
            run.attached.load(place)
            assert run.attached.dense.steps.count == 3
        ends.append(run.after(range(3, 6)))
    return ends


def states(optimizer: Any) -> list[dict[str, Any]]:
    """Return copies of the torch optimizers' states."""
    inner = [chained_optimizer.optimizer for chained_optimizer in optimizer.chained_optimizers]
    return [
        {"params": [p.detach().clone() for group in one.param_groups for p in group["params"]], "state": copied(one)}
        for one in inner
    ]


def copied(optimizer: Any) -> list[dict[str, Any]]:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [{key: value.clone() for key, value in optimizer.state[p].items()} for p in held]


def put(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    for chained_optimizer, given in zip(optimizer.chained_optimizers, saved, strict=True):
        held = [p for group in chained_optimizer.optimizer.param_groups for p in group["params"]]
        for parameter, value, state in zip(held, given["params"], given["state"], strict=True):
            parameter.data.copy_(value)
            chained_optimizer.optimizer.state[parameter] = {key: part.clone() for key, part in state.items()}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(STOCHASTIC, id="random"),
        pytest.param(FOUR_BITS, id="int4", marks=pytest.mark.slow),
        pytest.param(LOW_RANK, id="rank", marks=pytest.mark.slow),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path, given: Mapping[str, Any]) -> None:
    assert run_forks(2, resume, str(tmp_path), given) == [[(True, True)] * 4] * 2


TRAINED = {name: given for name, given in {**METHODS, **WITHOUT_MOMENTUM}.items() if "overrides" not in given}


def train_method(rank: int, gradients: Mapping[str, Any], case: tuple[bool, bool]) -> tuple[bool, list[float]]:
    """Return whether ranks have the same weights, and the losses."""
    start()
    options = options_of(case)
    options = replace(options, optimizer={**options.optimizer, "adam_beta1": 0.0})
    run = Run({"gradients": {"min_numel": 0, **gradients}}, options, rank)
    losses = [run.step(step % 4)[0] for step in range(40)]
    run.gathered()
    return all(same_on_all(parameter.detach()) for parameter in run.model.parameters()), losses


@pytest.mark.parametrize("case", [(True, True), (False, False)], ids=["distributed", "plain"])
@pytest.mark.parametrize("name", TRAINED)
def test_every_method_trains(name: str, case: tuple[bool, bool]) -> None:
    for same, losses in run_forks(2, train_method, TRAINED[name], case):
        assert same
        assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


def lines(rank: int, directory: str) -> tuple[int, int]:
    """Return the bytes that Megatron alone would have sent in a step: reported, and computed."""
    start()
    run = Run({**FOUR_BITS, "monitor": {"path": directory, "announce": False}}, options_of((False, True)), rank)
    figures: list[Any] = []
    run.attached.session.subscribe(figures.append)
    run.after(range(3))
    size = sum(4 * parameter.numel() for parameter in run.model.parameters())
    return figures[-1].bytes_uncompressed if figures else 0, size if rank == 0 else 0


def test_rank_0_writes_figures(tmp_path: Path) -> None:
    for counted, true in run_forks(2, lines, str(tmp_path)):
        assert counted == true
    assert len((tmp_path / "compression.jsonl").read_text().splitlines()) == 3


def save_by_megatron(run: Run, directory: str) -> None:
    checkpointing().save({"step": 1, **run.attached.sharded_state_dict()}, directory)


def load_by_megatron(run: Run, directory: str) -> None:
    request = run.attached.sharded_state_dict(directory)
    run.attached.load_state_dict(checkpointing().load({"step": 0, **request}, directory))


def remembered(rank: int, directory: str, saves: bool, own: bool) -> dict[str, float]:
    """Return the sums of this rank's residuals of gradients by parameter, after some steps or after loading.

    With `own`, they are in Megatron's checkpoints.
    """
    start()
    run = Run(FOUR_BITS, options_of((True, False)), rank)
    if saves:
        run.after(range(3, 6))
        save_by_megatron(run, directory) if own else run.attached.save(directory)
    elif own:
        load_by_megatron(run, directory)
    else:
        run.attached.load(directory)
    found = {name: 0.0 for name, _ in run.model.module.named_parameters()}
    for (name, _, _), values in run.attached.session.stores["gradients"].items():
        found[name] += values.double().sum().item()
    return found


@pytest.mark.parametrize("own", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["beside", "own"])
def test_sums_of_residuals_survive_another_number_of_ranks(tmp_path: Path, own: bool) -> None:
    saved = run_forks(3, remembered, str(tmp_path), True, own)
    loaded = run_forks(2, remembered, str(tmp_path), False, own)
    sums = [{name: sum(rank[name] for rank in ranks) for name in ranks[0]} for ranks in (saved, loaded)]
    assert any(sums[0].values())
    assert sums[1] == pytest.approx(sums[0], abs=1e-6)


def without_residuals(rank: int, directory: str) -> str:
    """Return the error about a checkpoint that was written without this package."""
    start()
    run = Run(FOUR_BITS, options_of((True, False)), rank)
    checkpointing().save({"step": 1}, directory)
    return messages.refusal(deepspeed_compress.StateError, load_by_megatron, run, directory)


def test_a_checkpoint_without_residuals_is_refused(tmp_path: Path) -> None:
    for message in run_forks(2, without_residuals, str(tmp_path)):
        assert "was the checkpoint written without this package?" in message
        assert '"on_missing_state": "reset"' in message


def averaged(rank: int) -> list[bool]:
    """Return, by case, whether a mean by the collective has the bits of a factor before it.

    gloo has no such mean, so Megatron alone cannot run this.
    """
    start()
    found = []
    for case in CASES:
        plain = options_of(case)
        ends = []
        for options in (plain, replace(plain, ddp={**plain.ddp, "average_in_collective": True})):
            ends.append(Run(FOUR_BITS, options, rank).after(range(3)))
        found.append(ends[0] == ends[1])
    return found


def test_means_of_collectives() -> None:
    assert run_forks(2, averaged) == [[True] * 4] * 2


def everywhere(rank: int) -> list[tuple[bool, bool]]:
    """Return whether all ranks have all means, and whether owners keep residuals of the means.

    The distributed optimizer is used as it is, and with a forced all-reduce.
    """
    start()
    found = []
    for forced in (False, True):
        run = Run(FOUR_BITS, options_of((True, False)), rank)
        run.clear()
        run.loss(0).backward()
        run.model.finish_grad_sync(force_all_reduce=forced)
        same = all(same_on_all(parameter.main_grad) for parameter in run.model.parameters())
        run.optimizer.step()
        found.append((same, bool(norms_of(run.attached).get("means"))))
    return found


def test_a_reduction_that_is_forced_reaches_all_ranks() -> None:
    assert run_forks(2, everywhere) == [[(False, False), (True, True)]] * 2


def twice(rank: int) -> tuple[bool, str]:
    """Synchronize twice in a step, which is correct with error feedback and refused for methods with momentum."""
    start()
    run = Run(FOUR_BITS, options_of((False, False)), rank)
    for step in range(3):
        run.clear()
        synchronise_twice(run, step, step + 100)
        run.optimizer.step()
    same = all(same_on_all(parameter.detach()) for parameter in run.model.parameters())
    sgd = {"optimizer": "sgd", "sgd_momentum": 0.0}
    dgc = {"gradients": {"method": "dgc", "density": 0.1, "min_numel": 0}}
    run = Run(dgc, replace(options_of((False, False)), optimizer=sgd), rank)
    run.clear()
    return same, messages.refusal(UnsupportedError, synchronise_twice, run, 0, 1)


def synchronise_twice(run: Run, *micros: int) -> None:
    for micro in micros:
        run.loss(micro).backward()
        run.model.finish_grad_sync()


def test_two_synchronisations_in_a_step() -> None:
    for same, message in run_forks(2, twice):
        assert same
        assert "in no_sync()" in message


def nodes(rank: int) -> bool:
    start()
    run = Run(NODES, options_of((True, True)), rank)
    losses = [run.step(step % 4)[0] for step in range(30)]
    run.gathered()
    same = all(same_on_all(parameter.detach()) for parameter in run.model.parameters())
    return same and sum(losses[-4:]) < 0.8 * sum(losses[:4])


def test_a_hierarchy() -> None:
    assert run_forks(4, nodes) == [True] * 4


def context(rank: int) -> list[bool]:
    """Return, by case, whether training is correct with ranks that share sequences in the group of the reduction."""
    start(context_parallel_size=2)
    found = []
    for case in CASES:
        runs = [Run(given, options_of(case), rank) for given in (None, NONE, FOUR_BITS)]
        ends = [run.after(range(3)) for run in runs]
        same = all(same_on_all(parameter.detach()) for parameter in runs[2].model.parameters())
        found += [ends[0] == ends[1], ends[0] != ends[2], same]
    return found


def test_a_group_with_context_parallel_ranks() -> None:
    assert run_forks(2, context) == [[True] * 12] * 2


def two_models(rank: int) -> bool:
    """Return True if two models with messages in flight at once, as in adversarial training, end as each does alone."""
    start()
    ends = []
    for together in (True, False):
        runs = [Run(given, options_of((True, True)), rank) for given in (STOCHASTIC, FOUR_BITS)]
        for step in range(3):
            for run in runs:
                run.clear()
            if together:
                sum(run.loss(step) for run in runs).backward()
            for run in runs:
                if not together:
                    run.loss(step).backward()
                run.model.finish_grad_sync()
                run.optimizer.step()
        ends.append([run.weights() for run in runs])
    return ends[0] == ends[1]


def test_two_models_at_once() -> None:
    assert run_forks(2, two_models) == [True] * 2


def alone(rank: int) -> bool:
    """Train on one rank, which sends nothing and changes nothing."""
    start()
    with pytest.warns(deepspeed_compress.CompressWarning, match="data-parallel size is 1"):
        run = Run(FOUR_BITS, options_of((True, True)), rank)
    return run.after(range(3)) == Run(None, options_of((True, True)), rank).after(range(3))


def test_one_rank() -> None:
    assert run_forks(1, alone) == [True]


WEIGHTS = {"weights": {"method": "blockwise"}}
REFUSED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "guard": ({"guard": {}}, {}, "/deepspeed_compress/guard works only with DeepSpeed"),
    "islands": ({"islands": {"size": 1}}, {}, "/deepspeed_compress/islands works only with DeepSpeed"),
    "ownership": ({"ownership": "balanced"}, {}, "/deepspeed_compress/ownership works only with DeepSpeed"),
    "momentum": ({"gradients": {"method": "demo"}}, {}, "/deepspeed_compress/gradients/method demo"),
    "mxfp8": ({}, {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}, "reuse_grad_buf"),
    "fsdp": ({}, {"use_megatron_fsdp": True}, "use_megatron_fsdp"),
    "instances": ({}, {"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances"),
    "registered": ({}, {"nccl_ub": True}, "nccl_ub"),
}


def refusals(rank: int) -> dict[str, str]:
    start()
    found = {name: refusal(given, changed) for name, (given, changed, _) in REFUSED.items()}
    run = Run(FOUR_BITS, options_of((True, True)), rank)
    for name, chunk in {"twice": run.model, "another": nn.Linear(1, 1)}.items():
        found[name] = refusal_to_attach(chunk, run.optimizer, FOUR_BITS)
    other, plain = torch.optim.AdamW(run.model.parameters()), Run(None, options_of((True, True)), rank)
    return {**found, "optimizer": refusal_to_attach(plain.model, other, WEIGHTS)}


def refusal_to_attach(model: Any, optimizer: Any, given: Mapping[str, Any]) -> str:
    attach = deepspeed_compress.megatron.attach
    return messages.refusal(UnsupportedError, attach, model, optimizer, {SECTION: given})


def refusal(given: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    run = Run(None, options_of((True, True)), 0)
    for name, value in changed.items():
        # Megatron would start what no CPU has.
        setattr(run.model.ddp_config, name, value)
    return refusal_to_attach(run.model, run.optimizer, given)


def test_unsupported_programs_are_refused_by_name() -> None:
    expected = {name: text for name, (_, _, text) in REFUSED.items()}
    expected |= {"twice": "already attached", "another": "it is Linear", "optimizer": "its optimizer is AdamW"}
    for found in run_forks(2, refusals):
        assert found.keys() == expected.keys()
        assert [name for name, text in expected.items() if text not in found[name]] == []


def unknown_version(rank: int) -> str:
    start()
    import megatron.core

    megatron.core.__version__ = "0.18.0"
    return messages.refusal(deepspeed_compress.SeamError, Run, FOUR_BITS, options_of((True, True)), rank)


def test_a_version_that_is_not_known_is_refused_by_name() -> None:
    [message] = run_forks(1, unknown_version)
    assert "megatron-core 0.18.0 is installed" in message
    assert "megatron-core >=0.16.0,<0.17" in message


BOTH_WAYS = {**FOUR_BITS, "weights": {"method": "blockwise", "bits": 4, "block_size": 32}}


def resume_weights(rank: int, directory: str) -> list[tuple[bool, bool]]:
    """Return whether resuming equals continuing with weights sent as differences, and a warm-up equals Megatron."""
    start()
    found = []
    for overlap in (False, True):
        options = options_of((True, overlap), dtype=torch.bfloat16)
        first, second, _ = continue_and_resume(BOTH_WAYS, options, rank, Path(directory) / str(overlap))
        warm = {**BOTH_WAYS, "schedule": {"warmup_steps": 4}}
        ends = [Run(given, options, rank).after(range(4)) for given in (None, warm)]
        # Sums over two ranks do not depend on the order, so even the bits are equal.
        found.append((first == second, ends[0] == ends[1]))
    return found


def test_weights_are_resumed_and_exact_in_a_warm_up(tmp_path: Path) -> None:
    assert run_forks(2, resume_weights, str(tmp_path)) == [[(True, True)] * 2] * 2


def exact(rank: int) -> list[bool]:
    """Return whether weights lag behind their master weights, and no longer do after synchronization."""
    start()
    found = []
    for overlap in (False, True):
        run = Run(BOTH_WAYS, options_of((True, overlap), dtype=torch.bfloat16), rank)
        for step in range(5):
            run.step(step)
        behind = any(not same for same in as_masters(run))
        run.attached.synchronise()
        found += [
            behind,
            all(as_masters(run)),
            all(same_on_all(parameter.detach()) for parameter in run.model.parameters()),
        ]
    return found


def as_masters(run: Run) -> list[bool]:
    """Return, by parameter, whether the weights equal this rank's rounded master weights."""
    pairs = []
    for group in run.model.bucket_groups:
        for bucket in group.buckets:
            share = torch.split(bucket.param_data, bucket.param_data.numel() // dist.get_world_size())[dist.get_rank()]
            for parameter in bucket.params_list:
                master = parameter.main_param
                if master is not None:
                    first = max(0, (share.data_ptr() - parameter.data_ptr()) // 2)
                    held = parameter.detach().flatten()[first : first + master.numel()]
                    pairs.append(torch.equal(held, master.view(-1).to(held.dtype)))
    return pairs


def test_weights_become_exact_when_they_are_asked_for() -> None:
    assert run_forks(2, exact) == [[True] * 6] * 2


def left(rank: int) -> list[bool]:
    """Return whether weights are exact and equal after detaching, and after a step of Megatron alone."""
    start()
    found = []
    for overlap in (False, True):
        run = Run(BOTH_WAYS, options_of((True, overlap), dtype=torch.bfloat16), rank)
        for step in range(3):
            run.step(step)
        run.attached.detach()
        found += [all(as_masters(run)), not any("start_param_sync" in vars(group) for group in run.model.bucket_groups)]
        run.step(3)
        run.gathered()
        found += [all(as_masters(run)), all(same_on_all(parameter.detach()) for parameter in run.model.parameters())]
    return found


def test_weights_are_exact_after_detaching() -> None:
    assert run_forks(2, left) == [[True] * 8] * 2


PHASES = {"total_steps": 10, "phases": [{"until": 0.5, "weights": {"method": "none"}}, {"until": 1.0}]}
REFUSED_WEIGHTS = [
    ({**WEIGHTS, "schedule": PHASES}, Options(dtype=torch.bfloat16), "schedule/phases works only with DeepSpeed"),
    (WEIGHTS, Options(distributed=False, dtype=torch.bfloat16), "no weights are sent"),
    (WEIGHTS, Options(), "no separate master weights"),
    ({"weights": {"method": "blockwise", "overlap": True}}, Options(dtype=torch.bfloat16), "weights/overlap: true"),
    ({"weights": {"method": "blockwise", "frozen": True}}, Options(dtype=torch.bfloat16), "weights/frozen: true"),
]


def refused_weights(rank: int) -> list[str]:
    start()
    return [messages.refusal(UnsupportedError, Run, given, options, rank) for given, options, _ in REFUSED_WEIGHTS]


def test_weights_that_cannot_be_compressed_are_refused_by_name() -> None:
    [found] = run_forks(1, refused_weights)
    messages.check_contained((message for *_, message in REFUSED_WEIGHTS), found)
    assert all("/deepspeed_compress/" in text for text in found)
