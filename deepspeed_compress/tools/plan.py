"""``ds-compress plan schedule``: show which settings of a configuration apply at which step."""

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.config import CompressConfig, GradientsConfig, WeightsConfig, parse_section, read_ds_config
from deepspeed_compress.config.methods import MethodConfig
from deepspeed_compress.config.schedules import brief, total_steps
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.policy.schedule import SettingsSchedule, timeline
from deepspeed_compress.tools.plots import check_plotting, new_figure, save_figure, style_axes
from deepspeed_compress.tools.tables import print_table

LONG = 0.15
"""Fraction of the picture's width that an interval needs for its label."""


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


def run(options: argparse.Namespace) -> int:
    """Print the table, and draw it if `--output` is given. Return the exit code."""
    found = intervals(read_ds_config(options.config), options.steps)
    print_table(f"schedule of {options.config}", ("steps", "settings", "bits"), map(_cells, found), ("settings",))
    if options.output is not None:
        draw(found, options.output)
        print(options.output)
    return 0


def _cells(interval: Interval) -> tuple[str, str, str]:
    last = "" if interval.last is None else f"{interval.last:,}"
    return f"{interval.first:,} - {last}", interval.settings, "?" if interval.bits is None else f"{interval.bits:.3g}"


def draw(found: Sequence[Interval], file: Path) -> None:
    """Plot bits per element over optimizer steps as a PNG.

    A last interval without an end is drawn for an additional tenth of the steps before it.
    """
    check_plotting("--output", file)
    end = found[-1].last
    last = end + 1 if end is not None else max(10, round(1.1 * found[-1].first))
    known = [(interval, interval.bits) for interval in found if interval.bits is not None]
    figure = new_figure(9, 3.6)
    axes = figure.add_subplot()
    for interval, bits in known:
        stop = last if interval.last is None else interval.last + 1
        axes.plot([interval.first, stop], [bits, bits], color="#1f6feb", linewidth=2.5, solid_capstyle="butt")
    for (_, before), (interval, bits) in itertools.pairwise(known):
        axes.plot([interval.first] * 2, [before, bits], color="#1f6feb", linewidth=1)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_xlim(0, last)
    axes.set_xlabel("optimizer step")
    style_axes(axes, "Bits of a gradient element")
    for interval, bits in known:
        stop = last if interval.last is None else interval.last + 1
        if (stop - interval.first) / last <= LONG:
            continue
        place, align = ((interval.first + stop) / 2, "center") if stop < last else (last, "right")
        axes.annotate(interval.settings, (place, bits), (0, 5), textcoords="offset points", ha=align, fontsize=8)
    axes.margins(y=0.15)
    save_figure(figure, file)
