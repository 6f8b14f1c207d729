"""Command-line options of `ds-compress bench`. Each benchmark imports what it needs when it runs."""

import argparse
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deepspeed_compress.tools.arguments import Subcommands, integer_from, positive_integer, positive_number, rate

PEERS = (
    "deepspeed",
    "ddp",
    "ddp-int4",
    "ddp-powersgd1",
    "ddp-powersgd4",
    "fsdp2",
    "fsdp2-hsdp",
    "fsdp2-int4",
    "fsdp2-int4-weights",
)
KINDS = ("collectives", "tensor", "pipeline", "experts", "sequence")
SIZES = ("4K", "16K", "64K", "256K", "1M", "4M", "16M")


@dataclass(frozen=True)
class Emulation:
    """Emulated hosts to create on this machine, the rates of their links as `tc` writes them, and ranks per host."""

    hosts: int
    rates: tuple[str, ...]
    per_host: int = 1

    @property
    def ranks(self) -> int:
        return self.hosts * self.per_host


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subparser for each benchmark."""
    subparsers = Subcommands(parser, "BENCHMARK")
    _add_step(subparsers)
    _add_comm(subparsers)
    _add_kernels(subparsers)


def _add_step(subparsers: Subcommands) -> None:
    what = "Measure training steps of your configuration, of DeepSpeed without it, of pure computation, and of peers."
    examples = [
        "bench step --config ds_config.json --emulate 2,1gbit,100mbit --output step.json",
        "bench step --config configs/zero[0-3]_int4.json --peers deepspeed ddp fsdp2 --emulate 4,1gbit "
        "--output step.json",
        "bench step --config ds_config.json --mirror 2 --output step.json",
    ]
    parser = subparsers.add("step", "tools.bench.step:run", what, examples)
    group = parser.add_argument_group("measurement")
    group.add_argument("--config", nargs="+", required=True, metavar="FILE", help="DeepSpeed configurations")
    what = "config of a Hugging Face causal LM, or a directory (default: configs/models/gpt_10m.json)"
    group.add_argument("--model", nargs="+", default=["configs/models/gpt_10m.json"], metavar="PATH", help=what)
    what = f"other systems to measure: {', '.join(PEERS)} (default: deepspeed, which is each file without its section)"
    group.add_argument("--peers", nargs="*", choices=PEERS, default=["deepspeed"], metavar="PEER", help=what)
    what = "sequences in a micro-batch (default: as in the file)"
    group.add_argument("--micro-batch", type=positive_integer, metavar="N", help=what)
    what = "tokens in a sequence (default: 64)"
    group.add_argument("--seq-len", type=positive_integer, default=64, metavar="N", help=what)
    what = "train LoRA's adapters of rank N for every matrix of the layers, and freeze the model (needs peft)"
    group.add_argument("--lora-rank", type=positive_integer, default=0, metavar="N", help=what)
    group.add_argument("--seed", type=int, default=0, metavar="N")
    what = "measured steps: one number, or one per rate (default: 7, or 3 below 500 Mbit/s)"
    group.add_argument("--steps", type=positive_integer, nargs="+", metavar="N", help=what)
    what = "measure one rank of N on this machine, whose messages come back at once: a network that costs no time"
    _add_where(parser).add_argument("--mirror", type=integer_from(2), metavar="N", help=what)
    output = parser.add_argument_group("output")
    what = "new file for the rows"
    output.add_argument("--output", type=Path, required=True, metavar="FILE.json", help=what)


def _add_comm(subparsers: Subcommands) -> None:
    what = "Measure collectives, the exchange that carries compressed messages, or compressed activations."
    examples = [
        "bench comm --emulate 2,1gbit --json comm.json",
        "bench comm --emulate 4,100mbit --sizes 16K 1M",
        "bench comm --kind tensor --emulate 2,5gbit,1gbit",
    ]
    parser = subparsers.add("comm", "tools.bench.comm:run", what, examples)
    what = "collectives, or activations of a kind of parallelism, with the rate from which on compression costs time"
    parser.add_argument("--kind", choices=KINDS, default=KINDS[0], help=what)
    what = f"bytes of a rank's buffer, such as 64K or 4M (default: {' '.join(SIZES)})"
    default = [size(text) for text in SIZES]
    parser.add_argument("--sizes", type=size, nargs="+", default=default, metavar="SIZE", help=what)
    _add_where(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE.json", help="write all figures")


def _add_kernels(subparsers: Subcommands) -> None:
    what = "Measure the compression kernels on one core or GPU, compared with copying the same memory."
    examples = [
        "bench kernels --numel 100M --json kernels.json",
        "bench kernels --device cuda",
        "bench kernels --only int4 --numel 10M",
    ]
    parser = subparsers.add("kernels", "tools.bench.kernels:run", what, examples)
    what = "number of input elements (default: 100M)"
    count = partial(size, thousand=10**3, example="100M or 1000000")
    parser.add_argument("--numel", type=count, default=count("100M"), metavar="N", help=what)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    what = "number of timed calls, whose least time counts (default: 5; with other load, try 50)"
    parser.add_argument("--repeats", type=positive_integer, default=5, metavar="N", help=what)
    parser.add_argument("--only", metavar="PATTERN", type=pattern, help="measure operations whose name matches")
    parser.add_argument("--json", type=Path, metavar="FILE.json", help="write all figures")


def _add_where(parser: argparse.ArgumentParser) -> argparse._MutuallyExclusiveGroup:
    """Add where to measure. Return the group of the options of which only one can be given."""
    where = parser.add_argument_group("hosts")
    what = "emulated hosts on this machine, such as 2,none,1gbit or 4x2,1gbit (default: the processes of a launcher)"
    chosen = where.add_mutually_exclusive_group()
    chosen.add_argument("--emulate", type=emulation, metavar="HOSTS[xRANKS],RATE[,RATE...]", help=what)
    what = "time limit of one emulated run (default: 1800)"
    where.add_argument("--timeout", type=positive_number, default=1800.0, metavar="SECONDS", help=what)
    return chosen


def emulation(text: str) -> Emulation:
    """Parse hosts and rates such as "2,1gbit,100mbit", or "4x2,1gbit" for two ranks on each host.

    Raises:
        argparse.ArgumentTypeError: `text` is not a number of hosts followed by rates.
    """
    machines, *rates = text.split(",")
    hosts, _, per_host = machines.partition("x")
    ranks = (per_host or "1").lstrip("0")
    if not (hosts.isdecimal() and 2 <= int(hosts) <= 250 and ranks.isdecimal() and rates):
        raise argparse.ArgumentTypeError(f"{text!r}: write 2 to 250 hosts[xRANKS] and rates, such as 4x2,1gbit")
    for one in rates:
        rate(one)
    return Emulation(int(hosts), tuple(rates), int(ranks))


def pattern(text: str) -> re.Pattern[str]:
    """Parse a regular expression.

    Raises:
        argparse.ArgumentTypeError: `text` is none.
    """
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def size(text: str, thousand: int = 2**10, example: str = "64K or 4M") -> int:
    """Parse a number with a unit, by default of bytes: "64K" is 65,536.

    Raises:
        argparse.ArgumentTypeError: `text` is not such a number.
    """
    found = re.fullmatch(r"(\d+)([KMG]?)", text)
    if found is None or int(found[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: write a positive number such as {example}")
    factor: int = thousand ** ("", "K", "M", "G").index(found[2])
    return int(found[1]) * factor
