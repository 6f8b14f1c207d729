"""One rank of the benchmark: bench.py starts it on every host of a cluster, with a Job as its only argument.

Measures the step of the bare model, then of each method at each rate, all in this process; rank 0 appends a row for
every method and rate to the job's result file.
"""

import gc
import itertools
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from cluster import DEVICE, UNLIMITED, set_own_rate
from job import PROGRESS, Job
from torch import Tensor

import deepspeed_compress
from deepspeed_compress.models import build_model, read_model_config

LEARNING_RATE, CLIPPING = 1e-3, 1.0
FIRST_STEPS = 2
"""Not measured, without a limit, after an engine is made: ZeRO 3 records the order of layers, memory is allocated."""
SETTLING_STEPS = 1
"""Not measured, after every change of the rate: the congestion window finds it."""


@dataclass(frozen=True)
class Counters:
    """What eth0 of this host sent since it was made. `packets` are those that the kernel handed to the interface, up
    to 64 KiB each; `segments` are TCP's, up to the MTU, without the `retransmitted` ones."""

    interface: int
    packets: int
    segments: int
    retransmitted: int

    def since(self, begin: "Counters", steps: int) -> dict[str, float]:
        """Per step."""
        return {name: (value - getattr(begin, name)) / steps for name, value in asdict(self).items()}


@dataclass(frozen=True)
class Bytes:
    """Payload of an optimizer step on this rank as `deepspeed_compress` counts it."""

    gradients: int
    weights: int
    uncompressed: int


def main() -> None:
    job = Job.from_json(sys.argv[1])
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.init_distributed()
    _say(f"{dist.get_world_size()} hosts, ZeRO {job.stage}: compute only")
    batch = _batch(job)
    compute_only = _over_ranks(_compute_only(job, batch))
    for method, section in job.sections.items():
        _measure_method(job, batch, method, section, compute_only)
    dist.barrier()
    dist.destroy_process_group()


def _batch(job: Job) -> Tensor:
    """Random tokens [micro_batch, seq_len], others on each rank."""
    generator = torch.Generator().manual_seed(job.seed + 1 + dist.get_rank())
    vocabulary = read_model_config(Path(job.model)).vocab_size
    return torch.randint(vocabulary, (job.micro_batch, job.seq_len), generator=generator)


def _model(job: Job) -> Any:
    return build_model(Path(job.model), read_model_config(Path(job.model)), job.seed)


def _compute_only(job: Job, batch: Tensor) -> list[float]:
    """Seconds of each step of the same model and optimizer on one host, with nothing to communicate."""
    model = _model(job).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()

    _times(step, FIRST_STEPS)
    dist.barrier()
    times = _times(step, max(job.steps))
    dist.barrier()
    return times


def _measure_method(job: Job, batch: Tensor, method: str, section: dict[str, Any] | None, compute_only: object) -> None:
    """Make the engine, measure it at every rate, and take it down."""
    gc.collect()  # the engine before
    set_own_rate(UNLIMITED)
    engine, counted = _engine(job, section)

    def step() -> None:
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()

    _times(step, FIRST_STEPS)
    for rate, steps in zip(job.rates, job.steps, strict=True):
        _say(f"{dist.get_world_size()} hosts, ZeRO {job.stage}: {method} at {rate}")
        row = {"hosts": dist.get_world_size(), "stage": job.stage, "rate": rate, "method": method}
        _write(job, row | {"compute_only_s": compute_only} | _measure_rate(rate, steps, step, counted))
    set_own_rate(UNLIMITED)
    engine.destroy()


def _engine(job: Job, section: dict[str, Any] | None) -> tuple[Any, list[Bytes]]:
    """An engine, and a list that grows by the payload of every step, for ever empty without a section."""
    model, config = _model(job).train(), _ds_config(job)
    if section is None:
        return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0], []
    config["deepspeed_compress"] = section
    engine = deepspeed_compress.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    return engine, _count_steps(engine.compression)


def _ds_config(job: Job) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": job.micro_batch,
        "gradient_clipping": CLIPPING,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": LEARNING_RATE, "torch_adam": True}},
        "zero_optimization": {"stage": job.stage},
    }


def _count_steps(session: Any) -> list[Bytes]:
    """Statistics are written by rank 0 alone; every rank's own figures are in the meter until a step is finished."""
    counted: list[Bytes] = []
    finish = session.finish

    def finish_counted(finished: object) -> None:
        meter = session.meter
        counted.append(Bytes(meter.bytes_sent, meter.bytes_weights, meter.bytes_uncompressed))
        finish(finished)

    session.finish = finish_counted
    return counted


def _measure_rate(rate: str, steps: int, step: Callable[[], None], counted: list[Bytes]) -> dict[str, Any]:
    set_own_rate(rate)
    dist.barrier()
    _times(step, SETTLING_STEPS)
    counted.clear()
    begin = _quiet_counters()
    times = _times(step, steps)
    sent = _quiet_counters().since(begin, steps)
    predicted = {name: statistics.mean(getattr(entry, name) for entry in counted) for name in _names(counted)}
    return {"steps": steps, "step_s": _over_ranks(times), "traffic": _gather(sent | predicted)}


def _names(counted: Sequence[Bytes]) -> list[str]:
    return list(asdict(counted[0])) if counted else []


def _quiet_counters() -> Counters:
    """Counters when nothing is under way: gloo returns from a send before the bytes have left the host."""
    dist.barrier()
    time.sleep(0.1)
    interface = Path("/proc/net/dev").read_text().partition(f"{DEVICE}:")[2].split()
    names, values = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line]
    tcp = dict(zip(names, values, strict=True))
    return Counters(int(interface[8]), int(interface[9]), int(tcp["OutSegs"]), int(tcp["RetransSegs"]))


def _times(step: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of `count` steps."""
    marks = [time.perf_counter()]
    for _ in range(count):
        step()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(marks)]


def _over_ranks(times: list[float]) -> dict[str, float]:
    """Of the steps, each taken as the mean over the ranks: median, least, greatest."""
    steps = [statistics.mean(ranks) for ranks in zip(*_gather(times), strict=True)]
    return {"median": statistics.median(steps), "min": min(steps), "max": max(steps)}


def _gather(mine: object) -> list[Any]:
    """`mine` of every rank, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def _write(job: Job, row: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        with Path(job.result).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _say(text: str) -> None:
    if dist.get_rank() == 0:
        print(PROGRESS + text, flush=True)


if __name__ == "__main__":
    main()
