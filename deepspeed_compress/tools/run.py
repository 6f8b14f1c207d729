"""`ds-compress run`: start an unmodified training script with compression installed."""

import argparse
import os
import sys
from typing import NoReturn

from deepspeed_compress.backends.deepspeed.builds import print_locks
from deepspeed_compress.config import parse_section, read_ds_config
from deepspeed_compress.integrations.files import check_configurations, find_uncompressed
from deepspeed_compress.integrations.inheriting import INHERIT
from deepspeed_compress.integrations.launch import launch_command
from deepspeed_compress.tools import supervise
from deepspeed_compress.transport.secret import pass_on
from deepspeed_compress.transport.tls import set_tls


def run(options: argparse.Namespace) -> int:
    """Replace this process by the launcher, or run the agent of this host and return the job's exit code.

    Raises:
        ConfigError: An option, the section or the script is invalid.
    """
    # This command may itself run under another `ds-compress run`, whose section must not apply to the launcher.
    os.environ.pop(INHERIT, None)
    own = [] if options.section is None else [f"--section={options.section.resolve()}"]
    if options.section is not None:
        # Report an invalid section only once, not in every process.
        parse_section(read_ds_config(options.section))
    agent = supervise.uses_agent(options)
    set_tls(os.environ, options.tls_certificate, options.tls_authority)
    pass_on(os.environ)
    command = launch_command("none" if agent else options.launcher, options.arguments[1:], own=own)
    check_configurations(options.arguments[1:], options.allow_uncompressed)
    for text in find_uncompressed(options.arguments[1:]):
        print(f"ds-compress: warning: {text}", file=sys.stderr, flush=True)
    print_locks(options.clear_locks)
    return supervise.run(options, command) if agent else _exec(command)


def _exec(command: list[str]) -> NoReturn:
    """Replace this process by the launcher, so that signals and exit codes need not be forwarded."""
    os.execv(command[0], command)
