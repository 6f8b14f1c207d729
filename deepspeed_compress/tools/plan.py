"""``ds-compress plan schedule`` and ``plan islands``.

The first shows which settings of a configuration apply at which step. The second estimates the cost of an exchange
between islands, and how often to exchange.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config import GradientsConfig, Islands, MethodConfig, expand, parse_section, read_ds_config
from deepspeed_compress.config.numbers import bit_rate
from deepspeed_compress.config.schedules import brief, total_steps
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.policy.schedule import SettingsSchedule, timeline
from deepspeed_compress.tools.plan_job import read_count
from deepspeed_compress.tools.tables import print_table


@dataclass(frozen=True)
class Interval:
    """Interval of optimizer steps with constant settings.

    Attributes:
        first: First step, from 0.
        last: Last step, inclusive, or None if the interval does not end.
        settings: Short text of the settings in force.
        bits: Bits per gradient element, or None if they depend on shapes (`powersgd`).
    """

    first: int
    last: int | None
    settings: str
    bits: float | None


def intervals(ds_config: dict[str, Any], steps: int | None) -> list[Interval]:
    """Return the schedule of `ds_config` for a training run of `steps` steps.

    Args:
        ds_config: DeepSpeed configuration.
        steps: Number of steps, or None to use what the configuration states.

    Raises:
        ConfigError: The section is invalid, or has phases although the length of training is unknown.
    """
    section = parse_section(ds_config)
    total = steps or total_steps(ds_config, section.schedule)
    if section.schedule.phases and total is None:
        raise ConfigError("--steps: is missing, and a configuration with phases does not say it; write --steps N")
    found = [one for one in timeline(SettingsSchedule(section, total)) if total is None or one[0] < total]
    ends: Sequence[int | None] = [*(first - 1 for first, *_ in found[1:]), total - 1 if total else None]
    halves = (ds_config.get(key) for key in ("bf16", "bfloat16", "fp16"))
    raw = 16 if any(half.get("enabled") for half in halves if isinstance(half, dict)) else 32
    # Weights are named if phases change them.
    name_weights = any(phase.weights for phase in section.schedule.phases)
    return [
        Interval(first, last, brief(settings) + f", weights {brief(weights)}" * name_weights, _bits(settings, raw))
        for (first, settings, weights), last in zip(found, ends, strict=True)
    ]


def _bits(settings: GradientsConfig, raw: int) -> float | None:
    if settings.method == "none":
        return float(raw)
    return settings.bits_per_element() if isinstance(settings, MethodConfig) else None


def run_schedule(options: argparse.Namespace) -> int:
    """Print the table. Return the exit code."""
    found = intervals(read_ds_config(options.config), options.steps)
    print_table(f"schedule of {options.config}", ("steps", "settings", "bits"), map(_cells, found), ("settings",))
    return 0


def _cells(interval: Interval) -> tuple[str, str, str]:
    last = "" if interval.last is None else f"{interval.last:,}"
    return f"{interval.first:,} - {last}", interval.settings, "?" if interval.bits is None else f"{interval.bits:.3g}"


CANDIDATES = (1, 2, 5, 10, 20, 30, 50, 100, 200, 500, 1000)
MAX_COST = 0.05
"""Fraction of the step time that exchanges may cost on average."""


@dataclass(frozen=True)
class Plan:
    """Estimate for an exchange every `sync_every` steps.

    Attributes:
        sync_every: Steps between exchanges.
        bytes_a_step: Mean bytes per step that an island sends.
        exchange_seconds: Seconds that one exchange takes on the network.
        step_ratio: Mean step time relative to that without exchanges.
    """

    sync_every: int
    bytes_a_step: float
    exchange_seconds: float
    step_ratio: float


def plans(settings: Islands, islands: int, parameters: int, bandwidth: float, step_seconds: float) -> list[Plan]:
    """Return a plan for each of the usual intervals and for the configured one, whose time is converted to steps.

    Args:
        settings: Settings of islands.
        islands: Number of islands.
        parameters: Number of parameters that are exchanged.
        bandwidth: Bits per second, in each direction, of the link of an island.
        step_seconds: Seconds of a step without exchanges.

    Raises:
        ConfigError: The size of a message is not known in advance, or islands are asynchronous.
    """
    if settings.elastic is not None and settings.elastic.parameter_server is not None:
        key = "/deepspeed_compress/islands/elastic/parameter_server"
        raise ConfigError(f"{key}: pushes do not block training, so they have no such cost; leave it out to see others")
    moments = 0.0 if settings.second_moments is None else 32.0 / settings.second_moments.block_size
    vector = parameters * (_bits_of_exchange(settings) + moments) / 8
    time = settings.sync_seconds
    written = settings.sync_steps or (1 if time is None else max(1, round(time / step_seconds)))
    intervals = sorted({*CANDIDATES, written})
    # As in an all-reduce, an island sends the parts that others own, and the mean of its own part to all others.
    size = 2 * (islands - 1) / islands * vector
    seconds = 8 * size / bandwidth
    return [Plan(every, size / every, seconds, _ratio(settings, every, seconds, step_seconds)) for every in intervals]


def _bits_of_exchange(settings: Islands) -> float:
    exchange = settings.exchange
    if exchange.method == "none":
        return 32.0
    if not isinstance(exchange, MethodConfig):
        key, method = "/deepspeed_compress/islands/exchange/method", exchange.method
        raise ConfigError(f'{key}: the bytes of "{method}" depend on shapes; write another method, such as "blockwise"')
    return exchange.bits_per_element()


def _ratio(settings: Islands, every: int, seconds: float, step: float) -> float:
    """Return the step time relative to that without exchanges.

    Each fragment blocks for the time that its `delay` steps do not hide.
    """
    hidden = min(settings.delay, every - 1) * step
    waited = settings.fragments * max(0.0, seconds / settings.fragments - hidden)
    # The capacity of the link is a lower bound, however much of an exchange is hidden.
    return max(1.0 + waited / (every * step), seconds / (every * step))


def recommendation(found: Sequence[Plan]) -> str:
    """Return which is the most frequent exchange that costs little, or that none does."""
    best = next((plan for plan in found if plan.step_ratio <= 1 + MAX_COST), None)
    if best is None:
        return "every interval costs more than 5 % of the time; send fewer bits, or set a delay"
    return f"sync_every {best.sync_every} costs {100 * (best.step_ratio - 1):.1f} % of the time"


def run_islands(options: argparse.Namespace) -> int:
    """Print the table and the recommended interval. Return the exit code."""
    ds_config = read_ds_config(options.config)
    section = parse_section(ds_config)
    # Refuse sections that the rest of the file contradicts.
    expand(ds_config, section)
    settings = section.islands
    if settings is None:
        raise ConfigError(f'{options.config}: /deepspeed_compress/islands is missing; write {{"by_host": true}} there')
    parameters = round(read_count(options.model, "--model"))
    most = section.communication.max_rate
    rate = options.bandwidth if most is None else min(options.bandwidth, bit_rate(most))
    # Fragments and delays do not fit into shorter intervals, which are refused.
    least = max(settings.fragments, settings.delay + 1)
    found = plans(settings, options.hosts, parameters, rate, options.step)
    found = [plan for plan in found if plan.sync_every >= least]
    title = f"{options.hosts} islands, {parameters:,} parameters, {rate / 1e6:g} Mbit/s"
    columns = ("sync_every", "MB a step", "seconds an exchange", "step against none")
    print_table(title, columns, map(_figures, found))
    print(recommendation(found))
    return 0


def _figures(plan: Plan) -> tuple[str, ...]:
    sent, seconds, ratio = f"{plan.bytes_a_step / 1e6:.3g}", f"{plan.exchange_seconds:.3g}", f"{plan.step_ratio:.2f}"
    return str(plan.sync_every), sent, seconds, ratio
