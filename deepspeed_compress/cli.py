"""The command `ds-compress`. Each subcommand is a row of a table and imports what it needs when it runs."""

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress import INSTALL_TO_TRAIN, NEEDED_TO_TRAIN, __version__
from deepspeed_compress.errors import CompressError


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand: what it does, how it is called, and the function that runs it and gives the exit code."""

    name: str
    summary: str
    examples: tuple[str, ...]
    arguments: Callable[[argparse.ArgumentParser], object]
    run: Callable[[argparse.Namespace], int]
    own: Callable[[], Mapping[str, int]] | None = None
    """Of a command that passes on what follows its own options: these, and how many values each takes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `ds-compress` and return its exit code: 0 fine, 1 an error was found, 2 wrong usage."""
    options, unknown = _parser().parse_known_args(_separated(sys.argv[1:] if arguments is None else arguments))
    if unknown:
        options.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        code: int = options.run(options)
    except (CompressError, OSError) as error:
        print(f"ds-compress: error: {error}", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name not in NEEDED_TO_TRAIN:
            raise
        print(f"ds-compress: error: this needs {error.name}; write: {INSTALL_TO_TRAIN}", file=sys.stderr)
        return 1
    return code


def _separated(arguments: Sequence[str]) -> list[str]:
    """With "--" before what a command passes on, so that argparse leaves these options alone."""
    given = list(arguments)
    own = next((command.own for command in COMMANDS if [command.name] == given[:1]), None)
    if own is None:
        return given
    widths, place = {"-h": 0, "--help": 0, **own()}, 1
    while place < len(given) and (width := widths.get(given[place].partition("=")[0])) is not None:
        place += 1 if "=" in given[place] else 1 + width
    return [*given[:place], "--", *given[place:]]


def _parser() -> argparse.ArgumentParser:
    examples = [example for command in COMMANDS for example in command.examples]
    parser = argparse.ArgumentParser(
        prog="ds-compress",
        description="Compressed gradients for DeepSpeed: lint, check and tune configurations, start runs, report.",
        **_epilog(examples),
    )
    parser.add_argument("--version", action="version", version=f"ds-compress {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        subparser = subparsers.add_parser(
            command.name, help=command.summary, description=command.summary, **_epilog(command.examples)
        )
        command.arguments(subparser)
        # The parser itself would show the usage of `ds-compress`, not of the command.
        subparser.set_defaults(run=command.run, refuse=subparser.error)
    return parser


def _epilog(examples: Sequence[str]) -> dict[str, Any]:
    lines = "".join(f"\n  ds-compress {example}" for example in examples)
    return {"epilog": f"examples:{lines}", "formatter_class": argparse.RawDescriptionHelpFormatter}


def _schema_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to FILE instead of standard output")


def _schema(options: argparse.Namespace) -> int:
    from deepspeed_compress.config import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks in all, to check the parallelism against")


def _check(options: argparse.Namespace) -> int:
    from deepspeed_compress.config import find_problems, read_ds_config

    ds_config = read_ds_config(options.config)
    problems = find_problems(ds_config, options.world_size)
    for problem in problems:
        print(f"error: {problem}")
    if problems:
        print(f"{options.config}: {len(problems)} error{'s' if len(problems) > 1 else ''}")
        return 1
    _print_resolved(ds_config, options.world_size)
    return 0


def _print_resolved(ds_config: dict[str, Any], world_size: int | None) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from deepspeed_compress.config import SECTION, check_world, expand, parse_section

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        section = parse_section(ds_config)
        ranks = check_world(section, world_size, ds_config) if world_size is not None else None
    table = Table("key", "value", "", title=f"{SECTION}, as it is understood")
    written = dict(_leaves(ds_config[SECTION]))
    for key, value in _leaves(section.model_dump(mode="json")):
        table.add_row(key, escape(json.dumps(value)), "" if key in written else "default")
    console = Console()
    console.print(table)
    expanded = expand(ds_config, section)
    for key in sorted(key for key in expanded if expanded[key] != ds_config.get(key)):
        console.print(f"DeepSpeed gets {key}: {json.dumps(expanded[key])}", markup=False)
    if ranks is not None:
        console.print(f"data-parallel size: {ranks} of {world_size} ranks")
    for warning in caught:
        console.print(f"warning: {warning.message}", markup=False, soft_wrap=True)


def _leaves(value: object, key: str = "") -> list[tuple[str, object]]:
    """Pointers and values of everything that is not a (non-empty) object."""
    if not isinstance(value, Mapping) or not value:
        return [(key, value)]
    return [leaf for name, child in value.items() for leaf in _leaves(child, f"{key}/{name}")]


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run_dir",
        type=Path,
        metavar="RUN_DIR",
        help="output directory of launch/train_gpt.py or Trainer, finished or not, or the monitor.path of a program",
    )
    parser.add_argument(
        "--baseline", type=Path, metavar="RUN_DIR", help="the run to compare with, such as an uncompressed one"
    )
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="where to write report.html and .png (default: RUN_DIR)"
    )


def _report(options: argparse.Namespace) -> int:
    from deepspeed_compress.tools.report import load_runs, print_table, write_report

    runs = load_runs(options.run_dir, options.baseline)
    written = write_report(runs, options.output or options.run_dir)
    print_table(runs)
    print(*written, sep="\n")
    return 0


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("schedule",), help="schedule: what is in force in which step")
    parser.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    parser.add_argument("--steps", type=_positive, metavar="N", help="optimizer steps of the whole training")
    parser.add_argument("--output", type=Path, metavar="PNG", help="draw it as well")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number of steps (allowed: from 1)")
    return value


def _plan(options: argparse.Namespace) -> int:
    from deepspeed_compress.tools.plan import run

    return run(options)


def _lint_arguments(parser: argparse.ArgumentParser) -> None:
    from deepspeed_compress.tools.lint.options import add_lint_arguments

    add_lint_arguments(parser)


def _lint(options: argparse.Namespace) -> int:
    from deepspeed_compress.tools.lint.command import run

    return run(options)


def _rule_arguments(parser: argparse.ArgumentParser) -> None:
    from deepspeed_compress.tools.lint.options import add_rule_arguments

    add_rule_arguments(parser)


def _rule(options: argparse.Namespace) -> int:
    from deepspeed_compress.tools.lint.explain import run

    return run(options)


def _run_arguments(parser: argparse.ArgumentParser) -> None:
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


def _run(options: argparse.Namespace) -> int:
    from deepspeed_compress.integrations.files import find_uncompressed
    from deepspeed_compress.integrations.launch import launch_command

    command = launch_command(options.launcher, options.arguments[1:])
    for text in find_uncompressed(options.arguments[1:]):
        print(f"ds-compress: warning: {text}", file=sys.stderr, flush=True)
    _say_what_is_locked()
    # The launcher takes the place of this process, so that signals and exit codes need no hands to go through.
    os.execv(command[0], command)


def _say_what_is_locked() -> None:
    from deepspeed_compress.engine.builds import warn_of_abandoned_locks

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warn_of_abandoned_locks()
    for warning in caught:
        print(f"ds-compress: warning: {warning.message}", file=sys.stderr, flush=True)


def _tune_arguments(parser: argparse.ArgumentParser) -> None:
    from deepspeed_compress.tools.tune.options import add_tune_arguments

    add_tune_arguments(parser)


def _tune(options: argparse.Namespace) -> int:
    from deepspeed_compress.tools.tune.command import run

    options.arguments = options.arguments[1:]
    _say_what_is_locked()
    return run(options)


def _tune_options() -> Mapping[str, int]:
    from deepspeed_compress.tools.tune.options import own_options

    return own_options()


def _bench_arguments(parser: argparse.ArgumentParser) -> None:
    from deepspeed_compress.tools.bench.options import add_bench_arguments

    add_bench_arguments(parser)


def _bench(options: argparse.Namespace) -> int:
    from deepspeed_compress.tools.bench.command import run

    return run(options)


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    from deepspeed_compress.tools.doctor.options import add_doctor_arguments

    add_doctor_arguments(parser)


def _doctor(options: argparse.Namespace) -> int:
    from deepspeed_compress.tools.doctor.command import run

    return run(options)


COMMANDS = (
    Command(
        "bench",
        "Measure training steps, messages and kernels, here or on emulated slow networks.",
        (
            "bench step --config ds_config.json --emulate 2,1gbit,100mbit --output step.json",
            "bench comm --emulate 2,1gbit",
            "bench kernels --numel 10M",
        ),
        _bench_arguments,
        _bench,
    ),
    Command(
        "check",
        "List every error of the deepspeed_compress section, or show it with its defaults.",
        ("check ds_config.json", "check ds_config.json --world-size 8"),
        _check_arguments,
        _check,
    ),
    Command(
        "doctor",
        "Find what holds a run back, from its statistics, and what to change.",
        (
            "doctor runs/int4",
            "doctor runs/int4 --baseline runs/dense --json",
            "doctor runs/int4 --apply ds_config_better.json",
        ),
        _doctor_arguments,
        _doctor,
    ),
    Command(
        "lint",
        "Find what is wrong with DeepSpeed configurations, with or without compression.",
        ("lint ds_config.json", "lint configs --framework hf --world-size 8", "lint --fix --diff ds_config.json"),
        _lint_arguments,
        _lint,
    ),
    Command(
        "plan",
        "Show what a schedule does in which step, as a table and a picture.",
        ("plan schedule ds_config.json", "plan schedule ds_config.json --steps 10000 --output schedule.png"),
        _plan_arguments,
        _plan,
    ),
    Command(
        "report",
        "Make a page and a picture of a run: loss, time, bytes sent, settings, events.",
        ("report runs/int4", "report runs/int4 --baseline runs/dense --output reports"),
        _report_arguments,
        _report,
    ),
    Command(
        "rule",
        "Explain rules of the linter.",
        ("rule DSC201", "rule --all"),
        _rule_arguments,
        _rule,
    ),
    Command(
        "run",
        "Start an unmodified training script with compression installed.",
        (
            "run --num_gpus 2 train.py --deepspeed ds_config.json",
            "run --launcher torchrun --nproc_per_node 2 train.py --deepspeed ds_config.json",
        ),
        _run_arguments,
        _run,
        lambda: {"--launcher": 1},
    ),
    Command(
        "schema",
        "Print the JSON Schema of the deepspeed_compress section, for editors.",
        ("schema", "schema --output deepspeed_compress.schema.json"),
        _schema_arguments,
        _schema,
    ),
    Command(
        "tune",
        "Find the fastest settings that keep the loss, by short real trials of your own script.",
        (
            "tune --config ds_config.json --num_gpus 2 train.py --deepspeed ds_config.json",
            "tune --config ds_config.json --target-loss-gap 0.5% --time-budget 2h --num_gpus 8 train.py "
            "--deepspeed ds_config.json --output_dir runs/x",
            "tune --config ds_config.json --metric bytes --space mine.json --launcher torchrun --nproc_per_node 2 "
            "train.py --deepspeed ds_config.json",
        ),
        _tune_arguments,
        _tune,
        _tune_options,
    ),
)

if __name__ == "__main__":
    raise SystemExit(main())
