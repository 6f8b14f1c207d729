"""Run programs: `python -m tests.backends.deepspeed.programs [--stage N] [--section NAME] [NAME ...]`."""

import argparse
import tempfile
from collections.abc import Mapping
from pathlib import Path

from tests.backends.deepspeed.programs.catalogue import PROGRAMS
from tests.backends.deepspeed.programs.judge import found, wanted
from tests.backends.deepspeed.programs.ranks import SECTIONS, Result, Task, run_tasks, tasks_of
from tests.backends.deepspeed.programs.table import STAGES, table


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", type=int, action="append", help="of ZeRO; all without it")
    parser.add_argument("--section", action="append", help=f"beside plain: {', '.join(SECTIONS)}; all without it")
    parser.add_argument("--failures", action="store_true", help="print these alone")
    parser.add_argument("--places", action="store_true", help="print tracebacks")
    parser.add_argument("--table", type=Path, help="the file to write a table in Markdown to")
    parser.add_argument("names", nargs="*", help="parts of names of programs; all without them")
    options = parser.parse_args()
    programs = [one for one in PROGRAMS if not options.names or any(part in one.name for part in options.names)]
    sections = list(dict.fromkeys(["plain", *(options.section or SECTIONS)]))
    results: dict[Task, list[Result]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for stage in options.stage or STAGES:
            for task, ranks in run_tasks(tasks_of(programs, stage, sections), Path(directory)):
                results[task] = ranks
                show(task, results, options)
    if options.table is not None:
        options.table.write_text(table(results) + "\n")


def show(task: Task, results: Mapping[Task, list[Result]], options: argparse.Namespace) -> None:
    outcome = found(task, results)
    good = outcome.fulfils(wanted(task))
    if not (good and options.failures):
        print("ok " if good else "RED", task.stage, repr(task.program.name), task.section, outcome, flush=True)
    if not good and options.places:
        print(next((result.place for result in results[task] if result.error), ""), flush=True)


if __name__ == "__main__":
    main()
