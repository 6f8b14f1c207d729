"""Single training run with compression in one process, with threads as ranks and a hand-written ZeRO 1.

Only the network is simulated. The ranks exchange real bytes through the package's own session, reducers and gather, as
in a DeepSpeed engine. Weights are sent in bf16 and computed with in fp32; fp32 master weights and gradients are kept.
So uncompressed weights take 16 bits per element, and uncompressed gradients 32.
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo  # type: ignore[attr-defined]

from deepspeed_compress.collectives.buckets import even_partition
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reduction import GroupedReductions, Groups, ReductionContext
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.config import SECTION, CompressConfig, CompressedGradients, CompressedWeights, parse_section
from deepspeed_compress.config.places import AnyCompressedGradients
from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.monitor import Meter
from deepspeed_compress.session.engine import EngineDescription
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.session import Session
from deepspeed_compress.training.data.tokens import Windows, eval_starts, open_cache, split_windows, step_starts

__all__ = ["Rank", "Spec", "StepRecord", "run", "train"]

T = TypeVar("T")

HELD = torch.bfloat16
LEARNING_RATE, LAST_RATE, RATE_WARMUP_STEPS, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 20, 0.1, 1.0
HELD_OUT, EVAL_TOKENS, EVAL_BATCH, LOSS_EVERY = 0.05, 32768, 16, 50
TIMEOUT = timedelta(minutes=10)
"""Timeout of a message, after which the failure of a rank ends the run."""


@dataclass(frozen=True)
class Spec:
    """Complete description of a run.

    Attributes:
        section: Section of the configuration.
        betas: Betas of AdamW.
        seed: Seed of weights and batches.
        steps: Optimizer steps.
        ranks: Number of ranks.
        micro_batch: Sequences per rank and step.
        seq_len: Tokens per sequence.
        model: Digest of the model config file.
        data: Digest of the tokens.
    """

    section: Mapping[str, Any]
    betas: tuple[float, float]
    seed: int
    steps: int
    ranks: int
    micro_batch: int
    seq_len: int
    model: str
    data: str

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step` (0-based): a linear warm-up, then a cosine to a tenth."""
        if step < RATE_WARMUP_STEPS:
            return LEARNING_RATE * (step + 1) / RATE_WARMUP_STEPS
        progress = (step - RATE_WARMUP_STEPS) / max(1, self.steps - RATE_WARMUP_STEPS)
        return LEARNING_RATE * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2)


def digest(file: Path) -> str:
    """Return 16 hexadecimal digits of the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class StepRecord:
    """Bytes sent and milliseconds of CPU time of one rank in one step."""

    loss: float
    gradient_bytes: int
    weight_bytes: int
    compress_ms: float
    decompress_ms: float


class ThreadMeter(Meter):
    """Meter of the CPU time of the calling thread, because the ranks share the cores."""

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self._elapsed[name] += 1e3 * (time.thread_time() - begin)


class Rank:
    """Data-parallel rank with a whole model, and the master weights and moments of its own part.

    The model's parameters and gradients are views of two flat fp32 buffers. `held` is the copy of the weights in bf16
    that all ranks have in common.
    """

    def __init__(self, group: ProcessGroup, model: Any, spec: Spec, config: CompressConfig) -> None:
        self.group, self.model = group, model
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        sizes = [(name, math.prod(shape)) for name, shape in shapes.items()]
        parameters = Parameters(shapes, sorted(shapes))
        self.session, self.meter = _session(config, parameters, group)
        gradients, weights = _compressed(config)
        stores = ResidualStores(transactional=True)
        reductions = GroupedReductions(ReductionContext(Groups(group), parameters, stores, self.session.run))
        self.plain = reductions.at(gradients, 0, dense=True).every[0]
        self.gather = WeightReduction(weights, parameters, self.session.run).difference_gather(group, sizes, HELD)
        # Use the partition of the gather: a rank receives the mean gradients of its own master weights.
        self.partition = even_partition(sizes, group.size())
        self.weights, self.gradients = _flattened(model)
        self.held = self.weights.to(HELD)
        self.weights.copy_(self.held)
        self.master = self.gather.own(self.weights).clone()
        self.optimizer = torch.optim.AdamW([self.master], betas=spec.betas, weight_decay=WEIGHT_DECAY)
        self.session.begin(0, 1.0)

    def step(self, tokens: Tensor, rate: float) -> StepRecord:
        """Take an optimizer step on `tokens` [sequences, length]."""
        loss = self._backward(tokens)
        self._reduce()
        self._update(rate)
        self._send_weights()
        times = self.meter.milliseconds()
        record = StepRecord(
            loss, self.meter.bytes_sent, self.meter.bytes_weights, times["compress"], times["decompress"]
        )
        self.session.finish(FinishedStep(self.session.clock.step + 1, 0, True, 1.0, 1.0))
        return record

    def _backward(self, tokens: Tensor) -> float:
        self.gradients.zero_()
        loss = _loss(self.model, tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    @torch.no_grad()
    def _reduce(self) -> None:
        """Replace this rank's part of the gradients by the mean over the ranks."""
        scale = 1 / self.group.size()
        if self.session.config.gradients.method == "none":
            self.plain.reduce_scatter(self.gradients, self.partition, scale)
        else:
            self.session.gradients.reduce(self.gradients, self.partition, scale, everywhere=False)

    @torch.no_grad()
    def _update(self, rate: float) -> None:
        """Clip the mean gradient by its norm over all ranks, and update the master weights."""
        own = self.gather.own(self.gradients)
        square = own.square().sum().reshape(1)
        self.group.allreduce([square]).wait()
        self.master.grad = own.mul_(torch.clamp(CLIP_NORM / (square.sqrt() + 1e-6), max=1.0))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    @torch.no_grad()
    def _send_weights(self) -> None:
        uncompressed = self.session.plan.dense or self.session.config.weights.method == "none"
        (self.gather.synchronise if uncompressed else self.gather.gather)(self.held, self.master)
        self.weights.copy_(self.held)


def _session(config: CompressConfig, parameters: Parameters, group: ProcessGroup) -> tuple[Session, ThreadMeter]:
    """Return a session without output and without subscribers, and its meter."""
    meter, device = ThreadMeter(), torch.device("cpu")
    described = EngineDescription(
        config, {}, parameters, device, lambda sizes: (0, sizes), False, lambda: Groups(group), meter=meter
    )
    return Session(described, Patches()), meter


def _compressed(config: CompressConfig) -> tuple[AnyCompressedGradients, CompressedWeights]:
    """Return the settings of `config`, with stand-ins for "none", of which only the uncompressed path is used."""
    stand_in = CompressConfig.model_validate({"weights": {"method": "blockwise"}})
    gradients, weights = (
        next(one for one in pair if one.method != "none")
        for pair in ((config.gradients, stand_in.gradients), (config.weights, stand_in.weights))
    )
    assert isinstance(gradients, CompressedGradients)
    assert isinstance(weights, CompressedWeights)
    return gradients, weights


def _flattened(model: Any) -> tuple[Tensor, Tensor]:
    """Return flat fp32 buffers of all weights and gradients, and make the model's tensors views of them."""
    parameters = list(model.parameters())
    sizes = [parameter.numel() for parameter in parameters]
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
    gradients = torch.zeros_like(weights)
    views = zip(parameters, torch.split(weights, sizes), torch.split(gradients, sizes), strict=True)
    for parameter, weight, gradient in views:
        parameter.data, parameter.grad = weight.view_as(parameter), gradient.view_as(parameter)
    return weights, gradients


def _loss(model: Any, tokens: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def on_ranks(count: int, work: Callable[[ProcessGroup, int], T]) -> list[T]:
    """Run `work(group, rank)` on `count` threads. Return the results in rank order, or raise the first error."""
    store = HashStore()

    def start(rank: int) -> T:
        group: Any = ProcessGroupGloo(store, rank, count, TIMEOUT)
        return work(group, rank)

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(start, rank) for rank in range(count)]
        for future in as_completed(futures):
            future.result()
    return [future.result() for future in futures]


def train(spec: Spec, windows: Windows, models: Sequence[Any]) -> list[tuple[Rank, list[StepRecord]]]:
    """Train one model per rank, all with equal weights. Return each rank and its records."""
    # Set the seed here, because the section warns about a seed without randomness.
    config = parse_section({SECTION: spec.section}).model_copy(update={"seed": spec.seed})

    def work(group: ProcessGroup, index: int) -> tuple[Rank, list[StepRecord]]:
        rank = Rank(group, models[index], spec, config)
        return rank, [rank.step(_batch(spec, windows, step, index), spec.learning_rate(step)) for step in steps]

    steps = range(spec.steps)
    return on_ranks(spec.ranks, work)


def _batch(spec: Spec, windows: Windows, step: int, rank: int) -> Tensor:
    starts = step_starts(windows, spec.ranks * spec.micro_batch, spec.seed, step)
    return torch.from_numpy(windows.read(starts.reshape(spec.ranks, -1)[rank]))


def run(spec: Spec, model: Path, cache_dir: Path) -> dict[str, Any]:
    """Train and evaluate a run.

    Args:
        spec: Description of the run.
        model: Config file of a Hugging Face causal language model.
        cache_dir: Directory of the tokens (`data.build_cache`).

    Returns:
        The results as plain data for JSON.

    Raises:
        ValueError: No step is left after the dense start.
    """
    begin = time.perf_counter()
    torch.set_num_threads(1)
    windows, held_out = split_windows(open_cache(cache_dir, spec.data), spec.seq_len, HELD_OUT)
    models = [build_model(model, read_model_config(model), spec.seed) for _ in range(spec.ranks)]
    ranks, records = zip(*train(spec, windows, models), strict=True)
    if any(not torch.equal(rank.held, ranks[0].held) for rank in ranks):
        raise RuntimeError("the ranks hold different weights")
    loss, tokens = evaluate(models[0], held_out)
    return {
        "eval_loss": loss,
        "eval_tokens": tokens,
        "parameters": ranks[0].held.numel(),
        **summarise(records, ranks[0].held.numel(), ranks[0].session.config.schedule.warmup_steps),
        "seconds": time.perf_counter() - begin,
    }


@torch.no_grad()
def evaluate(model: Any, windows: Windows) -> tuple[float, int]:
    """Return the mean loss over fixed held-out windows, and the number of their tokens."""
    starts = eval_starts(windows, -(-EVAL_TOKENS // (EVAL_BATCH * windows.length)), EVAL_BATCH)
    losses = [_loss(model, torch.from_numpy(windows.read(batch))).item() for batch in starts]
    return fmean(losses), starts.size * windows.length


def summarise(records: Sequence[Sequence[StepRecord]], numel: int, warmup_steps: int) -> dict[str, Any]:
    """Return figures from the records of every rank.

    Bits are per element of the model and step. The bytes that a rank sends are multiplied by n / (n - 1), because its
    own part stays. `bits_gradients`, `bits_weights` and times are means over the steps after the dense start, and
    `bits_with_warmup` is the mean of both kinds over all steps. `losses` holds means over ranks and 50 steps each.
    """
    compressed = [record for each in records for record in each[warmup_steps:]]
    if not compressed:
        raise ValueError(
            f"all {len(records[0])} steps are among the {warmup_steps} uncompressed first steps; use more steps"
        )
    every = [record for each in records for record in each]
    factor = 8 * len(records) / (len(records) - 1) / numel
    ends = range(LOSS_EVERY, len(records[0]) + 1, LOSS_EVERY)
    return {
        "bits_gradients": factor * fmean(record.gradient_bytes for record in compressed),
        "bits_weights": factor * fmean(record.weight_bytes for record in compressed),
        "bits_with_warmup": factor * fmean(record.gradient_bytes + record.weight_bytes for record in every),
        "compress_ms": fmean(record.compress_ms for record in compressed),
        "decompress_ms": fmean(record.decompress_ms for record in compressed),
        "losses": {end: fmean(r.loss for each in records for r in each[end - LOSS_EVERY : end]) for end in ends},
    }
