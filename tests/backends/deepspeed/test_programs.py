"""Programs that are right with DeepSpeed are right with the package, or are refused by name before the first step."""

import pytest

from tests.backends.deepspeed.programs import adapters
from tests.backends.deepspeed.programs.catalogue import PROGRAMS
from tests.backends.deepspeed.programs.judge import found, wanted
from tests.backends.deepspeed.programs.nodes import PROGRAMS_ON_NODES, PROGRAMS_ON_RAW_NODES
from tests.backends.deepspeed.programs.ranks import OTHER_SECTIONS, SECTIONS, run_tasks, tasks_of


def unexpected(directory, stage: int, sections: tuple[str, ...], programs=PROGRAMS) -> list[str]:
    """Return every program of the stage with an unexpected outcome, and this outcome."""
    tasks = tasks_of(programs, stage, sections)
    results = dict(run_tasks(tasks, directory))
    outcomes = {task: found(task, results) for task in tasks}
    return [
        f"{task.program.name}, {task.section}: {outcome}"
        for task, outcome in outcomes.items()
        if not outcome.fulfils(wanted(task))
    ]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1])
def test_uncompressed_exchange(tmp_path, stage):
    assert unexpected(tmp_path, stage, ("plain", "raw")) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_section(tmp_path, stage):
    """Covers every section except that of the test above."""
    sections = tuple(name for name in SECTIONS if (stage, name) != (1, "raw") and not name.endswith("nodes"))
    assert unexpected(tmp_path, stage, sections) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_sharded_within_nodes(tmp_path, stage):
    """Near DeepSpeed's on all ranks, because sums are added in another order."""
    assert unexpected(tmp_path, stage, ("plain", "nodes"), PROGRAMS_ON_NODES) == []


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_nodes_exchange_during_backward(tmp_path, stage):
    assert unexpected(tmp_path, stage, ("plain", "raw nodes"), PROGRAMS_ON_RAW_NODES) == []


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_adapters_with_other_sections(tmp_path, stage):
    assert unexpected(tmp_path, stage, ("plain", *OTHER_SECTIONS), adapters.PROGRAMS) == []
