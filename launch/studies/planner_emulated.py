#!/usr/bin/env python3
"""Compare predicted with measured steps of many layouts on emulated hosts of this machine.

Each kind of hosts has the constants that `ds-compress plan cluster --measure` finds there at one rate, since ranks
share the cores of this machine. At each rate, it gets the layout that the planner chooses and a random sample of
others. Rows are appended to a JSON file, so an interrupted study continues. It needs Linux, a quiet machine, and what
`ds-compress bench --emulate` needs.

examples, from the root of the repository:
  python -m launch.studies.planner_emulated --output runs/planner --most 6
  python -m launch.studies.planner_emulated --output runs/planner --summary
"""

import argparse
import itertools
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.planner.calibration import quantile
from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import read_constants
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.search import Candidate, Job, search
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.tools.bench.links import enter_user_namespace
from deepspeed_compress.tools.bench.options import Emulation
from deepspeed_compress.tools.files import write_json
from deepspeed_compress.tools.plan_measure import EmulatedPlace, measure, measure_step

MACHINES = ((2, 1), (2, 2), (4, 2))
"""Hosts, and ranks of each."""
RATES = ("100mbit", "1gbit", "5gbit")
MEASURED_RATE = "1gbit"
"""Rate at which the constants are measured."""
LAYOUTS = 5
"""Layouts for each kind of hosts and each rate: the planner's choice, and a sample of others."""
BATCH, SEQ = 16, 64

Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Layout to measure.

    Attributes:
        emulation: Hosts and their rate.
        job: The job on them.
        candidate: The layout with its prediction.
        chosen: Whether it is the planner's choice.
    """

    emulation: Emulation
    job: Job
    candidate: Candidate
    chosen: bool

    @property
    def name(self) -> str:
        """Text that identifies the row."""
        hosts = f"{self.emulation.hosts}x{self.emulation.per_host},{self.emulation.rates[0]}"
        return f"{hosts} {self.candidate.layout}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing in the file, and print a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory for rows and constants")
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_1m.json"), metavar="FILE")
    parser.add_argument("--most", type=int, default=40, metavar="N", help="measure at most N rows now (default: 40)")
    parser.add_argument("--timeout", type=float, default=1800, metavar="SECONDS", help="time limit of a row")
    parser.add_argument("--summary", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    file = options.output / "rows.json"
    rows: list[Row] = json.loads(file.read_text()) if file.is_file() else []
    if not options.summary:
        options.output.mkdir(parents=True, exist_ok=True)
        enter_user_namespace([sys.executable, "-m", "launch.studies.planner_emulated", *sys.argv[1:]])
        for row in measured(options, {row["name"] for row in rows}):
            rows.append(row)
            write_json(file, rows)
    print(*summary(rows), sep="\n")
    return 0


def measured(options: argparse.Namespace, known: set[str]) -> Iterator[Row]:
    """Yield the rows of at most `options.most` cases that are not `known`."""
    missing = (case for case in cases(options) if case.name not in known)
    for number, case in enumerate(itertools.islice(missing, options.most), 1):
        print(f"[{number}/{options.most}] {case.name}", flush=True)
        place = EmulatedPlace(case.emulation, options.timeout)
        step = measure_step(case.candidate.layout, case.job, place, options.model)
        predicted = case.candidate.prediction.seconds
        print(f"  {step.seconds:.3g} s measured, {predicted:.3g} s predicted", flush=True)
        yield {"name": case.name, "chosen": case.chosen, "measured": step.seconds, "predicted": predicted}


def cases(options: argparse.Namespace) -> Iterator[Case]:
    """Yield all cases of the study, always the same ones."""
    for rate in RATES:
        for hosts, per_host in MACHINES:
            emulation = Emulation(hosts, (rate,), per_host)
            job = replace(job_on(emulation, options.model), constants=constants_of(hosts, per_host, options))
            plan = search(job)
            yield Case(emulation, job, plan.candidates[0], chosen=True)
            kinds = fastest_of_each_kind(plan.fitting)
            others = [one for one in kinds if one.layout != plan.candidates[0].layout]
            for one in random.Random(f"{emulation}").sample(others, LAYOUTS - 1):
                yield Case(emulation, job, one, chosen=False)


def job_on(emulation: Emulation, file: Path) -> Job:
    """Return the job on emulated hosts, with the constants of GPUs."""
    cluster = read_cluster(f"{emulation.ranks}xCPU", emulation.rates[0], emulation.per_host)
    model = read_model(file)
    return Job(cluster, model, SOFTWARE["deepspeed"], SEQ, BATCH, 20.0 * model.parameters)


def constants_of(hosts: int, per_host: int, options: argparse.Namespace) -> Constants:
    """Return the constants of a kind of hosts. Measure them unless there is a file."""
    file = options.output / f"constants_{hosts}x{per_host}.json"
    if not file.is_file():
        emulation = Emulation(hosts, (MEASURED_RATE,), per_host)
        print(f"constants of {hosts} hosts with {per_host} ranks", flush=True)
        job = job_on(emulation, options.model)
        found = measure(search(job), job, EmulatedPlace(emulation, options.timeout), options.model)
        write_json(file, found.to_json())
    return read_constants(file, "CPU")


def fastest_of_each_kind(found: Sequence[Candidate]) -> list[Candidate]:
    """Return the fastest candidate of each division and setting of compression, without recomputation."""
    best: dict[tuple[object, ...], Candidate] = {}
    for one in sorted(found, key=lambda one: one.prediction.seconds):
        if one.layout.recompute == "none":
            best.setdefault(kind_of(one.layout), one)
    return list(best.values())


def kind_of(layout: Layout) -> tuple[object, ...]:
    """Return what the study varies."""
    division = (layout.tensor, layout.pipeline, layout.zero, layout.shard_within, layout.islands)
    return (*division, layout.gradient_bits, layout.weight_bits)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the errors, the rank correlation, and how far the chosen layouts are from the best measured ones."""
    if not rows:
        yield "no rows"
        return
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    median, most = (100 * quantile(errors, share) for share in (0.5, 0.9))
    yield f"{len(rows)} rows: error {median:.1f} % (median), {most:.1f} % (90th percentile)"
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row["name"].split()[0], []).append(row)
    for name, group in groups.items():
        yield f"{name}: {len(group)} rows, {', '.join(_figures(group))}"


def _figures(group: Sequence[Row]) -> Iterator[str]:
    if len(group) > 2:
        yield f"rank correlation {rank_correlation(group):.2f}"
    best = min(row["measured"] for row in group)
    for row in group:
        if row["chosen"]:
            yield f"the chosen layout takes {100 * (row['measured'] / best - 1):.1f} % longer than the best"


def rank_correlation(group: Sequence[Row]) -> float:
    """Return Spearman's rank correlation between predicted and measured seconds."""
    return statistics.correlation(*(_ranks([row[name] for row in group]) for name in ("predicted", "measured")))


def _ranks(values: Sequence[float]) -> list[int]:
    ordered = sorted(range(len(values)), key=values.__getitem__)
    return [ordered.index(place) for place in range(len(values))]


if __name__ == "__main__":
    sys.exit(main())
