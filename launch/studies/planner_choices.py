#!/usr/bin/env python3
"""Compare what `ds-compress plan cluster` says with measured steps, on emulated hosts of this machine.

In twelve cases, the planner measures as briefly as the command does, and predicts what one can choose from. Then each
of these choices is measured. The table has the seconds of the brief measurement, how much longer a step of the
planner's choice takes than that of the best one, and how many times as fast as now it is, predicted and measured.
Finished cases are kept. It needs Linux, a quiet machine, and what `ds-compress bench --emulate` needs.

examples, from the root of the repository:
  python -m launch.studies.planner_choices --output-dir runs/choices
  python -m launch.studies.planner_choices --output-dir runs/choices --only "ZeRO 3, 2x2, 100mbit"
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.planner.choices import Setup, choices
from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.search import Job, search
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench.jobs import EmulatedRanks
from deepspeed_compress.tools.bench.links import enter_user_namespace
from deepspeed_compress.tools.bench.options import Emulation
from deepspeed_compress.tools.plan_cluster import informative, measure
from launch.studies.harness import markdown, new_parser, tracked


@dataclass(frozen=True)
class Case:
    """Layout that runs now: a ZeRO stage, on `hosts` hosts of `per_host` ranks with links of a rate.

    With a `lora_rank`, it trains adapters.
    """

    zero: int
    hosts: int
    per_host: int
    rate: str
    lora_rank: int = 0

    def __str__(self) -> str:
        tuning = f", LoRA {self.lora_rank}" if self.lora_rank else ""
        return f"ZeRO {self.zero}, {self.hosts}x{self.per_host}, {self.rate}{tuning}"


_CASES = (
    Case(0, 2, 1, "100mbit"),
    Case(0, 2, 2, "1gbit"),
    Case(1, 2, 1, "1gbit"),
    Case(1, 2, 2, "100mbit"),
    Case(1, 2, 2, "5gbit"),
    Case(2, 2, 1, "5gbit"),
    Case(2, 2, 2, "1gbit"),
    Case(3, 2, 1, "1gbit"),
    Case(3, 2, 2, "100mbit"),
    Case(3, 2, 2, "5gbit"),
    Case(2, 2, 1, "100mbit", 16),
    Case(3, 2, 2, "1gbit", 16),
)
CASES: Mapping[str, Case] = {str(case): case for case in _CASES}
BATCH, SEQ, TIMEOUT = 16, 64, 1800.0
"""Sequences of a step, tokens of a sequence, and the time limit of a measurement in seconds."""
STEPS = 9
"""Least steps by which a choice is measured."""
COLUMNS = ("now", "brief measurement, s", "choice", "above the best", "times as fast: predicted", "measured")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the missing cases, and print the table."""
    parser = new_parser(__doc__)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="DIR", help="directory for the figures")
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_1m.json"), metavar="FILE")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="(default: all)")
    options = parser.parse_args(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    enter_user_namespace([sys.executable, "-m", "launch.studies.planner_choices", *sys.argv[1:]])
    found = {name: outcome(CASES[name], options) for name in tracked(options.only)}
    print(markdown(COLUMNS, [row(name, one) for name, one in found.items()]), end="")
    print(*summary(list(found.values())), sep="\n")
    return 0


def outcome(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a case, of an earlier run if there is one."""
    file = options.output_dir / f"{str(case).replace(', ', '_').replace(' ', '')}.json"
    if not file.is_file():
        write_json(file, compare(case, options.model))
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def compare(case: Case, model: Path) -> dict[str, Any]:
    """Return the seconds of the brief measurement, and those of the choices, predicted and measured, now first."""
    cluster = read_cluster(f"{case.hosts * case.per_host}xCPU", case.rate, case.per_host)
    shape = replace(read_model(model), rank=case.lora_rank)
    job = Job(cluster, shape, SOFTWARE["deepspeed"], SEQ, BATCH, 20.0 * shape.trained_parameters)
    ranks, setup = EmulatedRanks(Emulation(case.hosts, (case.rate,), case.per_host), TIMEOUT), Setup(case.zero)
    begin = time.monotonic()
    options = argparse.Namespace(software="deepspeed", model=model, measure=None)
    layouts = informative(choices(job, search(job), setup), job, options)
    brief = measure(layouts, job, ranks, model)
    job = replace(job, constants=brief.constants, corrections=brief.corrections)
    found = choices(job, search(job), setup)
    seconds = time.monotonic() - begin
    steps = measure([one.candidate.layout for one in found], job, ranks, model, STEPS).steps
    rows = [
        {"name": one.name, "predicted": one.seconds, "measured": step.seconds}
        for one, step in zip(found, steps, strict=True)
    ]
    taken = [{"layout": str(step.layout), "seconds": step.seconds} for step in brief.steps]
    return {"brief_seconds": seconds, "brief_steps": taken, "choices": rows}


def row(name: str, found: Mapping[str, Any]) -> Sequence[str]:
    """Return the cells of a case."""
    chosen = chosen_of(found)
    predicted, measured = ratios(found)
    figures = (f"{100 * above_best(found):.0f} %", f"{predicted:.2f}", f"{measured:.2f}")
    return (name, f"{found['brief_seconds']:.0f}", chosen["name"], *figures)


def chosen_of(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the choice that is predicted to be the fastest."""
    chosen: Mapping[str, Any] = min(found["choices"], key=lambda one: one["predicted"])
    return chosen


def above_best(found: Mapping[str, Any]) -> float:
    """Return how much longer a step of the choice takes than that of the best, both measured."""
    return float(chosen_of(found)["measured"] / min(one["measured"] for one in found["choices"]) - 1)


def ratios(found: Mapping[str, Any]) -> tuple[float, float]:
    """Return how many times as fast as now the choice is, predicted and measured."""
    now, chosen = found["choices"][0], chosen_of(found)
    predicted, measured = (now[key] / chosen[key] for key in ("predicted", "measured"))
    return predicted, measured


def summary(found: Sequence[Mapping[str, Any]]) -> Sequence[str]:
    """Return the errors over all cases."""
    above = [above_best(one) for one in found]
    errors = [abs(predicted / measured - 1) for predicted, measured in map(ratios, found)]
    steps = [abs(one["predicted"] / one["measured"] - 1) for case in found for one in case["choices"]]
    return (
        f"choice within 10 % of the best: {sum(one <= 0.1 for one in above)} of {len(above)}",
        f"ratio to now within 15 %: {sum(error <= 0.15 for error in errors)} of {len(errors)}",
        f"{len(steps)} steps: median error {100 * statistics.median(steps):.1f} %",
        f"longest brief measurement: {max(one['brief_seconds'] for one in found):.0f} s",
    )


if __name__ == "__main__":
    sys.exit(main())
