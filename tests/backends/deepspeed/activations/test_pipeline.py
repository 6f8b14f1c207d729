"""Pipelines with compressed messages between stages, compared with DeepSpeed alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from deepspeed.runtime.utils import PartitionedTensor
from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress.errors import UnsupportedError
from tests.support import activations
from tests.support.forks import run_forks
from tests.support.jobs import make_engine, weights
from tests.support.messages import refusal

WIDTH, ROWS, ACCUMULATION = 64, 4, 2
EIGHT: Mapping[str, Any] = {"pipeline": {}}
FOUR: Mapping[str, Any] = {"pipeline": {"bits": 4}}
BYTES = ("bytes_pipeline", "bytes_tensor", "bytes_pipeline_saved", "bytes_tensor_saved")


class Block(nn.Module):
    """Layer that passes on hidden states, and a mask that later layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, inputs: Any) -> Any:
        if isinstance(inputs, Tensor):
            return self.linear(inputs).tanh() * self.gain
        hidden, mask = inputs
        if mask.is_floating_point():
            # DeepSpeed sends a gradient for every floating-point tensor.
            mask = mask * self.gain
        return self.linear(hidden).tanh() * mask.to(hidden.dtype) * self.gain, mask


class MaskFirst(nn.Module):
    """Layer that passes on a mask, which has only the number `low`, before its hidden states."""

    def __init__(self, low: float) -> None:
        super().__init__()
        self.linear, self.low = nn.Linear(WIDTH, WIDTH), low

    def forward(self, inputs: Any) -> tuple[Tensor, Tensor]:
        mask, hidden = (inputs * 0, inputs) if isinstance(inputs, Tensor) else inputs
        hidden = self.linear(hidden).tanh() + mask.exp()
        return hidden + self.low, hidden


class Last(nn.Linear):
    """Last layer, which returns one number for each row."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 1)

    def forward(self, inputs: Any) -> Tensor:
        return super().forward(inputs if isinstance(inputs, Tensor) else inputs[0])


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean()


@dataclass(frozen=True)
class Job(activations.Job):
    """Training run of a pipeline. `mask` is the dtype of the mask that stages pass on; None for none.

    Each stage has `slices` ranks that share what they send. Here all of them hold the whole stage.
    """

    rows = ROWS
    layout = MappingProxyType({"gradient_accumulation_steps": ACCUMULATION})
    mask: torch.dtype | None = None
    stages: int = 2
    slices: int = 1

    def batches(self, dtype: torch.dtype, seed: int = 0) -> Iterator[tuple[Any, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(ROWS, WIDTH, generator=generator)
            mask = torch.rand(ROWS, WIDTH, generator=generator) < 0.9
            target = x[:, :1] - x[:, 1:2]
            yield (x.to(dtype) if self.mask is None else (x.to(dtype), mask.to(self.mask))), target


def start(job: Job, layer: LayerSpec | None = None) -> Any:
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    layers = [*(layer or LayerSpec(Block) for _ in range(2 * job.stages - 1)), LayerSpec(Last)]
    topology = PipeModelDataParallelTopology(num_pp=job.stages, num_mp=job.slices, num_dp=1)
    model = PipelineModule(layers, topology=topology, loss_fn=mean_square, partition_method="uniform")
    engine = make_engine(model, job.config())
    engine.has_bool_tensors = job.mask is torch.bool
    return engine


@dataclass
class Outcome:
    """Results of a rank: losses of training and evaluation, parameters, and counted bytes of each step.

    Bytes are those between stages, those inside a stage, and what compression saved of both.
    """

    losses: list[float]
    evaluated: list[float]
    parameters: dict[str, list[float]]
    bytes: list[tuple[int, ...]]


def train_all(rank: int, *jobs: Job) -> list[Outcome]:
    return [train_one(job) for job in jobs]


def train_one(job: Job) -> Outcome:
    engine = start(job)
    counted: list[tuple[int, ...]] = []
    if job.activations is not None:
        engine.compression.subscribe(lambda step: counted.append(tuple(getattr(step, name) for name in BYTES)))
    batches = job.batches(next(engine.module.parameters()).dtype)
    found = Outcome([], [float(engine.eval_batch(batches))], {}, counted)
    for _ in range(3):
        found.losses.append(float(engine.train_batch(batches)))
    found.parameters = weights(engine)
    engine.destroy()
    return found


MASKS = (None, torch.int64, torch.float32, torch.bool)


def test_losses_are_near_those_of_deepspeed_and_evaluation_is_exact() -> None:
    """The mask is an integer, a float, or a bool, which DeepSpeed sends in fp16."""
    jobs = [Job(kind, mask=mask) for mask in MASKS for kind in (None, EIGHT, FOUR)]
    for rank in run_forks(2, train_all, *jobs):
        for first in range(0, len(jobs), 3):
            plain, eight, four = rank[first : first + 3]
            assert eight.evaluated == four.evaluated == plain.evaluated
            assert eight.losses == pytest.approx(plain.losses, rel=1e-3)
            assert four.losses == pytest.approx(plain.losses, rel=3e-2)
            assert plain.losses != eight.losses != four.losses


@pytest.mark.slow
def test_bf16_and_more_stages() -> None:
    """In bf16, a stage in the middle passes on what it has received."""
    bf16 = {"bf16": {"enabled": True}}
    jobs = [Job(kind, mask=torch.bool, stages=3, extra=bf16) for kind in (None, EIGHT, FOUR)]
    for plain, eight, four in run_forks(3, train_all, *jobs):
        assert eight.losses == pytest.approx(plain.losses, rel=1e-2)
        assert four.losses == pytest.approx(plain.losses, rel=5e-2)


def payload(numel: int, bits: int) -> int:
    """Return the bytes of a message: codes, and a scale in bf16 for each 64 elements."""
    return numel * bits // 8 + numel // 64 * 2


@pytest.mark.parametrize(("activations", "bits"), [(EIGHT, 8), (FOUR, 4)])
def test_bytes_are_those_on_the_wire(activations: Mapping[str, Any], bits: int) -> None:
    one, _ = run_forks(2, train_all, Job(activations))
    numel = ROWS * WIDTH
    sent = ACCUMULATION * payload(numel, bits)
    assert one[0].bytes[1:] == [(sent, 0, ACCUMULATION * numel * 4 - sent, 0)] * 2


@pytest.mark.parametrize(("activations", "bits"), [(EIGHT, 8), pytest.param(FOUR, 4, marks=pytest.mark.slow)])
def test_ranks_of_a_stage_gather_compressed_parts(activations: Mapping[str, Any], bits: int) -> None:
    """The first stage gathers its outputs and their gradients, the last one its inputs."""
    jobs = [Job(slices=2), Job(activations, slices=2), Job(activations)]
    ranks = run_forks(4, train_all, *jobs[:2])
    whole = run_forks(2, train_all, jobs[2])
    numel = ROWS * WIDTH // 2
    part = ACCUMULATION * payload(numel, bits)
    saved = ACCUMULATION * numel * 4 - part
    for stage in range(2):
        (plain, one), (_, two) = ranks[2 * stage : 2 * stage + 2]
        assert one.evaluated == plain.evaluated
        assert one.losses == pytest.approx(plain.losses, rel=1e-3 if bits == 8 else 3e-2)
        assert (one.losses, one.parameters) == (two.losses, two.parameters)
        assert (one.losses, one.parameters) == (whole[stage][0].losses, whole[stage][0].parameters)
    shapes = ACCUMULATION * 8 * torch.int64.itemsize
    assert ranks[0][1].bytes[1:] == [(part + shapes, 2 * part, saved, 2 * saved)] * 2


def messages(rank: int, job: Job) -> list[tuple[str, int]]:
    """Return dtype and elements of the messages that this rank sends in a step, without shapes."""
    engine, found = start(job), []
    batches = job.batches(torch.float32)
    engine.train_batch(batches)
    original = p2p.dist.send

    def send(tensor: Tensor, *args: Any, **options: Any) -> Any:
        found.append((str(tensor.dtype).removeprefix("torch."), tensor.numel()))
        return original(tensor, *args, **options)

    p2p.dist.send = send
    engine.train_batch(batches)
    p2p.dist.send = original
    return found


@pytest.mark.parametrize("mask", [torch.int64, torch.float32, torch.bool])
def test_masks_and_integers_are_sent_exactly(mask: torch.dtype) -> None:
    first, second = run_forks(2, messages, Job(EIGHT, mask=mask))
    numel = ROWS * WIDTH
    sent_as = "float16" if mask is torch.bool else str(mask).removeprefix("torch.")
    assert first == [("uint8", payload(numel, 8)), (sent_as, numel)] * ACCUMULATION
    exact = [("float32", numel)] if mask is torch.float32 else []
    assert second == [("uint8", payload(numel, 8)), *exact] * ACCUMULATION


def interrupted(rank: int) -> tuple[bool, bool, bool]:
    """Return whether DeepSpeed's functions and the engine are its own after errors, and after `detach`."""
    engine = start(Job(EIGHT))
    theirs = p2p.send, p2p.recv, PartitionedTensor.full
    table = engine._INSTRUCTION_MAP
    for instruction in (schedule.SendActivation, schedule.ForwardPass):
        with pytest.raises(IndexError):
            table[instruction](engine, buffer_id=10**9)
    same = (p2p.send, p2p.recv, PartitionedTensor.full) == theirs
    deepspeed_compress.detach(engine)
    return same, "_INSTRUCTION_MAP" in vars(engine), (p2p.send, p2p.recv, PartitionedTensor.full) == theirs


def test_nothing_is_left_behind() -> None:
    assert run_forks(2, interrupted) == [(True, False, True)] * 2


def masks_first(rank: int) -> list[str]:
    """Return the messages for stages that pass on masks before their hidden states."""
    job, found = Job(EIGHT), []
    for low in (-torch.inf, torch.finfo(torch.float32).min):  # the second is that of transformers
        engine = start(job, LayerSpec(MaskFirst, low))
        found.append(refusal(UnsupportedError, engine.train_batch, job.batches(torch.float32)))
    return found


def test_a_mask_before_hidden_states_is_refused_by_all_stages() -> None:
    for messages in run_forks(2, masks_first):
        for message in messages:
            assert "/deepspeed_compress/activations/pipeline: the first floating-point tensor that a stage" in message


def overflowing(rank: int, job: Job) -> tuple[int, bool]:
    """Return the number of skipped steps after one of two steps has a number that is not finite."""
    get_accelerator().is_fp16_supported = lambda: True
    engine = start(job)
    batches = [next(job.batches(torch.float16, seed)) for seed in range(2 * ACCUMULATION)]
    batches[0][0][0, 0] = float("inf")
    for first in (0, ACCUMULATION):
        engine.train_batch(iter(batches[first : first + ACCUMULATION]))
    return engine.skipped_steps, all(bool(parameter.isfinite().all()) for parameter in engine.module.parameters())


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1}}


@pytest.mark.parametrize("activations", [None, EIGHT, FOUR], ids=["none", "8 bits", "4 bits"])
def test_a_step_that_is_not_finite_is_skipped_on_all_stages(activations: Mapping[str, Any] | None) -> None:
    assert run_forks(2, overflowing, Job(activations, extra=FP16)) == [(1, True)] * 2
