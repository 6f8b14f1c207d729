"""Options of the commands that have no module of options of their own. Light: `--help` needs no more than this."""

import argparse
from collections.abc import Mapping
from pathlib import Path

from deepspeed_compress.tools.arguments import positive_integer

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
    parser.add_argument("what", choices=("schedule",), help="schedule: what is in force in which step")
    parser.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    parser.add_argument("--steps", type=positive_integer, metavar="N", help="optimizer steps of the whole training")
    parser.add_argument("--output", type=Path, metavar="PNG", help="draw it as well")


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
