"""Command-line options of `ds-compress tune`."""

import argparse
import re
from pathlib import Path

from deepspeed_compress.tools.arguments import integer_from
from deepspeed_compress.tools.options import CLEAR_LOCKS, LAUNCHERS

METRICS = ("step_time", "bytes")
LEAST_STEPS = 10
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`, and the arguments that it passes on, to `parser`."""
    what = "DeepSpeed configuration that the script reads; it is not changed"
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help=what)
    what = "largest allowed loss above that of uncompressed training, as a fraction of it (default: 0.5%%)"
    parser.add_argument("--target-loss-gap", type=share, default=share("0.5%"), metavar="SHARE", help=what)
    what = "time limit such as 90s, 30m or 2h, after which the best candidate so far is chosen (default: no limit)"
    parser.add_argument("--time-budget", type=duration, metavar="TIME", help=what)
    what = "directory for all results; trials that have finished there are not repeated (default: tuning_results)"
    parser.add_argument("--output", type=Path, default=Path("tuning_results"), metavar="DIR", help=what)
    what = "figure to minimize: the step time on this network, or the bytes sent, for another network"
    parser.add_argument("--metric", choices=METRICS, default="step_time", help=what)
    what = "your own candidates: a list of objects with keys of the section and a name"
    parser.add_argument("--space", type=Path, metavar="FILE.json", help=what)
    what = "optimizer steps of a trial in the first rung; each further rung has three times as many (default: 30)"
    parser.add_argument("--steps", type=integer_from(LEAST_STEPS), default=30, metavar="N", help=what)
    parser.add_argument("--rungs", type=integer_from(1), default=3, metavar="N", help="number of rungs (default: 3)")
    what = (
        "time limit of a trial, such as 10m or 1h (default: none for uncompressed training, and about three times its "
        "duration for all others)"
    )
    parser.add_argument("--trial-timeout", type=duration, metavar="TIME", help=what)
    parser.add_argument("--clear-locks", action="store_true", help=CLEAR_LOCKS)
    what = "launcher that starts the processes (default: deepspeed); with none, the script runs in one process"
    parser.add_argument("--launcher", choices=LAUNCHERS, default="deepspeed", help=what)
    what = "options of the launcher, then SCRIPT and its arguments, one of which is the file of --config"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=what)


def share(text: str) -> float:
    """Parse a fraction such as "0.5%" or "0.005".

    Raises:
        argparse.ArgumentTypeError: `text` is not a fraction between 0 and 1.
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", text.strip())
    value = float(found[1]) / (100 if found[2] else 1) if found else 0.0
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a fraction from 0 to 1 (allowed: for example 0.5% or 0.005)")
    return value


def duration(text: str) -> float:
    """Parse a duration such as "2h", "1h30m" or "90s" and return it in seconds.

    Raises:
        argparse.ArgumentTypeError: `text` is not a duration of at least one second.
    """
    parts = re.findall(r"(\d+)([smhd])", text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration (allowed: for example 90s, 30m, 2h or 1h30m)")
    seconds = sum(int(number) * _SECONDS[unit] for number, unit in parts)
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r} leaves no time for a trial (allowed: 1s or more)")
    return float(seconds)
