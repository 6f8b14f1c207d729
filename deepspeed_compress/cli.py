"""The command `ds-compress`. Each subcommand is a row of a table whose modules are imported when it is called."""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from deepspeed_compress import INSTALL_TO_TRAIN, NEEDED_TO_TRAIN, __version__
from deepspeed_compress.errors import CompressError
from deepspeed_compress.tools.arguments import epilog


@dataclass(frozen=True, slots=True)
class Command:
    """Subcommand of `ds-compress`. Functions are given as "module:name" below this package.

    Attributes:
        name: Name of the subcommand.
        summary: One line that says what it does.
        arguments: Function that adds its options to a parser.
        run: Function that takes the parsed options and returns the exit code. Subcommands of the second level each
            have their own.
        examples: Examples of its use; none for a command with subcommands, which show their own.
        passes_on: Whether the command passes on everything after its own options.
        failed: Exit code if the command cannot read its input or write its output.
    """

    name: str
    summary: str
    arguments: str
    run: str = ""
    examples: tuple[str, ...] = ()
    passes_on: bool = False
    failed: int = 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ds-compress` and return its exit code.

    It is 0 for success, 1 for errors, 2 for wrong usage, 130 for Ctrl-C, and 141 if the reader of the output has gone.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # File names and their contents may hold characters that the encoding of the terminal lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    command = next((command for command in COMMANDS if [command.name] == given[:1]), None)
    options, unknown = _parser(command).parse_known_args(_separated(given, command))
    if unknown:
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = _load(options.run)(options)
        print(end="", flush=True)
    except BrokenPipeError:
        # The reader of the output, such as `head`, has gone. Shells use this exit code for SIGPIPE.
        _end_output()
        return 141
    except (CompressError, OSError) as error:
        _end_output()
        return report_failure(error, options.failed)
    except ModuleNotFoundError as error:
        if error.name not in NEEDED_TO_TRAIN:
            raise
        print(f"ds-compress: error: this needs {error.name}; write: {INSTALL_TO_TRAIN}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ds-compress: stopped", file=sys.stderr)
        # Exit code that shells use for SIGINT.
        return 130
    return code


def _end_output() -> None:
    """Write the rest of the output, or drop it if that is impossible: Python would try again when it ends."""
    try:
        print(end="", flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def report_failure(error: CompressError | OSError, failed: int) -> int:
    """Print `error`, and return the exit code `failed`."""
    from deepspeed_compress.tools.outputs.report import visible

    text = str(error)
    if isinstance(error, OSError) and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    print("ds-compress: error:", "\n".join(map(visible, text.split("\n"))), file=sys.stderr)
    return failed


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"deepspeed_compress.{module}"), name)


def _separated(given: list[str], command: Command | None) -> list[str]:
    """Return the arguments with "--" before those that `command` passes on, so that argparse does not read them."""
    if command is None or not command.passes_on:
        return given
    parser = argparse.ArgumentParser()
    _load(command.arguments)(parser)
    widths = {name: int(action.nargs != 0) for action in parser._actions for name in action.option_strings}
    place = 1
    while place < len(given) and (width := widths.get(given[place].partition("=")[0])) is not None:
        place += 1 if "=" in given[place] else 1 + width
    return [*given[:place], "--", *given[place:]]


def _parser(called: Command | None) -> argparse.ArgumentParser:
    """Return the parser with the options of the `called` command. Others are only named, which keeps startup fast."""
    parser = argparse.ArgumentParser(
        prog="ds-compress",
        description="Compressed gradients for DeepSpeed: lint, check and tune configurations, start runs, report.",
        **epilog(EXAMPLES, "\n\nExamples of a command: ds-compress COMMAND --help"),
    )
    parser.add_argument("--version", action="version", version=f"ds-compress {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=command.summary, **epilog(command.examples)
        )
        if command is called:
            _load(command.arguments)(subparser)
        # The top-level parser would show the usage of `ds-compress` instead of the command's.
        subparser.set_defaults(run=command.run, refuse=subparser.error, failed=command.failed)
    return parser


EXAMPLES = (
    "lint ds_config.json --world-size 8",
    "run --num_gpus 2 train.py --deepspeed ds_config.json",
    "report runs/int4 --baseline runs/none",
    "doctor runs/int4 --baseline runs/none",
    "tune --config ds_config.json --num_gpus 2 train.py --deepspeed ds_config.json",
)
"""Examples of `ds-compress --help`, in the order in which a newcomer needs them."""

COMMANDS = (
    Command(
        "bench",
        "Measure training steps, messages and kernels, here or on emulated slow networks.",
        "tools.bench.options:add_arguments",
    ),
    Command(
        "check",
        "List every error of the deepspeed_compress section, or show it with its defaults.",
        "tools.options:add_check_arguments",
        "tools.schema:check",
        ("check ds_config.json", "check ds_config.json --world-size 8"),
    ),
    Command(
        "checkpoint",
        "List checkpoints, compare their files with their digests, convert one for other sizes, or remove old ones.",
        "tools.options:add_checkpoint_arguments",
    ),
    Command(
        "doctor",
        "Find what holds a run back, from its statistics, and what to change.",
        "tools.options:add_doctor_arguments",
        "tools.doctor.command:run",
        ("doctor runs/int4", "doctor runs/int4 --baseline runs/dense --json"),
        failed=2,
    ),
    Command(
        "islands",
        "Coordinate islands that come and go, show which are connected, or go on without dead ones.",
        "tools.options:add_islands_arguments",
    ),
    Command(
        "lint",
        "Find what is wrong with DeepSpeed configurations, with or without compression.",
        "tools.lint.options:add_lint_arguments",
        "tools.lint.command:run",
        ("lint ds_config.json", "lint configs --framework hf --world-size 8", "lint --fix ds_config.json"),
        failed=2,
    ),
    Command(
        "plan",
        "Predict the fastest layout on a cluster, what a schedule does in which step, or what islands' exchanges take.",
        "tools.options:add_plan_arguments",
    ),
    Command(
        "report",
        "Make a page of a run: loss, time, bytes sent, settings, events.",
        "tools.options:add_report_arguments",
        "tools.report:run",
        ("report runs/int4", "report runs/int4 --baseline runs/dense --output reports"),
    ),
    Command(
        "rollout",
        "Serve the weights of a policy to ranks and rollout workers, or export them for SGLang or PEFT.",
        "tools.options:add_rollout_arguments",
    ),
    Command(
        "rule",
        "Explain rules of the linter.",
        "tools.lint.options:add_rule_arguments",
        "tools.lint.command:explain",
        ("rule DSC201", "rule --all"),
        failed=2,
    ),
    Command(
        "run",
        "Start an unmodified training script with compression installed.",
        "tools.options:add_run_arguments",
        "tools.run:run",
        (
            "run --num_gpus 2 train.py --deepspeed ds_config.json",
            "run --launcher torchrun --nproc_per_node 2 train.py --deepspeed ds_config.json",
            "run llamafactory-cli train train.yaml",
            "run --restarts 10 --ranks 8 train.py --deepspeed ds_config.json",
        ),
        passes_on=True,
    ),
    Command(
        "schema",
        "Print the JSON Schema of the deepspeed_compress section or of a whole file for editors, or a table of keys.",
        "tools.options:add_schema_arguments",
        "tools.schema:run",
        ("schema --file --output ds_config.schema.json", "schema --markdown"),
    ),
    Command(
        "tune",
        "Find the fastest settings that keep the loss, by short real trials of your own script.",
        "tools.options:add_tune_arguments",
        "tools.tune.command:run",
        (
            "tune --config ds_config.json --num_gpus 2 train.py --deepspeed ds_config.json",
            "tune --config ds_config.json --target-loss-gap 0.5% --time-budget 2h --num_gpus 8 train.py",
        ),
        passes_on=True,
    ),
)

if __name__ == "__main__":
    raise SystemExit(main())
