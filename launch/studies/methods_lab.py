"""One training run with compressed communication in one process: the ranks are threads, and ZeRO 1 is done by hand.

Nothing is simulated but the network: bytes really travel between the ranks, through the package's own session,
reducers and gather, as they are in a DeepSpeed engine. Weights are held in bf16 and computed with in fp32, masters and
gradients are fp32: what is not compressed costs 16 bits an element for weights and 32 for gradients.
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
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.collectives.reduction import Groups, Parameters, Reductions, Site, WeightReduction
from deepspeed_compress.compression.residuals import ResidualStores
from deepspeed_compress.config import (
    SECTION,
    AnyCompressedGradients,
    CompressConfig,
    CompressedGradients,
    CompressedWeights,
    parse_section,
)
from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.monitor import EventLog, Journal, Meter
from deepspeed_compress.policy import Policy
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.records import Records
from deepspeed_compress.session.remembered import FinishedStep
from deepspeed_compress.session.reporting import Reporter
from deepspeed_compress.session.session import Session
from deepspeed_compress.training.data import Windows, eval_starts, open_cache, split_windows, step_starts

__all__ = ["Rank", "Spec", "StepRecord", "run", "train"]

T = TypeVar("T")

HELD = torch.bfloat16
LEARNING_RATE, LAST_RATE, RATE_WARMUP_STEPS, WEIGHT_DECAY, CLIP_NORM = 1e-3, 0.1, 20, 0.1, 1.0
HELD_OUT, EVAL_TOKENS, EVAL_BATCH, LOSS_EVERY = 0.05, 32768, 16, 50
TIMEOUT = timedelta(minutes=10)
"""Of a message: a rank that fails ends the run after it at the latest."""


@dataclass(frozen=True)
class Spec:
    """Everything that decides the result of a run.

    `section`: of the configuration. `betas`: of AdamW. `micro_batch`: sequences of `seq_len` tokens on each rank and
    step. `model`, `data`: digests of the file of the model's config and of the tokens.
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
        """Of step `step` (0-based): linear warm-up, then a cosine that ends at a tenth."""
        if step < RATE_WARMUP_STEPS:
            return LEARNING_RATE * (step + 1) / RATE_WARMUP_STEPS
        progress = (step - RATE_WARMUP_STEPS) / max(1, self.steps - RATE_WARMUP_STEPS)
        return LEARNING_RATE * (LAST_RATE + (1 - LAST_RATE) * (1 + math.cos(math.pi * progress)) / 2)


def digest(file: Path) -> str:
    """Of the content of a file: 16 hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:16]


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank: bytes that left it, and milliseconds of CPU time."""

    loss: float
    gradient_bytes: int
    weight_bytes: int
    compress_ms: float
    decompress_ms: float


class ThreadMeter(Meter):
    """Times are CPU times of the calling thread, since the ranks share the cores."""

    @contextmanager
    def phase(self, name: str, device: torch.device) -> Iterator[None]:
        begin = time.thread_time()
        yield
        self._elapsed[name] += 1e3 * (time.thread_time() - begin)


class Rank:
    """One data-parallel rank: a whole model, and masters and moments of its own part of the weights.

    All weights and all gradients are flat fp32 buffers in the order of the model's parameters, which are views of them.
    `held`: the weights as all ranks have them.
    """

    def __init__(self, group: ProcessGroup, model: Any, spec: Spec, config: CompressConfig) -> None:
        self.group, self.model = group, model
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        sizes = [(name, math.prod(shape)) for name, shape in shapes.items()]
        parameters = Parameters(shapes, sorted(shapes))
        self.meter = ThreadMeter()
        run = Run(StepClock(), self.meter, config.seed)
        reductions = Reductions(Site(Groups(group), parameters, ResidualStores(transactional=True), run))
        gradients, weights = _compressed(config)
        self.plain = reductions.at(gradients, 0).plain
        self.session = _session(config, run, reductions)
        self.gather = WeightReduction(weights, parameters, run).difference_gather(group, sizes, HELD)
        # The same cut as the gather's: a rank gets the mean gradient of the weights that it has the masters of.
        self.partition = even_partition(sizes, group.size())
        self.weights, self.gradients = _flattened(model)
        self.held = self.weights.to(HELD)
        self.weights.copy_(self.held)
        self.master = self.gather.own(self.weights).clone()
        self.optimizer = torch.optim.AdamW([self.master], betas=spec.betas, weight_decay=WEIGHT_DECAY)
        self.session.begin(0, 1.0)

    def step(self, tokens: Tensor, rate: float) -> StepRecord:
        """One optimizer step on `tokens` (sequences, length)."""
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
        """This rank's part of `gradients` becomes that of the mean over the ranks."""
        scale = 1 / self.group.size()
        if self.session.config.gradients.method == "none":
            self.plain.reduce_scatter(self.gradients, self.partition, scale)
        else:
            self.session.reduce(self.gradients, self.partition, scale, everywhere=False)

    @torch.no_grad()
    def _update(self, rate: float) -> None:
        """AdamW on the masters, after the mean gradient was clipped by its norm over all ranks."""
        own = self.gather.own(self.gradients)
        square = own.square().sum().reshape(1)
        self.group.allreduce([square]).wait()
        self.master.grad = own.mul_(torch.clamp(CLIP_NORM / (square.sqrt() + 1e-6), max=1.0))
        self.optimizer.param_groups[0]["lr"] = rate
        self.optimizer.step()

    @torch.no_grad()
    def _send_weights(self) -> None:
        uncompressed = self.session.dense or self.session.config.weights.method == "none"
        (self.gather.synchronise if uncompressed else self.gather.gather)(self.held, self.master)
        self.weights.copy_(self.held)


def _session(config: CompressConfig, run: Run, reductions: Reductions) -> Session:
    """One that writes nothing, and that nobody watches."""
    journal = Journal(None)
    log = EventLog(journal, writes=False)
    reporter = Reporter(config.monitor, run.meter, lambda sizes: (0, sizes), torch.device("cpu"))
    compressed = reductions if isinstance(config.gradients, CompressedGradients) else None
    records, policy = Records(reporter, journal, log), Policy(config, None, log.record)
    return Session(config, policy, run, compressed, records, None, Patches())


def _compressed(config: CompressConfig) -> tuple[AnyCompressedGradients, CompressedWeights]:
    """Settings of `config`, and any in the place of "none": of these only the plain half is used."""
    stand_in = CompressConfig.model_validate({"weights": {"method": "blockwise"}})
    gradients, weights = (
        next(one for one in pair if one.method != "none")
        for pair in ((config.gradients, stand_in.gradients), (config.weights, stand_in.weights))
    )
    assert isinstance(gradients, CompressedGradients)
    assert isinstance(weights, CompressedWeights)
    return gradients, weights


def _flattened(model: Any) -> tuple[Tensor, Tensor]:
    """Flat fp32 buffers of all weights and of all gradients; the model's own become views of them."""
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
    """`work(group, rank)` on `count` threads; the results in rank order, or the first error."""
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
    """Every rank after the last step, and its records. `models`: one a rank, of equal weights."""
    # The section warns of a seed where nothing is random.
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
    """Train and evaluate: plain data, ready for JSON.

    `model`: config file of a Hugging Face causal LM. `cache_dir` has the tokens (`data.build_cache`). Raises ValueError
    when no step is left after the dense start.
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
    """(mean loss over fixed held-out windows, number of their tokens)."""
    starts = eval_starts(windows, -(-EVAL_TOKENS // (EVAL_BATCH * windows.length)), EVAL_BATCH)
    losses = [_loss(model, torch.from_numpy(windows.read(batch))).item() for batch in starts]
    return fmean(losses), starts.size * windows.length


def summarise(records: Sequence[Sequence[StepRecord]], numel: int, warmup_steps: int) -> dict[str, Any]:
    """Figures from the records of every rank.

    Bits of an element of the model and a step: what a rank sends, times n / (n - 1) because its own part stays.
    `bits_gradients`, `bits_weights` and times are means over the steps after the dense start, `bits_with_warmup` the
    sum of both over all steps. `losses`: mean over ranks and the steps since the one before, by number of steps.
    """
    compressed = [record for each in records for record in each[warmup_steps:]]
    if not compressed:
        raise ValueError(f"{len(records[0])} steps, the first {warmup_steps} of which are uncompressed: make it more")
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
