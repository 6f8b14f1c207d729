"""`ds-compress run`: an unmodified training script, started with compression installed."""

import argparse
import os
import sys
import warnings
from collections.abc import Mapping
from typing import NoReturn

from deepspeed_compress.engine.builds import warn_of_abandoned_locks
from deepspeed_compress.integrations.files import find_uncompressed
from deepspeed_compress.integrations.launch import launch_command

__all__ = ["add_arguments", "own_options", "print_locks", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
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


def run(options: argparse.Namespace) -> NoReturn:
    """Become the launcher. Raises ConfigError for a command that it does not take."""
    command = launch_command(options.launcher, options.arguments[1:])
    for text in find_uncompressed(options.arguments[1:]):
        print(f"ds-compress: warning: {text}", file=sys.stderr, flush=True)
    print_locks()
    # The launcher takes the place of this process, so that signals and exit codes need no hands to go through.
    os.execv(command[0], command)


def own_options() -> Mapping[str, int]:
    """How many values each option of `run` itself takes."""
    return {"--launcher": 1}


def print_locks() -> None:
    """Warn on standard error of builds of DeepSpeed that were abandoned, on whose locks new ones would wait."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_abandoned_locks()
    for warning in caught:
        print(f"ds-compress: warning: {warning.message}", file=sys.stderr, flush=True)
