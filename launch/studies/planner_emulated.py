#!/usr/bin/env python3
"""Compare predicted with measured steps of many layouts on emulated hosts of this machine.

Each kind of hosts has the constants that fit its probes and three of its steps at one rate, since ranks share the
cores of this machine. At each rate, it gets the layout that the planner chooses and a random sample of others. Only
measurements are kept, in a JSON file for each kind of hosts: an interrupted study continues, and a summary predicts
with the present planner. It needs Linux, a quiet machine, and what `ds-compress bench --emulate` needs.

examples, from the root of the repository:
  python -m launch.studies.planner_emulated --output runs/planner --most 6
  python -m launch.studies.planner_emulated --output runs/planner --summary
"""

import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Probe, Step, fit_measured
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.search import Candidate, Job, search
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench.jobs import EmulatedRanks
from deepspeed_compress.tools.bench.links import enter_user_namespace
from deepspeed_compress.tools.bench.options import Emulation
from deepspeed_compress.tools.plan_measure import measure, measure_step
from launch.studies.harness import new_parser

MACHINES = ((2, 1), (2, 2), (4, 2))
"""Hosts, and ranks of each."""
RATES = ("100mbit", "1gbit", "5gbit")
MEASURED_RATE = "1gbit"
"""Rate at which the constants are measured."""
LAYOUTS = 5
"""Layouts for each kind of hosts and each rate: the planner's choice, and a sample of others."""
BATCH, SEQ = 16, 64
TIMEOUT = 1800.0
"""Time limit of a measurement in seconds."""


@dataclass(frozen=True)
class Row:
    """Layout at a rate, with its predicted seconds and, unless they are missing, its measured ones."""

    group: str
    layout: Layout
    predicted: float
    measured: float | None
    chosen: bool = False

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        assert self.measured is not None, "only measured rows have an error"
        return self.predicted / self.measured - 1


class Machine:
    """Hosts of one kind, with the file of their measurements: probes, steps at one rate, and steps at each rate."""

    def __init__(self, directory: Path, model: Path, hosts: int, per_host: int) -> None:
        self.hosts, self.per_host, self._model = hosts, per_host, model
        self._file = directory / f"{hosts}x{per_host}.json"
        self._found: dict[str, Any] = json.loads(self._file.read_text()) if self._file.is_file() else {}

    @property
    def is_probed(self) -> bool:
        """True if the measurements that the constants need are there."""
        return bool(self._found)

    def emulation(self, rate: str) -> Emulation:
        """Return the hosts with links of a rate."""
        return Emulation(self.hosts, (rate,), self.per_host)

    def job(self, rate: str, constants: Constants | None = None) -> Job:
        """Return the job on these hosts, by default with the constants of GPUs."""
        ranks = self.hosts * self.per_host
        model = read_model(self._model)
        cluster = read_cluster(f"{ranks}xCPU", rate, self.per_host)
        job = Job(cluster, model, SOFTWARE["deepspeed"], SEQ, BATCH, 20.0 * model.parameters)
        return replace(job, constants=constants) if constants else job

    def probe(self) -> None:
        """Measure what the constants need."""
        job = self.job(MEASURED_RATE)
        found = measure(search(job), job, EmulatedRanks(self.emulation(MEASURED_RATE), TIMEOUT), self._model)
        steps = [asdict(step) for step in found.steps]
        self._found = {"probes": [asdict(probe) for probe in found.probes], "steps": steps, "rates": {}}
        write_json(self._file, self._found)

    def constants(self) -> Constants:
        """Return the constants that fit the probes and the steps at one rate."""
        probes = [Probe(row["kind"], tuple(row["sizes"]), row["seconds"]) for row in self._found["probes"]]
        steps = [Step(Layout(**row["layout"]), row["seconds"]) for row in self._found["steps"]]
        return fit_measured(self.job(MEASURED_RATE), probes, steps).constants

    def rows(self, rate: str, constants: Constants) -> list[Row]:
        """Return the layouts at a rate: those of the file, or a new sample, and the planner's present choice."""
        job = self.job(rate, constants)
        plan = search(job)
        chosen = plan.candidates[0].layout
        steps = self._steps(rate)
        layouts = list(steps) or sample(plan.fitting, chosen, f"{self.hosts}x{self.per_host} {rate}")
        group = f"{self.hosts}x{self.per_host},{rate}"
        return [
            Row(group, one, job.predictor(one).predict(one).seconds, steps.get(one), one == chosen)
            for one in dict.fromkeys([chosen, *layouts])
        ]

    def keep(self, rate: str, rows: Sequence[Row]) -> None:
        """Write the layouts at a rate with their measured seconds."""
        steps = [{"layout": asdict(row.layout), "seconds": row.measured} for row in rows]
        self._found["rates"][rate] = steps
        write_json(self._file, self._found)

    def measured(self, rate: str, row: Row) -> Row:
        """Return a row with the measured seconds of its step."""
        ranks = EmulatedRanks(self.emulation(rate), TIMEOUT)
        return replace(row, measured=measure_step(row.layout, self.job(rate), ranks, self._model).seconds)

    def _steps(self, rate: str) -> dict[Layout, float | None]:
        return {Layout(**row["layout"]): row["seconds"] for row in self._found["rates"].get(rate, ())}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing in the files, and print a summary."""
    parser = new_parser(__doc__)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="directory for measurements")
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_1m.json"), metavar="FILE")
    parser.add_argument("--most", type=int, default=45, metavar="N", help="measure at most N steps now (default: 45)")
    parser.add_argument("--summary", action="store_true", help="measure nothing")
    options = parser.parse_args(arguments)
    machines = [Machine(options.output, options.model, *hosts) for hosts in MACHINES]
    if not options.summary:
        options.output.mkdir(parents=True, exist_ok=True)
        enter_user_namespace([sys.executable, "-m", "launch.studies.planner_emulated", *sys.argv[1:]])
        measure_missing(machines, options.most)
    print(*summary(list(measured_rows(machines))), sep="\n")
    return 0


def measure_missing(machines: Sequence[Machine], most: int) -> None:
    """Measure at most `most` steps that the files of the machines lack."""
    for machine in machines:
        if not machine.is_probed:
            print(f"probes on {machine.hosts} hosts with {machine.per_host} ranks", flush=True)
            machine.probe()
        constants = machine.constants()
        for rate in RATES:
            rows = machine.rows(rate, constants)
            for place, row in enumerate(rows):
                if row.measured is None and most > 0:
                    most -= 1
                    rows[place] = row = machine.measured(rate, row)
                    print(
                        f"{row.group} {row.layout}: {row.measured:.3g} s, predicted {row.predicted:.3g} s", flush=True
                    )
                    machine.keep(rate, rows)


def measured_rows(machines: Sequence[Machine]) -> Iterator[Row]:
    """Yield the rows that have been measured."""
    for machine in machines:
        if machine.is_probed:
            constants = machine.constants()
            for rate in RATES:
                yield from (row for row in machine.rows(rate, constants) if row.measured is not None)


def sample(found: Sequence[Candidate], chosen: Layout, seed: str) -> list[Layout]:
    """Return a random sample of layouts beside the chosen one."""
    others = [one.layout for one in fastest_of_each_kind(found) if one.layout != chosen]
    return random.Random(seed).sample(others, LAYOUTS - 1)


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
    median, most = 100 * np.quantile([abs(row.error) for row in rows], (0.5, 0.9))
    correlation = f", rank correlation {rank_correlation(rows):.2f}" if len(rows) > 2 else ""
    yield f"{len(rows)} rows: error {median:.1f} % (median), {most:.1f} % (90th percentile){correlation}"
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for name, group in groups.items():
        yield f"{name}: {len(group)} rows, {', '.join(_figures(group))}"
        for row in group:
            yield f"  {row.layout}: {row.measured:.3g} s, predicted {row.predicted:.3g} s, {100 * row.error:+.0f} %"


def _figures(group: Sequence[Row]) -> Iterator[str]:
    if len(group) > 2:
        yield f"rank correlation {rank_correlation(group):.2f}"
    best = min(row.measured or 0.0 for row in group)
    for row in group:
        if row.chosen:
            yield f"the chosen layout takes {100 * ((row.measured or 0.0) / best - 1):.1f} % longer than the best"


def rank_correlation(group: Sequence[Row]) -> float:
    """Return Spearman's rank correlation between predicted and measured seconds."""
    return statistics.correlation(
        _ranks([row.predicted for row in group]), _ranks([row.measured or 0.0 for row in group])
    )


def _ranks(values: Sequence[float]) -> list[int]:
    ordered = sorted(range(len(values)), key=values.__getitem__)
    return [ordered.index(place) for place in range(len(values))]


if __name__ == "__main__":
    sys.exit(main())
