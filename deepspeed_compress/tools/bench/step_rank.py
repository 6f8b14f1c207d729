"""Steps of a rank: it measures the bare model, then each contender at each rate, all in this process."""

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_compress.monitor import KINDS, SAVED
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.jobs import Emit, Log, Row
from deepspeed_compress.tools.bench.links import UNLIMITED, set_own_rate
from deepspeed_compress.tools.bench.systems import System, compute_only, make, tokens
from deepspeed_compress.tools.bench.workload import Contender, Group, Workload

SETTLING_STEPS = 1
"""Steps after each change of the rate that are not measured, while the congestion window adapts."""
UNCOMPRESSED = "bytes_uncompressed"
Step = Callable[[], object]


@dataclass(frozen=True)
class Counted:
    """Optimizer step on this rank as the package counts it: payload bytes by kind, milliseconds by phase."""

    sizes: Mapping[str, int]
    phases: Mapping[str, float]


def measure(job: Row, emit: Emit, log: Log) -> None:
    """Run the measurement on an emulated host.

    `job` holds a group, the rates, the measured steps at each, and whether the bare model is measured, too.
    """
    steps = dict(zip(job["rates"], job["steps"], strict=True))
    measure_group(Group.from_json(job["group"]), steps, emit, log, bare=job["bare"])


def measure_group(group: Group, steps: Mapping[str | None, int], emit: Emit, log: Log, *, bare: bool = True) -> None:
    """Measure every contender at each rate with the given number of steps. A rate of None leaves the link as it is."""
    alone = _compute_only(group.workload, max(steps.values()), log) if bare else {}
    for contender in group.contenders:
        for row in _measure(group.workload, contender, steps, log):
            emit({"workload": asdict(group.workload), "contender": asdict(contender)} | alone | row)


def _compute_only(workload: Workload, count: int, log: Log) -> Row:
    log("compute only")
    step_of(workload, compute_only(workload))()  # memory that is loaded only once does not belong to any contender
    peak = gauges.Peak()
    system = compute_only(workload)
    step = step_of(workload, system)
    peak.begin()
    gauges.times(step, system.first_steps)
    dist.barrier()
    seconds = gauges.times(step, count)
    dist.barrier()
    return {"compute_only_s": gauges.over_ranks(seconds), "compute_only_peak_bytes": gauges.gather(peak.bytes())}


def step_of(workload: Workload, system: System) -> Step:
    """Return a step of the system on this rank's tokens."""
    return partial(system.stepper.train, tokens(workload, system.share))


def _measure(workload: Workload, contender: Contender, steps: Mapping[str | None, int], log: Log) -> Iterable[Row]:
    """Create the contender, measure it at every rate, and close it."""
    _set_rate(UNLIMITED, steps)
    peak = gauges.Peak()
    system = make(workload, contender)
    step, counted = step_of(workload, system), _count_steps(system.session)
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
    """Return a list to which every step of `session` is appended.

    The figures are read just before the step is finished, because the meter holds them only until then.
    """
    counted: list[Counted] = []
    if session is None:
        return counted
    finish = session.finish

    def finish_counted(finished: object) -> Any:
        counted.append(Counted(session.meter.sizes(), session.meter.milliseconds()))
        return finish(finished)

    session.finish = finish_counted
    return counted


def _measure_rate(
    rate: str | None, count: int, system: System, step: Step, counted: list[Counted], peak: gauges.Peak
) -> Row:
    """Measure `count` periods of the system. Seconds and bytes are per step."""
    if rate is not None:
        set_own_rate(rate)
    dist.barrier()
    choosing = 0 if system.session is None else system.session.compare_again()
    gauges.times(step, SETTLING_STEPS + choosing)
    counted.clear()
    begin, steps = {} if rate is None else gauges.quiet_counters(), count * system.period
    # Steps of local SGD are either short or long, so a median over steps would show only one kind.
    times, period = gauges.times(step, steps), system.period
    seconds = [statistics.mean(times[first : first + period]) for first in range(0, steps, period)]
    after = gauges.quiet_counters() if begin else {}
    sent = {name: (value - begin[name]) / steps for name, value in after.items()}
    return {
        "ranks": dist.get_world_size(),
        "per_host": 1 if rate is None else gauges.ranks_of_host(),
        "rate": rate,
        "steps": steps,
        "step_s": gauges.over_ranks(seconds),
        "split_ms": _split(seconds, counted),
        "traffic": gauges.gather(sent | _mean_sizes(counted)),
        "peak_bytes": gauges.gather(peak.bytes()),
        "residual_bytes": gauges.gather(_residual_bytes(system.session)),
    }


def _split(seconds: list[float], counted: list[Counted]) -> dict[str, float] | None:
    """Return the milliseconds of a step by phase and for the rest: medians over steps, means over ranks."""
    phases = [
        {"compute": 1e3 * whole - sum(step.phases.values())} | dict(step.phases)
        for whole, step in zip(seconds, counted, strict=False)
    ]
    if not phases:
        return None
    ranks = gauges.gather({name: statistics.median(step[name] for step in phases) for name in phases[0]})
    return {name: statistics.mean(rank[name] for rank in ranks) for name in phases[0]}


def _mean_sizes(counted: list[Counted]) -> dict[str, float]:
    """Return the payload bytes per step by kind and in total, the latter also as if gradients were uncompressed."""
    if not counted:
        return {}
    names = (*KINDS, *SAVED, UNCOMPRESSED)
    sizes = {name: statistics.mean(step.sizes[name] for step in counted) for name in names}
    whole, saved = (sum(sizes[name] for name in kinds) for kinds in (KINDS, SAVED))
    alone = whole + saved - sizes["bytes_sent"] + sizes[UNCOMPRESSED]
    return sizes | {"predicted": whole, "predicted_uncompressed": alone}


def _residual_bytes(session: Any) -> int | None:
    """Return the bytes that this rank's residuals hold between steps."""
    if session is None:
        return None
    payloads: Iterable[torch.Tensor] = (
        payload for store in session.residuals.by_name.values() for _, payload in store.payloads()
    )
    return sum(payload.numel() * payload.element_size() for payload in payloads)
