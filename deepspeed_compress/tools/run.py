"""`ds-compress run`: an unmodified training script, started with compression installed."""

import argparse
import os
import sys
import warnings
from typing import NoReturn

from deepspeed_compress.engine.builds import warn_of_abandoned_locks
from deepspeed_compress.integrations.files import find_uncompressed
from deepspeed_compress.integrations.launch import launch_command

__all__ = ["print_locks", "run"]


def run(options: argparse.Namespace) -> NoReturn:
    """Become the launcher. Raises ConfigError for a command that it does not take."""
    command = launch_command(options.launcher, options.arguments[1:])
    for text in find_uncompressed(options.arguments[1:]):
        print(f"ds-compress: warning: {text}", file=sys.stderr, flush=True)
    print_locks()
    # The launcher takes the place of this process, so that signals and exit codes need no hands to go through.
    os.execv(command[0], command)


def print_locks() -> None:
    """Warn on standard error of builds of DeepSpeed that were abandoned, on whose locks new ones would wait."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_abandoned_locks()
    for warning in caught:
        print(f"ds-compress: warning: {warning.message}", file=sys.stderr, flush=True)
