"""Weights that ZeRO 3 gathers: rounded alike on every rank and in every training gather, and exact everywhere else."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from torch import nn
from torch.func import functional_call

from deepspeed_compress.backends.deepspeed.weights.zero_3 import _PREFETCH, check_weights_3
from deepspeed_compress.errors import UnsupportedError
from tests.support.forks import run_forks
from tests.support.jobs import Job, Outcome, data, engines, network, run, start, train, weights
from tests.support.messages import caught_warnings
from tests.support.resuming import save_and_resume

SAMPLED = pytest.mark.sampled(4)

INT8 = {"method": "blockwise", "bits": 8, "block_size": 32}
ROUNDED = Job(3, {"gradients": {"method": "none"}, "weights": INT8})
RAW = Job(3, {"gradients": {"method": "none"}, "weights": {**INT8, "min_numel": 10**6}})
AGAIN = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 0}
"""ZeRO settings that keep no weights from forward to backward."""


@SAMPLED
@pytest.mark.parametrize("zero", [{}, AGAIN], ids=["kept", "gathered again"])
@pytest.mark.parametrize("dtype", [{}, {"bf16": {"enabled": True}}], ids=["fp32", "bf16"])
def test_uncompressed_messages_give_the_results_of_deepspeed(zero: dict[str, int], dtype: dict[str, Any]) -> None:
    alone, ours = (replace(job, zero=zero, extra=dtype) for job in (Job(3), RAW))
    for deepspeed_alone, with_us in run_forks(2, train, alone, ours):
        assert with_us == deepspeed_alone


AUTOCAST = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
ONE_BY_ONE = {"stage3_allgather_sequential": True}
WAYS = [({}, {}), (ONE_BY_ONE, {}), ({}, {"torch_autocast": AUTOCAST}), (ONE_BY_ONE, {"torch_autocast": AUTOCAST})]
"""Configurations of gathers: together or one by one, in fp32 or in bf16 for autocast."""


def test_however_weights_are_gathered() -> None:
    """Uncompressed messages are DeepSpeed's. Rounded weights depend neither on the kind of gather nor on padding."""
    jobs = [replace(job, zero=zero, extra=extra, steps=3) for zero, extra in WAYS for job in (Job(3), RAW, ROUNDED)]
    for outcomes in run_forks(2, train_with_spoilt_padding, *jobs):
        alone, raw, rounded = outcomes[::3], outcomes[1::3], outcomes[2::3]
        assert raw == alone
        assert rounded[0] == rounded[1]
        assert rounded[2] == rounded[3]
        for one, exact in zip(rounded, alone, strict=True):
            assert one != exact
            torch.testing.assert_close(one.losses, exact.losses, rtol=0.02, atol=1e-3)


def train_with_spoilt_padding(rank: int, *jobs: Job) -> list[Outcome]:
    """Train with NaN in the padding, which DeepSpeed never writes."""
    outcomes = []
    for job, engine in engines(*jobs):
        for parameter in engine.module.parameters():
            share = parameter.ds_tensor
            share.data[max(0, parameter.ds_numel - rank * share.numel()) :] = float("nan")
        outcomes.append(Outcome(run(engine, data(rank, job)), weights(engine)))
    return outcomes


def evaluate_between(rank: int, job: Job, evaluates: bool) -> dict[str, list[float]]:
    """Return the weights of a run that evaluates before each micro-step, or never."""
    engine, batches = start(job), data(rank, job)
    for x, y in batches:
        if evaluates:
            engine.eval()
            with torch.no_grad():
                engine(x)
            engine.train()
        run(engine, [(x, y)])
    found = weights(engine)
    engine.destroy()
    return found


def warned_in(rank: int, *modes: bool) -> list[str]:
    """Return the warnings of a run whose steps are in training mode, or in evaluation mode if False."""
    job = replace(ROUNDED, steps=len(modes))
    engine, batches = start(job), data(rank, job)
    with caught_warnings() as texts:
        for training, one in zip(modes, batches, strict=True):
            engine.train(training)
            run(engine, [one])
    engine.destroy()
    return texts


def test_training_in_evaluation_mode_warns_once() -> None:
    [[text], others] = run_forks(2, warned_in, True, False, False)
    assert "/deepspeed_compress/weights has no effect, because gradients are reduced while the model is in" in text
    assert others == []


@pytest.mark.parametrize("threshold", [0, 60])
def test_an_evaluation_does_not_change_how_weights_are_rounded(threshold: int) -> None:
    job = replace(ROUNDED, zero={"stage3_param_persistence_threshold": threshold}, accumulation=2)
    assert run_forks(2, evaluate_between, job, True) == run_forks(2, evaluate_between, job, False)


def prefetch_sizes(rank: int) -> list[int]:
    jobs = [replace(ROUNDED, zero=zero) for zero in ({}, {"stage3_prefetch_bucket_size": 7}, ONE_BY_ONE)]
    coordinators = (engine.optimizer.parameter_offload.get_param_coordinator() for _, engine in engines(*jobs))
    return [vars(coordinator)[_PREFETCH] for coordinator in coordinators]


def test_a_prefetch_size_is_chosen_where_none_is_given() -> None:
    assert run_forks(2, prefetch_sizes) == [[1_000_000, 7, 1]] * 2


@pytest.mark.parametrize("key", ["stage3_use_all_reduce_for_fetch_params", "zero_quantized_nontrainable_weights"])
def test_ways_that_are_not_known_are_refused(key: str) -> None:
    engine = SimpleNamespace(_config=SimpleNamespace(zero_config=DeepSpeedZeroConfig(**{key: True})))
    with pytest.raises(UnsupportedError, match=rf"/zero_optimization/{key}: True \(allowed: False\)"):
        check_weights_3(engine)


@dataclass(frozen=True)
class Seen:
    """Records of a rank.

    `forward`, `evaluation` and `exact` hold the weights of a layer in the forward of each step, in evaluation, and when
    gathered exactly. `expected` holds the loss of each step in plain PyTorch with the weights that the forward saw.
    """

    forward: list[list[float]]
    evaluation: list[float]
    exact: list[float]
    losses: list[float]
    expected: list[float]
    bytes_weights: list[int]


def watch(rank: int, *jobs: Job) -> list[Seen]:
    return [watch_one(rank, job) for job in jobs]


def watch_one(rank: int, job: Job) -> Seen:
    engine, forward, sent = start(job), [], []
    layer = engine.module[0]
    layer.register_forward_pre_hook(lambda module, inputs: forward.append(module.weight.detach().flatten().tolist()))
    seen = copies_of_weights(engine.module)
    losses, expected, finish = [], [], engine.compression.finish
    engine.compression.finish = lambda done: (sent.append(engine.compression.meter.bytes_weights), finish(done))
    for x, y in data(rank, job):
        losses += run(engine, [(x, y)])
        expected.append(float((functional_call(network(), seen, x) - y).square().mean()))
    engine.eval()
    engine(data(rank, job)[0][0].to(layer.weight.dtype))
    with deepspeed.zero.GatheredParameters([layer.weight]):
        exact = layer.weight.detach().flatten().tolist()
    engine.destroy()
    return Seen(forward[:-1], forward[-1], exact, losses, expected, sent)


def copies_of_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return a mapping that holds all parameters as the newest forward saw them."""
    seen: dict[str, torch.Tensor] = {}

    def hook(name: str) -> Callable[[nn.Module, Any], None]:
        return lambda layer, inputs: seen.update(
            {f"{name}.{key}": value.detach().clone() for key, value in layer.named_parameters(recurse=False)}
        )

    for name, layer in module.named_children():
        layer.register_forward_pre_hook(hook(name))
    return seen


def test_training_sees_the_same_rounded_weights_on_every_rank_and_nobody_else_does() -> None:
    for kept in ({}, AGAIN):
        ranks = run_forks(2, watch, replace(ROUNDED, zero=kept), replace(RAW, zero=kept))
        rounded, raw = zip(*ranks, strict=True)
        assert rounded[0].forward == rounded[1].forward
        assert rounded[0].evaluation == rounded[0].exact
        assert rounded[0].exact != rounded[0].forward[-1]
        first, true = (torch.tensor(seen[0].forward[0]) for seen in (rounded, raw))
        assert not torch.equal(first, true)
        # Half a unit of 8 bits of the largest weight of a block.
        assert float((first - true).abs().max()) <= float(true.abs().max()) / 127 / 2 * 1.001
        assert rounded[0].losses != raw[0].losses
        for seen in (*rounded, *raw):
            torch.testing.assert_close(seen.losses, seen.expected, rtol=1e-5, atol=1e-6)


def test_bytes_are_those_of_the_messages() -> None:
    """Each share has a code of one byte per element, padded to 4 bytes, and 4 bytes per block of 32."""
    once = Job(3, ROUNDED.section, steps=3)
    for first, again in run_forks(2, watch, once, replace(once, zero=AGAIN)):
        shares = [-(-numel // 2) for numel in (12 * 31, 31, 31 * 17, 17, 17 * 3, 3, 3)]
        messages = sum(-(-share // 4) * 4 + 4 * -(-share // 32) for share in shares)
        for seen, times in ((first, 1), (again, 2)):
            assert seen.bytes_weights[-1] == messages * times


def test_dense_steps_are_exact() -> None:
    section = {**ROUNDED.section, "gradients": {"bits": 8}, "schedule": {"warmup_steps": 2}}
    warm, raw = replace(ROUNDED, section=section), replace(RAW, section={**section, "weights": RAW.section["weights"]})
    for rounded, exact in run_forks(2, watch, warm, raw):
        assert rounded.losses[:2] == exact.losses[:2]
        assert rounded.losses[2] != exact.losses[2]


def test_resuming_is_exact(tmp_path: Path) -> None:
    for straight, resumed in run_forks(2, save_and_resume, ROUNDED, str(tmp_path), 2):
        assert straight == resumed
