"""``ds-compress plan schedule`` and ``plan islands``.

The first shows which settings of a configuration apply at which step. The second estimates the cost of an exchange
between islands, and how often to exchange.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.config import (
    CompressConfig,
    GradientsConfig,
    Islands,
    MethodConfig,
    WeightsConfig,
    expand,
    parse_section,
    read_ds_config,
)
from deepspeed_compress.config.numbers import bit_rate
from deepspeed_compress.config.schedules import brief, total_steps
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.policy.schedule import SettingsSchedule, timeline
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
        raise ConfigError(
            "--steps: is missing; the configuration has phases, but does not say how long training is; write --steps N"
        )
    found = timeline(SettingsSchedule(section, total))
    ends: Sequence[int | None] = [*(first - 1 for first, *_ in found[1:]), total - 1 if total else None]
    halves = (ds_config.get(key) for key in ("bf16", "bfloat16", "fp16"))
    raw = 16 if any(half.get("enabled") for half in halves if isinstance(half, dict)) else 32
    made = [
        Interval(first, last, _named(section, settings, weights), _bits(settings, raw))
        for (first, settings, weights), last in zip(found, ends, strict=True)
        if total is None or first < total
    ]
    return made if total is None else [*made[:-1], replace(made[-1], last=total - 1)]


def _named(section: CompressConfig, settings: GradientsConfig, weights: WeightsConfig) -> str:
    """Return a short text of the settings. Weights are included if phases change them."""
    phases = any(phase.weights for phase in section.schedule.phases)
    return f"{brief(settings)}, weights {brief(weights)}" if phases else brief(settings)


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


_OWN = "/deepspeed_compress/islands/own"
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
    """Return a plan for each of the usual intervals and for the configured one.

    Args:
        settings: Settings of islands.
        islands: Number of islands.
        parameters: Number of parameters that are exchanged.
        bandwidth: Bits per second, in each direction, of the link of an island.
        step_seconds: Seconds of a step without exchanges.

    Raises:
        ConfigError: The size of a message is not known in advance.
    """
    vector = parameters * (_bits_of_exchange(settings) + _bits_of_moments(settings)) / 8
    intervals = sorted({*CANDIDATES, written_steps(settings, step_seconds)})
    if settings.elastic is not None and settings.elastic.parameter_server is not None:
        return _pushes(vector, islands, bandwidth, step_seconds, intervals)
    # As in an all-reduce, an island sends the parts that others own, and the mean of its own part to all others.
    size = 2 * (islands - 1) / islands * vector
    seconds = 8 * size / bandwidth
    return [Plan(every, size / every, seconds, _ratio(settings, every, seconds, step_seconds)) for every in intervals]


def written_steps(settings: Islands, step: float) -> int:
    """Return `sync_every` in steps. A time is converted to the nearest number of steps of `step` seconds."""
    time = settings.sync_seconds
    return settings.sync_steps or (1 if time is None else max(1, round(time / step)))


def _pushes(vector: float, islands: int, bandwidth: float, step: float, intervals: Sequence[int]) -> list[Plan]:
    """Return the plans for pushes to a parameter server.

    A push is sent and an answer returns, without blocking training. The link of the server carries the messages of all
    islands. If it is saturated, steps do not take longer, but pushes become rarer; `step_ratio` is then that factor.
    """
    seconds, busy = 2 * 8 * vector / bandwidth, islands * 8 * vector / bandwidth
    return [Plan(every, vector / every, seconds, max(1.0, max(seconds, busy) / (every * step))) for every in intervals]


def _bits_of_exchange(settings: Islands) -> float:
    exchange = settings.exchange
    if exchange.method == "none":
        return 32.0
    if not isinstance(exchange, MethodConfig):
        raise ConfigError(
            f'/deepspeed_compress/islands/exchange/method: the bytes of "{exchange.method}" depend on shapes, so they '
            'cannot be planned (allowed: other methods); write {"method": "blockwise", "bits": 4}'
        )
    return exchange.bits_per_element()


def _bits_of_moments(settings: Islands) -> float:
    """Return the bits per parameter of second moments."""
    return 0.0 if settings.second_moments is None else 32.0 / settings.second_moments.block_size


def _ratio(settings: Islands, every: int, seconds: float, step: float) -> float:
    """Return the step time relative to that without exchanges.

    Each fragment blocks for the time that its `delay` steps do not hide.
    """
    hidden = min(settings.delay, every - 1) * step
    waited = settings.fragments * max(0.0, seconds / settings.fragments - hidden)
    # The capacity of the link is a lower bound, however much of an exchange is hidden.
    return max(1.0 + waited / (every * step), seconds / (every * step))


def fitting(found: Sequence[Plan]) -> Plan | None:
    """Return the most frequent exchange that costs little, or None if none does."""
    return next((plan for plan in found if plan.step_ratio <= 1 + MAX_COST), None)


def run_islands(options: argparse.Namespace) -> int:
    """Print the table and the recommended interval. Return the exit code."""
    ds_config = read_ds_config(options.config)
    section = parse_section(ds_config)
    # Refuse sections that the rest of the file contradicts.
    expand(ds_config, section)
    settings = section.islands
    if settings is None:
        raise ConfigError(
            f'{options.config}: /deepspeed_compress/islands is missing; write "islands": {{"by_host": true}}'
        )
    parameters = _parameters(options.model, settings.own)
    most = section.communication.max_rate
    rate = options.bandwidth if most is None else min(options.bandwidth, bit_rate(most))
    # Fragments and delays do not fit into shorter intervals, which are refused.
    least = max(settings.fragments, settings.delay + 1)
    found = plans(settings, options.hosts, parameters, rate, options.step)
    found = [plan for plan in found if plan.sync_every >= least]
    columns = ("sync_every", "MB a step", "seconds an exchange", "step against none")
    print_table(_title(options, parameters, rate), columns, _rows(found, settings, options.step))
    print(_recommendation(fitting(found)))
    return 0


def _rows(found: Sequence[Plan], settings: Islands, step: float) -> Iterator[tuple[str, ...]]:
    written = written_steps(settings, step)
    for plan in found:
        mark = f" <- {_written(settings)}" if plan.sync_every == written else ""
        figures = (f"{plan.bytes_a_step / 1e6:.3g}", f"{plan.exchange_seconds:.3g}", f"{plan.step_ratio:.2f}{mark}")
        yield str(plan.sync_every), *figures


def _recommendation(best: Plan | None) -> str:
    if best is None:
        return "every interval costs more than 5 % of the time; send fewer bits, or set a delay"
    return f"sync_every {best.sync_every} costs {100 * (best.step_ratio - 1):.1f} % of the time"


def _written(settings: Islands) -> str:
    return "written" if settings.sync_seconds is None else f'"{settings.sync_every}"'


def _title(options: argparse.Namespace, parameters: int, rate: float) -> str:
    cap = "" if rate == options.bandwidth else " (communication.max_rate)"
    return f"{options.hosts} islands, {parameters:,} parameters, {rate / 1e6:g} Mbit/s{cap}"


def _parameters(model: str, own: Sequence[str]) -> int:
    """Return the number of parameters that are exchanged: a number such as 124M, or all of the model in a config.json.

    Raises:
        ConfigError: `own` excludes some of the model's parameters, or the result is not positive.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)([kmb]?)", model.strip().lower())
    if match and not Path(model).exists():
        parameters = round(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2]])
    elif own:
        raise ConfigError(
            f"--model {model}: {_OWN} {list(own)} excludes some of its parameters; write the number of all others"
        )
    else:
        parameters = read_model(Path(model)).parameters
    if parameters < 1:
        raise ConfigError(
            f"--model {model}: has no parameters to exchange (allowed: a number from 1 up, or a model's config.json); "
            "write --model 124M, for example"
        )
    return parameters
