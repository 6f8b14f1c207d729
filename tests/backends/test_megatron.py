"""Tests of `deepspeed_compress.megatron`: Megatron programs with and without compression."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed_compress
from deepspeed_compress import UnsupportedError
from deepspeed_compress.config import SECTION
from tests.backends.contract.megatron import BOTH_WAYS, KINDS, MegatronRun, options_of
from tests.support import messages
from tests.support.attached import held_by
from tests.support.forks import run_forks
from tests.support.megatron import Options, start
from tests.support.methods import NONE
from tests.support.two_branches import FOUR_BITS, STOCHASTIC, bits_of, same_on_all

pytestmark = pytest.mark.sampled(32)


def checks(rank: int) -> list[tuple[str, str]]:
    """Return Megatron's errors about a non-finite gradient if it checks before reducing, without and with us."""
    options = replace(options_of((True, False)), ddp={"check_for_nan_in_grad": True})
    texts = []
    for given in (None, FOUR_BITS):
        run = MegatronRun(options, rank, given)
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
    wrong = []
    for case in KINDS:
        run = MegatronRun(options_of(case), rank, FOUR_BITS)
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


def lines(rank: int, directory: str) -> tuple[int, int]:
    """Return the bytes that Megatron alone would have sent in a step: reported, and computed."""
    given = {**FOUR_BITS, "monitor": {"path": directory, "announce": False}}
    run = MegatronRun(options_of((False, True)), rank, given)
    figures: list[Any] = []
    run.attached.session.subscribe(figures.append)
    run.after(range(3))
    size = sum(4 * parameter.numel() for parameter in run.model.parameters())
    return figures[-1].bytes_uncompressed if figures else 0, size if rank == 0 else 0


def test_rank_0_writes_figures(tmp_path: Path) -> None:
    for counted, true in run_forks(2, lines, str(tmp_path)):
        assert counted == true
    assert len((tmp_path / "compression.jsonl").read_text().splitlines()) == 3


def without_residuals(rank: int, directory: str) -> str:
    """Return the error about a checkpoint that was written without this package."""
    run = MegatronRun(options_of((True, False)), rank, FOUR_BITS)
    return messages.refusal(deepspeed_compress.StateError, run.attached.load, directory)


def test_a_checkpoint_without_residuals_is_refused(tmp_path: Path) -> None:
    for message in run_forks(2, without_residuals, str(tmp_path)):
        assert "was the checkpoint written without this package?" in message
        assert '"on_missing_state": "reset"' in message


def averaged(rank: int) -> list[bool]:
    """Return, by case, whether a mean by the collective has the bits of a factor before it.

    gloo has no such mean, so Megatron alone cannot run this.
    """
    found = []
    for case in KINDS:
        plain = options_of(case)
        ends = []
        for options in (plain, replace(plain, ddp={**plain.ddp, "average_in_collective": True})):
            ends.append(MegatronRun(options, rank, FOUR_BITS).after(range(3)))
        found.append(ends[0] == ends[1])
    return found


def test_means_of_collectives() -> None:
    assert run_forks(2, averaged) == [[True] * 4] * 2


def everywhere(rank: int) -> list[tuple[bool, bool]]:
    """Return whether all ranks have all means, and whether owners keep residuals of the means.

    The distributed optimizer is used as it is, and with a forced all-reduce.
    """
    found = []
    for forced in (False, True):
        run = MegatronRun(options_of((True, False)), rank, FOUR_BITS)
        run.clear()
        run.loss(0).backward()
        run.model.finish_grad_sync(force_all_reduce=forced)
        same = all(same_on_all(parameter.main_grad) for parameter in run.model.parameters())
        run.optimizer.step()
        found.append((same, any(any(kept) for (store, *_), kept in held_by(run).items() if store == "means")))
    return found


def test_a_reduction_that_is_forced_reaches_all_ranks() -> None:
    assert run_forks(2, everywhere) == [[(False, False), (True, True)]] * 2


def twice(rank: int) -> tuple[bool, str]:
    """Synchronize twice in a step, which is correct with error feedback and refused for methods with momentum."""
    run = MegatronRun(options_of((False, False)), rank, FOUR_BITS)
    for step in range(3):
        run.clear()
        synchronise_twice(run, step, step + 100)
        run.optimizer.step()
    same = all(same_on_all(parameter.detach()) for parameter in run.model.parameters())
    sgd = {"optimizer": "sgd", "sgd_momentum": 0.0}
    dgc = {"gradients": {"method": "dgc", "density": 0.1, "min_numel": 0}}
    run = MegatronRun(replace(options_of((False, False)), optimizer=sgd), rank, dgc)
    run.clear()
    return same, messages.refusal(UnsupportedError, synchronise_twice, run, 0, 1)


def synchronise_twice(run: MegatronRun, *micros: int) -> None:
    for micro in micros:
        run.loss(micro).backward()
        run.model.finish_grad_sync()


def test_two_synchronisations_in_a_step() -> None:
    for same, message in run_forks(2, twice):
        assert same
        assert "in no_sync()" in message


def context(rank: int) -> list[bool]:
    """Return, by case, whether training is correct with ranks that share sequences in the group of the reduction."""
    start(context_parallel_size=2)
    found = []
    for case in KINDS:
        runs = [MegatronRun(options_of(case), rank, given) for given in (None, NONE, FOUR_BITS)]
        ends = [run.after(range(3)) for run in runs]
        same = all(same_on_all(parameter.detach()) for parameter in runs[2].model.parameters())
        found += [ends[0] == ends[1], ends[0] != ends[2], same]
    return found


def test_a_group_with_context_parallel_ranks() -> None:
    assert run_forks(2, context) == [[True] * 12] * 2


def two_models(rank: int) -> bool:
    """Return True if two models with messages in flight at once, as in adversarial training, end as each does alone."""
    ends = []
    for together in (True, False):
        runs = [MegatronRun(options_of((True, True)), rank, given) for given in (STOCHASTIC, FOUR_BITS)]
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
        ends.append([run.after(()) for run in runs])
    return ends[0] == ends[1]


def test_two_models_at_once() -> None:
    assert run_forks(2, two_models) == [True] * 2


def alone(rank: int) -> bool:
    """Train on one rank, which sends nothing and changes nothing."""
    start()
    with pytest.warns(deepspeed_compress.CompressWarning, match="data-parallel size is 1"):
        run = MegatronRun(options_of((True, True)), rank, FOUR_BITS)
    return run.after(range(3)) == MegatronRun(options_of((True, True)), rank, None).after(range(3))


def test_one_rank() -> None:
    assert run_forks(1, alone) == [True]


WEIGHTS = {"weights": {"method": "blockwise"}}
REFUSED: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "momentum": ({"gradients": {"method": "demo"}}, {}, "/deepspeed_compress/gradients/method demo"),
    "mxfp8": ({}, {"fp8_param_gather": True, "reuse_grad_buf_for_mxfp8_param_ag": True}, "reuse_grad_buf"),
    "fsdp": ({}, {"use_megatron_fsdp": True}, "use_megatron_fsdp"),
    "instances": ({}, {"num_distributed_optimizer_instances": 2}, "num_distributed_optimizer_instances"),
    "registered": ({}, {"nccl_ub": True}, "nccl_ub"),
}


def refusals(rank: int) -> dict[str, str]:
    found = {name: refusal(given, changed) for name, (given, changed, _) in REFUSED.items()}
    run = MegatronRun(options_of((True, True)), rank, FOUR_BITS)
    for name, chunk in {"twice": run.model, "another": nn.Linear(1, 1)}.items():
        found[name] = refusal_to_attach(chunk, run.optimizer, FOUR_BITS)
    other, plain = torch.optim.AdamW(run.model.parameters()), MegatronRun(options_of((True, True)), rank, None)
    return {**found, "optimizer": refusal_to_attach(plain.model, other, WEIGHTS)}


def refusal_to_attach(model: Any, optimizer: Any, given: Mapping[str, Any]) -> str:
    attach = deepspeed_compress.megatron.attach
    return messages.refusal(UnsupportedError, attach, model, optimizer, {SECTION: given})


def refusal(given: Mapping[str, Any], changed: Mapping[str, Any]) -> str:
    run = MegatronRun(options_of((True, True)), 0, None)
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
    import megatron.core

    megatron.core.__version__ = "0.18.0"
    return messages.refusal(deepspeed_compress.SeamError, MegatronRun, options_of((True, True)), rank, FOUR_BITS)


def test_a_version_that_is_not_known_is_refused_by_name() -> None:
    [message] = run_forks(1, unknown_version)
    assert "megatron-core 0.18.0 is installed" in message
    assert "megatron-core >=0.16.0,<0.17" in message


def warmed_up(rank: int) -> list[bool]:
    """Return whether a warm-up of compressed weights equals Megatron, without overlap and with it.

    Sums over two ranks do not depend on the order, so even the bits are equal.
    """
    warm, found = {**BOTH_WAYS, "schedule": {"warmup_steps": 4}}, []
    for overlap in (False, True):
        options = options_of((True, overlap), dtype=torch.bfloat16)
        ends = [MegatronRun(options, rank, given).after(range(4)) for given in (None, warm)]
        found.append(ends[0] == ends[1])
    return found


def test_weights_are_exact_in_a_warm_up() -> None:
    assert run_forks(2, warmed_up) == [[True] * 2] * 2


def rounded_runs(rank: int, steps: int) -> Iterator[MegatronRun]:
    """Yield runs after `steps` steps with rounded bf16 weights, which are gathered without overlap and with it."""
    for overlap in (False, True):
        run = MegatronRun(options_of((True, overlap), dtype=torch.bfloat16), rank, BOTH_WAYS)
        for step in range(steps):
            run.step(step)
        yield run


def exact(rank: int) -> list[bool]:
    """Return whether weights lag behind their master weights, and no longer do after synchronization."""
    found = []
    for run in rounded_runs(rank, 5):
        behind = any(not same for same in as_masters(run))
        run.attached.synchronise()
        found += [
            behind,
            all(as_masters(run)),
            all(same_on_all(parameter.detach()) for parameter in run.model.parameters()),
        ]
    return found


def as_masters(run: MegatronRun) -> list[bool]:
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
    found = []
    for run in rounded_runs(rank, 3):
        run.attached.detach()
        found += [all(as_masters(run)), not any("start_param_sync" in vars(group) for group in run.model.bucket_groups)]
        run.step(3)
        run.weights()
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
    return [
        messages.refusal(UnsupportedError, MegatronRun, options, rank, given) for given, options, _ in REFUSED_WEIGHTS
    ]


def test_weights_that_cannot_be_compressed_are_refused_by_name() -> None:
    [found] = run_forks(1, refused_weights)
    messages.check_contained((message for *_, message in REFUSED_WEIGHTS), found)
    assert all("/deepspeed_compress/" in text for text in found)
