"""Settings of compression over the steps: a colour each, and in which steps they were in force."""

from collections.abc import Sequence
from itertools import cycle

from deepspeed_compress.tools.report.panels import Strip

__all__ = ["setting_colours", "steps_by_setting"]

UNCOMPRESSED = "none"
_COLOURS = ("run", "purple", "green", "yellow", "orange", "run-soft", "red")
_RANGES = 6
"""Named of one setting; more are counted."""


def setting_colours(strips: Sequence[Strip]) -> dict[str, str]:
    """The same setting has the same colour in every run; without compression it is that of baselines."""
    settings = dict.fromkeys(stretch.setting for strip in reversed(strips) for stretch in strip.stretches)
    chosen = zip((setting for setting in settings if setting != UNCOMPRESSED), cycle(_COLOURS), strict=False)
    return ({UNCOMPRESSED: "baseline"} if UNCOMPRESSED in settings else {}) | dict(chosen)


def steps_by_setting(strip: Strip) -> dict[str, str]:
    """Every setting, with the measured steps that had it."""
    found: dict[str, list[str]] = {}
    for stretch in strip.stretches:
        steps = f"{stretch.first:,}" if stretch.first == stretch.last else f"{stretch.first:,} to {stretch.last:,}"
        found.setdefault(stretch.setting, []).append(steps)
    return {setting: f"steps {_listed(steps)}" for setting, steps in found.items()}


def _listed(steps: Sequence[str]) -> str:
    left = len(steps) - _RANGES
    return ", ".join(steps[:_RANGES]) + (f", and {left} more times" if left > 0 else "")
