"""Outcomes of all programs as a table, which docs/results.md summarizes."""

import re
from collections.abc import Iterator, Mapping, Sequence

from tests.backends.deepspeed.programs.judge import Outcome, found, wanted
from tests.backends.deepspeed.programs.program import Program
from tests.backends.deepspeed.programs.ranks import Result, Task

STAGES = (0, 1, 2, 3)


def table(results: Mapping[Task, Sequence[Result]]) -> str:
    """Return a Markdown table with a row per program and a column per ZeRO stage."""
    outcomes = {task: found(task, results) for task in results}
    programs = dict.fromkeys(task.program for task in results)
    lines = ["| program | ZeRO 0 | ZeRO 1 | ZeRO 2 | ZeRO 3 |", "|---|---|---|---|---|"]
    for program in programs:
        cells = [_cell({task: outcomes[task] for task in _of(outcomes, program, stage)}) for stage in STAGES]
        lines.append(f"| {program.name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _of(outcomes: Mapping[Task, Outcome], program: Program, stage: int) -> Iterator[Task]:
    return (task for task in outcomes if (task.program, task.stage) == (program, stage))


def _cell(outcomes: Mapping[Task, Outcome]) -> str:
    """Return the text for a program at a stage. `outcomes` includes its plain run."""
    if not outcomes:
        return ""
    wrong = [
        f"{task.section}: **{outcome}**" for task, outcome in outcomes.items() if not outcome.fulfils(wanted(task))
    ]
    if wrong:
        return _short("; ".join(wrong))
    by_section = {task.section: outcome for task, outcome in outcomes.items()}
    if by_section["plain"].kind == "fails":
        return "-"
    weights = by_section.get("weights", by_section["raw"])
    if by_section["raw"].kind == "refused":
        return f"refused: {_reason(by_section['raw'])}"
    return by_section["raw"].kind + (f"; weights refused: {_reason(weights)}" if weights.kind == "refused" else "")


def _reason(outcome: Outcome) -> str:
    """Return the sentence that names the problem, without the remedy."""
    text = outcome.text.split("\n- ")[-1].split("; ")[0].split(": ", 1)[-1]
    return _short(re.sub(r"^\S+ does not exist: ", "", text))


def _short(text: str) -> str:
    text = " ".join(text.replace("|", "/").split())
    return text if len(text) <= 100 else f"{text[:97]}..."
