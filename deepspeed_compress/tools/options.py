"""Command-line options of commands without an options module, with light imports so that `--help` is fast."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.tools.arguments import epilog, integer_from, port, positive_integer, positive_number, rate

__all__ = [
    "add_check_arguments",
    "add_checkpoint_arguments",
    "add_islands_arguments",
    "add_plan_arguments",
    "add_report_arguments",
    "add_run_arguments",
    "add_schema_arguments",
    "own_run_options",
]

CLEAR_LOCKS = "remove locks that killed builds of DeepSpeed's operators have left, which programs would wait for"


_CHECKPOINT: Mapping[str, tuple[str, Sequence[str]]] = MappingProxyType(
    {
        "list": ("tags, steps, sizes, and which are complete", ["checkpoint list checkpoints"]),
        "verify": (
            "compare every file with its digest; the exit code is 1 where one does not fit",
            ["checkpoint verify checkpoints", "checkpoint verify checkpoints --tag global_step400"],
        ),
        "convert": (
            "write a universal checkpoint, which loads on other tensor and pipeline sizes",
            ["checkpoint convert checkpoints --tag global_step400 --tensor 2"],
        ),
        "prune": (
            "remove complete checkpoints but the newest ones and the one that `latest` names",
            ["checkpoint prune checkpoints --keep 3 --dry-run", "checkpoint prune checkpoints --keep 3"],
        ),
    }
)
"""Summary and examples of each command of `checkpoint`."""


def _add(subparsers: Any, name: str, summary: str, examples: Sequence[str]) -> argparse.ArgumentParser:
    """Add the parser of a command of the second level, whose help ends with `examples`."""
    parser: argparse.ArgumentParser = subparsers.add_parser(name, help=summary, description=summary, **epilog(examples))
    return parser


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    parser.add_argument("--world-size", type=int, metavar="N", help="ranks in all, to check the parallelism against")


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(required=True, metavar="WHAT")
    parsers = {name: _add(subjects, name, *row) for name, row in _CHECKPOINT.items()}
    for name, subparser in parsers.items():
        subparser.set_defaults(subject=name)
        subparser.add_argument("directory", type=Path, metavar="DIR", help="as given to save_checkpoint")
    parsers["verify"].add_argument("--tag", help="of one checkpoint (default: all)")
    convert = parsers["convert"]
    convert.add_argument("--tag", help="of the checkpoint (default: the one that `latest` names)")
    convert.add_argument("--output", metavar="TAG", help="tag of the universal one (default: TAG_universal)")
    what = "of the run that will load it, which GPT-2 stores the other way round above 1 (default: as it was saved)"
    convert.add_argument("--tensor", type=positive_integer, metavar="N", help=what)
    convert.add_argument("--workers", type=positive_integer, default=1, metavar="N", help="processes (default: 1)")
    parsers["prune"].add_argument("--keep", type=positive_integer, required=True, metavar="N", help="how many stay")
    parsers["prune"].add_argument("--dry-run", action="store_true", help="only tell what would be removed")


def add_islands_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(required=True, metavar="WHAT")
    serve = _add(
        actions,
        "serve",
        "be the coordinator, until interrupted",
        [
            "islands serve --port 29400 --state islands.json",
            "islands serve --host 10.0.0.1 --port 29400 --state islands.json --parameter-server",
        ],
    )
    serve.set_defaults(action="serve")
    serve.add_argument(
        "--port", type=port, required=True, metavar="N", help="that islands connect to; 0 takes a free one"
    )
    what = "address to listen at, such as 0.0.0.0 for all (default: %(default)s, for islands of this host alone)"
    serve.add_argument("--host", default="127.0.0.1", metavar="HOST", help=what)
    what = "file that it goes on from when it is started again"
    serve.add_argument("--state", type=Path, required=True, metavar="FILE", help=what)
    what = "be the parameter server of asynchronous islands in its place; needs the memory of two to four models"
    serve.add_argument("--parameter-server", action="store_true", help=what)
    what = "print which islands are connected, and which are missing"
    status = _add(actions, "status", what, ["islands status localhost:29400", "islands status 10.0.0.1:29400 --json"])
    status.set_defaults(action="status")
    status.add_argument("rendezvous", metavar="HOST:PORT", help="address of the coordinator")
    status.add_argument("--json", action="store_true", help="print JSON, for programs")
    what = "go on without islands that have died and never left"
    forget = _add(actions, "forget", what, ["islands forget localhost:29400 2", "islands forget 10.0.0.1:29400 2 5"])
    forget.set_defaults(action="forget")
    forget.add_argument("rendezvous", metavar="HOST:PORT", help="address of the coordinator")
    what = "numbers of islands, as status prints them below missing"
    forget.add_argument(
        "numbers", type=integer_from(0, "islands are numbered from 0"), nargs="+", metavar="N", help=what
    )
    forget.add_argument("--json", action="store_true", help="print JSON, for programs")
    for subparser in (serve, status, forget):
        _add_tls_arguments(subparser)


def _add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    what = "PEM file with the certificate of this side and its key: connections use TLS (docs/security.md)"
    parser.add_argument("--tls-certificate", metavar="FILE", help=what)
    what = "PEM file with the authority that has signed the certificates of both sides; needed with the former"
    parser.add_argument("--tls-authority", metavar="FILE", help=what)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = parser.add_subparsers(required=True, metavar="WHAT")
    schedule = _add(
        subjects,
        "schedule",
        "what is in force in which step",
        ["plan schedule ds_config.json", "plan schedule ds_config.json --steps 10000 --output schedule.png"],
    )
    schedule.set_defaults(subject="schedule")
    schedule.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    schedule.add_argument("--steps", type=positive_integer, metavar="N", help="optimizer steps of the whole training")
    schedule.add_argument("--output", type=Path, metavar="PNG", help="draw it as well")
    islands = _add(
        subjects,
        "islands",
        "what exchanges between islands take, and how often they may be",
        ["plan islands ds_config.json --model 124M --hosts 4 --bandwidth 100mbit --step 0.5"],
    )
    islands.set_defaults(subject="islands")
    islands.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration with islands")
    what = "number of parameters such as 124M, or config.json of a model"
    islands.add_argument("--model", required=True, metavar="N|FILE", help=what)
    what = "of the link of an island, such as 100mbit"
    islands.add_argument("--bandwidth", type=rate, required=True, metavar="RATE", help=what)
    several = integer_from(2, "one island alone exchanges nothing")
    islands.add_argument("--hosts", type=several, required=True, metavar="N", help="islands, from 2 up")
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
    _add_agent_arguments(parser.add_argument_group("to start again what is lost, in place of a launcher"))
    parser.add_argument("--clear-locks", action="store_true", help=CLEAR_LOCKS)
    what = "go on although a DeepSpeed configuration seems to have a misspelled section, and would not be compressed"
    parser.add_argument("--allow-uncompressed", action="store_true", help=what)
    section = "file with the section, for programs with DistributedDataParallel or fully_shard, and no DeepSpeed"
    parser.add_argument("--section", type=Path, metavar="FILE", help=section)
    _add_tls_arguments(parser)
    parser.add_argument(
        "arguments",
        nargs=argparse.REMAINDER,
        metavar="...",
        help="options of the launcher, SCRIPT, arguments of SCRIPT",
    )


def _add_agent_arguments(group: argparse._ArgumentGroup) -> None:
    what = "start the ranks of this host, and again when one or a host is lost, at most N times (docs/faults.md)"
    group.add_argument("--restarts", type=integer_from(0), metavar="N", help=what)
    group.add_argument("--ranks", type=positive_integer, metavar="N", help="on each host; needed")
    group.add_argument("--hosts", type=positive_integer, default=1, metavar="N", help="that train (default: 1)")
    what = "more that take the place of what is lost: hosts with --rendezvous, else GPUs (default: 0)"
    group.add_argument("--spares", type=integer_from(0), default=0, metavar="N", help=what)
    what = "where the agents of several hosts meet: an address of one of them. The same command runs on each"
    group.add_argument("--rendezvous", metavar="HOST:PORT", help=what)
    what = "without a step or forward pass of any rank, after which all are started again (default: %(default)s)"
    group.add_argument("--hang", default="10 min", metavar="TIME", help=what)
    what = "that ranks have to end when they are asked to (default: %(default)s)"
    group.add_argument("--grace", default="30 s", metavar="TIME", help=what)
    what = "for hosts to come, before an error (default: %(default)s)"
    group.add_argument("--wait", default="10 min", metavar="TIME", help=what)
    what = "let each rank import by itself, and not be forked from a process that has"
    group.add_argument("--cold", action="store_true", help=what)


def own_run_options() -> Mapping[str, int]:
    """Return the number of values of each option that `run` itself takes."""
    agent = ("restarts", "ranks", "hosts", "spares", "rendezvous", "hang", "grace", "wait")
    valued = ("launcher", "section", *agent, "tls-certificate", "tls-authority")
    return {**{f"--{name}": 1 for name in valued}, "--cold": 0, "--clear-locks": 0, "--allow-uncompressed": 0}


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    what = "print tables of all keys with their types, defaults and meanings, in Markdown"
    parser.add_argument("--markdown", action="store_true", help=what)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to FILE instead of standard output")
