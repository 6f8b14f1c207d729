"""The harness of programs detects faults, and isolates them to the program that causes them."""

from datetime import timedelta

import torch
import torch.distributed as dist

from deepspeed_compress.errors import UnsupportedError
from tests.backends.deepspeed.programs.judge import found
from tests.backends.deepspeed.programs.program import Program, Run
from tests.backends.deepspeed.programs.ranks import run_tasks, tasks_of


def good(run: Run) -> None:
    run.keep("loss", torch.full((2,), float(run.rank)))


def one_bit_off(run: Run) -> None:
    run.keep("loss", 1.0 if run.section is None else torch.nextafter(torch.tensor(1.0), torch.tensor(2.0)))


def rank_1_apart(run: Run) -> None:
    run.keep("loss", 0.0 if run.section is None else float(run.rank))


def rank_1_raises(run: Run) -> None:
    """Rank 0 waits for two seconds. The other programs do not depend on how fast ranks are."""
    group = dist.new_group(timeout=timedelta(seconds=2))
    if run.section is not None and run.rank == 1:
        raise ValueError("on this rank alone")
    dist.all_reduce(torch.ones(1), group=group)


def refuses(run: Run) -> None:
    if run.section is not None:
        raise UnsupportedError("not this one")


def refuses_late(run: Run) -> None:
    run.steps += 1
    if run.section is not None:
        raise UnsupportedError("too late")


def not_finite(run: Run) -> None:
    run.keep("loss", 1.0 if run.section is None else float("nan"))


def test_every_kind_of_fault_is_detected(tmp_path):
    programs = [one_bit_off, rank_1_apart, rank_1_raises, refuses, refuses_late, not_finite, good]
    tasks = tasks_of([Program(program.__name__, program) for program in programs], 0, ("plain", "raw", "4 bits"))
    results = dict(run_tasks(tasks, tmp_path))
    outcomes = {(task.program.name, task.section): str(found(task, results)) for task in tasks}
    assert [outcome for (_, section), outcome in outcomes.items() if section == "plain"] == ["equal"] * len(programs)
    expected = {
        ("one_bit_off", "raw"): "differs: rank 0: 0 loss differs by 1.19e-07",
        ("one_bit_off", "4 bits"): "ranks equal",
        ("rank_1_apart", "raw"): "differs: rank 1: 0 loss differs by 1",
        ("rank_1_apart", "4 bits"): "differs: ranks 0, 1: 0 loss differs by 1",
        ("rank_1_raises", "raw"): "fails: ValueError: on this rank alone",
        ("refuses", "raw"): "refused: UnsupportedError: not this one",
        ("refuses_late", "raw"): "fails: UnsupportedError: too late",
        ("not_finite", "4 bits"): "differs: 0 loss is not finite",
        ("good", "raw"): "equal",
        ("good", "4 bits"): "ranks equal",
    }
    assert {key: outcomes[key] for key in expected} == expected
