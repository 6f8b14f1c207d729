"""What the terminal shows during a search."""

import io

from rich.console import Console

from deepspeed_compress.tools.tune.display import Display
from deepspeed_compress.tools.tune.halving import Result, plan
from deepspeed_compress.tools.tune.search import Budget
from tests.tune.results import BASE, candidates


def test_the_bar_names_rung_candidate_and_time_left() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=140)
    [none, int4] = candidates("int4")
    rungs = plan(10, 2, 0.01)
    with Display(console, 1, rungs, Budget(600)) as display:
        display.begin(none, rungs[0])
        display.end(BASE, rungs[0], again=True)
        display.begin(int4, rungs[0])
        display.steps(5)
        display._progress.refresh()
        [task] = display._progress.tasks
        # Two trials of 10 steps and two of 30: one and a half of the first are done.
        assert (task.completed, task.total) == (15, 80)
        display.end(Result("int4", "failed", error="[no]"), rungs[0], again=False)
        display.rung_over(rungs[0], 0)
        assert (task.completed, task.total) == (20, 20)
    text = out.getvalue()
    assert "rung 1/2  int4" in text
    assert "of 10 min" in text
    assert "rung 1, 10 steps  none                      100.0 ms a step, loss 2.0000, from before" in text
    assert "int4                  failed: [no]" in text


def test_without_a_budget_none_is_shown() -> None:
    out = io.StringIO()
    rungs = plan(10, 1, 0.01)
    with Display(Console(file=out, force_terminal=True, width=140), 1, rungs, Budget(None)) as display:
        display.begin(candidates("int4")[1], rungs[0])
        display._progress.refresh()
    assert " min" not in out.getvalue()
