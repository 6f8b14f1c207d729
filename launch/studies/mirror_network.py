#!/usr/bin/env python3
"""Compare steps of a mirror behind a computed network with the same steps on emulated hosts of this machine.

Each case is a ZeRO stage on some hosts. DeepSpeed and the package are measured at each rate of links on the emulated
hosts and in a mirror, in turns, because a processor's speed changes within minutes. As many mirrors as hosts run at
once, since hosts share the processors, too. Finished cases are kept. It needs Linux, a quiet machine, and what
`ds-compress bench --emulate` needs.

examples, from the root of the repository:
  python -m launch.studies.mirror_network --output-dir runs/mirror
  python -m launch.studies.mirror_network --output-dir runs/mirror --only "ZeRO 3, 2 hosts"
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import CompressError
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench.hosts import Cluster, signals_as_exceptions
from deepspeed_compress.tools.bench.jobs import EmulatedRanks, Row
from deepspeed_compress.tools.bench.links import bits_per_second, enter_user_namespace
from deepspeed_compress.tools.bench.options import Emulation
from deepspeed_compress.tools.bench.workload import DEEPSPEED, Group, group_contenders
from launch.studies import computed_network
from launch.studies.computed_network import HostWire, Wires, join_gloo
from launch.studies.harness import CPU, ROOT, markdown, new_parser, run_study, tracked


@dataclass(frozen=True)
class Case:
    """ZeRO stage on a number of hosts with one rank each."""

    zero: int
    hosts: int

    def __str__(self) -> str:
        return f"ZeRO {self.zero}, {self.hosts} hosts"

    @property
    def config(self) -> str:
        """Path of the configuration."""
        return str(ROOT / "configs" / CONFIGS[self.zero])


CONFIGS = ("zero0_int4.json", "zero1_int4_weights.json", "zero2_int4_weights.json", "zero3_int4_weights8.json")
"""Configurations by ZeRO stage."""
CASES: Mapping[str, Case] = {
    str(case): case for case in (*(Case(zero, 2) for zero in range(4)), Case(1, 4), Case(3, 4))
}
TURNS = 3
STEPS: Mapping[str, int] = {"5gbit": 7, "1gbit": 7, "100mbit": 3}
"""Measured steps of a turn by rate."""
TIMEOUT = 600.0
NEAR = 0.1
"""Difference of steps that are near each other."""
COLUMNS = ("step", "rate", "emulated, s", "mirror, s", "difference")


@dataclass(frozen=True)
class Pair:
    """Seconds of the same step on emulated hosts and in a mirror."""

    name: str
    rate: str
    emulated: float
    mirror: float

    @property
    def difference(self) -> float:
        """Difference of the mirror's seconds, relative to those of the hosts."""
        return self.mirror / self.emulated - 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the missing cases, and print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="directory for the figures")
    parser.add_argument("--model", type=Path, default=ROOT / "configs/models/gpt_2m.json", metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="(default: all)")
    parser.add_argument("--mirror-of", choices=CASES, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.mirror_of is not None:
        measure_mirror(CASES[options.mirror_of], options)
        return 0
    options.output_dir.mkdir(parents=True, exist_ok=True)
    enter_user_namespace([sys.executable, "-m", "launch.studies.mirror_network", *sys.argv[1:]])
    return run_study(_study, options)


def _study(options: argparse.Namespace) -> bool:
    found = [pair for name in tracked(options.only) for pair in pairs(CASES[name], outcome(CASES[name], options))]
    print(markdown(COLUMNS, [row(pair) for pair in found]), end="")
    print(summary(found))
    return True


def outcome(case: Case, options: argparse.Namespace) -> Sequence[Mapping[str, Any]]:
    """Return the rows of each turn of a case, of an earlier run if there is one."""
    file = options.output_dir / f"zero{case.zero}_hosts{case.hosts}.json"
    if not file.is_file():
        turns = [{name: measure(case, options.model) for name, measure in SIDES.items()} for _ in range(TURNS)]
        write_json(file, turns)
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def group_of(case: Case, model: Path) -> Group:
    """Return DeepSpeed and the package with the configuration of a case."""
    sizes = {"micro_batch": None, "seq_len": 64, "seed": 0}
    [group] = group_contenders([case.config], str(model), [DEEPSPEED], sizes, case.hosts)
    return group


def emulated(case: Case, model: Path) -> list[list[Row]]:
    """Return the rows of emulated hosts, which are means over them.

    Raises:
        CompressError: A process failed.
    """
    job = group_of(case, model).to_job(dict[str | None, int](STEPS.items()))
    rows, failure = EmulatedRanks(Emulation(case.hosts, tuple(STEPS)), TIMEOUT).run([job])
    if failure is not None:
        raise CompressError(f"{case}: emulated hosts: {failure}")
    return [rows]


def mirrors(case: Case, model: Path) -> list[list[Row]]:
    """Return the rows of each of the mirrors, which run at once.

    Raises:
        CompressError: A process failed.
    """
    program = (sys.executable, "-m", "launch.studies.mirror_network", "--mirror-of", str(case), "--model", str(model))
    with signals_as_exceptions(), tempfile.TemporaryDirectory() as directory, Cluster(case.hosts) as cluster:
        run = cluster.run([*program, "--output-dir", directory], CPU, TIMEOUT)
        if run.failure is not None:
            run.print_ends()
            raise CompressError(f"{case}: mirrors: {run.failure}")
        return [json.loads(file.read_text(encoding="utf-8")) for file in Path(directory).glob("*.json")]


def measure_mirror(case: Case, options: argparse.Namespace) -> None:
    """Measure the steps of this mirror, and write their rows."""
    file, rates = options.output_dir / f"{os.environ['RANK']}.json", {bits_per_second(rate): rate for rate in STEPS}
    wires = Wires(case.hosts, 1, HostWire(join_gloo()))
    computed_network.join(wires)
    steps = dict(zip(rates, STEPS.values(), strict=True))
    found = computed_network.measure(wires, group_of(case, options.model), steps)
    write_json(file, [row | {"rate": rates[rate]} for rate, row in found])


SIDES: Mapping[str, Callable[[Case, Path], list[list[Row]]]] = {"emulated": emulated, "mirrors": mirrors}
"""Functions that measure a turn of a case. They return rows of the hosts together, and of each mirror."""


def pairs(case: Case, turns: Sequence[Mapping[str, Any]]) -> Iterator[Pair]:
    """Yield the steps of a case: the medians over its turns."""
    for one in turns[0]["emulated"][0]:
        name, rate = step = _step(one)
        seconds = [
            statistics.median(
                statistics.mean(row["step_s"]["median"] for rows in turn[side] for row in rows if _step(row) == step)
                for turn in turns
            )
            for side in SIDES
        ]
        yield Pair(f"{case}, {name}", rate, *seconds)


def _step(row: Row) -> tuple[str, str]:
    """Return what was measured: the system and the rate."""
    return row["contender"]["name"], row["rate"]


def row(pair: Pair) -> Sequence[str]:
    """Return the cells of a step."""
    return (pair.name, pair.rate, f"{pair.emulated:.3f}", f"{pair.mirror:.3f}", f"{100 * pair.difference:+.0f} %")


def summary(found: Sequence[Pair]) -> str:
    """Return how near all steps are."""
    near = sum(abs(pair.difference) <= NEAR for pair in found)
    median = statistics.median(pair.difference for pair in found)
    return f"within {100 * NEAR:.0f} %: {near} of {len(found)}, median difference {100 * median:+.1f} %"


if __name__ == "__main__":
    sys.exit(main())
