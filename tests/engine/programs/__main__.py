"""`python -m tests.engine.programs [--stage N] [--section NAME] [NAME ...]`: run programs, print what they become."""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.engine.programs.catalogue import PROGRAMS
from tests.engine.programs.judge import found, wanted
from tests.engine.programs.ranks import SECTIONS, Result, Task, run_tasks, tasks_of


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, action="append")
    parser.add_argument("--section", action="append")
    parser.add_argument("--failures", action="store_true", help="print these alone")
    parser.add_argument("--places", action="store_true", help="print tracebacks")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    programs = [one for one in PROGRAMS if not options.names or any(part in one.name for part in options.names)]
    for stage in options.stage or (0, 1, 2, 3):
        tasks = tasks_of(programs, stage, options.section or SECTIONS)
        with tempfile.TemporaryDirectory() as directory:
            results: dict[Task, list[Result]] = {}
            for task, ranks in run_tasks(tasks, Path(directory)):
                results[task] = ranks
                show(task, results, options)


def show(task: Task, results: Mapping[Task, list[Result]], options: argparse.Namespace) -> None:
    outcome = found(task, results)
    good = outcome.fulfils(wanted(task))
    if not (good and options.failures):
        print("ok " if good else "RED", task.stage, repr(task.program.name), task.section, outcome, flush=True)
    if not good and options.places:
        print(next((result.place for result in results[task] if result.error), ""), flush=True)


if __name__ == "__main__":
    main()
