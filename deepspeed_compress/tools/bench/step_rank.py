"""One rank of `bench step`: measures the bare model, then each contender at each rate, all in this process."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_compress.monitor import KINDS
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.links import UNLIMITED, set_own_rate
from deepspeed_compress.tools.bench.rows import Emit, Log, Row, rank_main
from deepspeed_compress.tools.bench.systems import System, compute_only, make, tokens
from deepspeed_compress.tools.bench.workload import Contender, Group, Workload

__all__ = ["measure", "measure_group"]

SETTLING_STEPS = 1
"""Not measured, after every change of the rate: the congestion window finds it."""
UNCOMPRESSED = "bytes_uncompressed"
Step = Callable[[], object]


@dataclass(frozen=True)
class Counted:
    """An optimizer step on this rank as the package counts it: payload bytes by kind, milliseconds by phase."""

    sizes: Mapping[str, int]
    phases: Mapping[str, float]


def measure(job: Row, emit: Emit, log: Log) -> None:
    """The program on an emulated host. `job`: a group, the rates, and measured steps at each."""
    gauges.join()
    measure_group(Group.from_json(job["group"]), dict(zip(job["rates"], job["steps"], strict=True)), emit, log)
    dist.barrier()
    dist.destroy_process_group()


def measure_group(group: Group, steps: Mapping[str | None, int], emit: Emit, log: Log) -> None:
    """Measure every contender with so many steps at each rate (None: the link as it is). Rank 0 emits and says."""
    emit, log = _first_only(emit), _first_only(log)
    log("compute only")
    alone = _compute_only(group.workload, max(steps.values()))
    for contender in group.contenders:
        for row in _measure(group.workload, contender, steps, log):
            emit({"workload": asdict(group.workload), "contender": asdict(contender)} | alone | row)


def _first_only(action: Callable[[Any], None]) -> Callable[[Any], None]:
    return action if dist.get_rank() == 0 else lambda _: None


def _compute_only(workload: Workload, count: int) -> Row:
    _step_of(workload, compute_only(workload))()  # what it loads once is no part of any contender's memory
    peak = gauges.Peak()
    system = compute_only(workload)
    step = _step_of(workload, system)
    peak.begin()
    gauges.times(step, system.first_steps)
    dist.barrier()
    seconds = gauges.times(step, count)
    dist.barrier()
    return {
        "compute_only_s": gauges.over_ranks(seconds),
        "compute_only_peak_bytes": gauges.gather(peak.bytes()),
    }


def _step_of(workload: Workload, system: System) -> Step:
    return partial(system.stepper.train, tokens(workload, system.share))


def _measure(workload: Workload, contender: Contender, steps: Mapping[str | None, int], log: Log) -> Iterable[Row]:
    """Make the contender, measure it at every rate, and take it down."""
    _set_rate(UNLIMITED, steps)
    peak = gauges.Peak()
    system = make(workload, contender)
    step, counted = _step_of(workload, system), _count_steps(system.session)
    peak.begin()
    gauges.times(step, system.first_steps)
    for rate, count in steps.items():
        log(f"{contender.name}{f' at {rate}' if rate else ''}")
        yield _measure_rate(rate, count, system, step, counted, peak)
    _set_rate(UNLIMITED, steps)
    system.close()


def _set_rate(rate: str, steps: Iterable[str | None]) -> None:
    if None not in steps:
        set_own_rate(rate)


def _count_steps(session: Any) -> list[Counted]:
    """A list that grows by every step of `session`: the meter holds this rank's figures until a step is finished."""
    counted: list[Counted] = []
    if session is None:
        return counted
    finish = session.finish

    def finish_counted(finished: object) -> None:
        counted.append(Counted(session.meter.sizes(), session.meter.milliseconds()))
        finish(finished)

    session.finish = finish_counted
    return counted


def _measure_rate(
    rate: str | None, count: int, system: System, step: Step, counted: list[Counted], peak: gauges.Peak
) -> Row:
    """`count` periods of the system; seconds and bytes are those of a step."""
    if rate is not None:
        set_own_rate(rate)
    dist.barrier()
    gauges.times(step, SETTLING_STEPS)
    counted.clear()
    begin, steps = gauges.quiet_counters() if rate is not None else None, count * system.period
    seconds = _by_period(gauges.times(step, steps), system.period)
    sent = gauges.quiet_counters().since(begin, steps) if begin is not None else {}
    return {
        "ranks": dist.get_world_size(),
        "rate": rate,
        "steps": steps,
        "step_s": gauges.over_ranks(seconds),
        "split_ms": _split(seconds, counted),
        "traffic": gauges.gather(sent | _mean_sizes(counted)),
        "peak_bytes": gauges.gather(peak.bytes()),
        "residual_bytes": gauges.gather(_residual_bytes(system.session)),
    }


def _by_period(seconds: list[float], period: int) -> list[float]:
    """Means of each `period` steps: of local SGD most are short and some long, and a median would be of one kind."""
    return [statistics.mean(seconds[begin : begin + period]) for begin in range(0, len(seconds), period)]


def _split(seconds: list[float], counted: list[Counted]) -> dict[str, float] | None:
    """Milliseconds of a step, by phase and the rest: medians over the steps, means over the ranks."""
    phases = [
        {"compute": 1e3 * whole - sum(step.phases.values())} | dict(step.phases)
        for whole, step in zip(seconds, counted, strict=False)
    ]
    if not phases:
        return None
    ranks = gauges.gather({name: statistics.median(step[name] for step in phases) for name in phases[0]})
    return {name: statistics.mean(rank[name] for rank in ranks) for name in phases[0]}


def _mean_sizes(counted: list[Counted]) -> dict[str, float]:
    """Payload bytes of a step by kind, and in all: as it is, and with gradients uncompressed."""
    if not counted:
        return {}
    sizes = {name: statistics.mean(step.sizes[name] for step in counted) for name in (*KINDS, UNCOMPRESSED)}
    whole = sum(sizes[name] for name in KINDS)
    return sizes | {"predicted": whole, "predicted_uncompressed": whole - sizes["bytes_sent"] + sizes[UNCOMPRESSED]}


def _residual_bytes(session: Any) -> int | None:
    """What the memories of this rank hold between steps."""
    if session is None:
        return None
    payloads: Iterable[torch.Tensor] = (payload for store in session.stores.values() for _, payload in store.payloads())
    return sum(payload.numel() * payload.element_size() for payload in payloads)


if __name__ == "__main__":
    rank_main(measure)
