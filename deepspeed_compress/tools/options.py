"""Options of the commands that have no module of options of their own. Light: `--help` needs no more than this."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from deepspeed_compress.tools.arguments import positive_integer, positive_number, rate

__all__ = [
    "add_check_arguments",
    "add_plan_arguments",
    "add_report_arguments",
    "add_run_arguments",
    "add_schema_arguments",
    "own_run_options",
]


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks in all, to check the parallelism against")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(required=True, metavar="WHAT")
    schedule = subjects.add_parser("schedule", help="what is in force in which step")
    schedule.set_defaults(subject="schedule")
    schedule.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    schedule.add_argument("--steps", type=positive_integer, metavar="N", help="optimizer steps of the whole training")
    schedule.add_argument("--output", type=Path, metavar="PNG", help="draw it as well")
    islands = subjects.add_parser("islands", help="what exchanges between islands take, and how often they may be")
    islands.set_defaults(subject="islands")
    islands.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration with islands")
    what = "number of parameters such as 124M, or config.json of a model"
    islands.add_argument("--model", required=True, metavar="N|FILE", help=what)
    what = "of the link of an island, such as 100mbit"
    islands.add_argument("--bandwidth", type=rate, required=True, metavar="RATE", help=what)
    islands.add_argument("--hosts", type=positive_integer, required=True, metavar="N", help="islands")
    what = "seconds of an optimizer step without exchanges (default: 1)"
    islands.add_argument("--step", type=positive_number, default=1.0, metavar="SECONDS", help=what)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    what = "output directory of launch/train_gpt.py or Trainer, finished or not, or the monitor.path of a program"
    baseline = "the run to compare with, such as an uncompressed one"
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=what)
    parser.add_argument("--baseline", type=Path, metavar="RUN_DIR", help=baseline)
    output = "where to write report.html and .png (default: RUN_DIR)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--launcher",
        choices=("deepspeed", "torchrun", "accelerate", "none"),
        default="deepspeed",
        help="what starts the processes (default: deepspeed); none runs the script in this one. Comes first",
    )
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of the launcher, SCRIPT, arguments of SCRIPT",
    )


def own_run_options() -> Mapping[str, int]:
    """How many values each option of `run` itself takes."""
    return {"--launcher": 1}


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to FILE instead of standard output")
