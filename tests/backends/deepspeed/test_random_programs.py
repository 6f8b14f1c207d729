"""Random programs that DeepSpeed alone can train are trained alike, bit for bit if nothing is compressed."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.backends.deepspeed.programs.drawn import programs
from tests.backends.deepspeed.programs.judge import found, wanted
from tests.backends.deepspeed.programs.ranks import run_tasks, tasks_of
from tests.support.properties import properties

pytestmark = pytest.mark.sampled(4)

ALL = ("plain", "none", "raw", "4 bits")
# Ranks start once for a list of programs, and programs are printed in full, so shrinking would not help.
in_lists = settings(properties, phases=[Phase.generate])


def check(stage: int, drawn: list) -> None:
    tasks = tasks_of(drawn, stage, ALL)
    with tempfile.TemporaryDirectory() as directory:
        results = dict(run_tasks(tasks, Path(directory)))
    outcomes = {task: found(task, results) for task in tasks}
    able = {task.program for task, outcome in outcomes.items() if task.section == "plain" and outcome.kind == "equal"}
    assert len(able) >= len(drawn) / 2, "too few of the programs are right with DeepSpeed alone"
    wrong = [
        f"{task.section}: {outcome}\n{task.program.name}"
        for task, outcome in outcomes.items()
        if task.program in able and not outcome.fulfils(wanted(task))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@settings(in_lists, max_examples=1)
@given(data=st.data())
def test_random_programs(stage, data):
    check(stage, data.draw(st.lists(programs(stage), min_size=5, max_size=5)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@settings(in_lists, max_examples=3)
@given(data=st.data())
def test_many_random_programs(stage, data):
    check(stage, data.draw(st.lists(programs(stage), min_size=10, max_size=10)))
