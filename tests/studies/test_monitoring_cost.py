"""The program that measures what monitoring costs, with two ranks on the CPU."""

import re
from pathlib import Path

import pytest

from tests.support.processes import run_python

CLOCKS = ("time", "processor")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.serial
def test_the_cost_of_every_setting_is_measured(port: str) -> None:
    """Other work on the machine may disturb a measurement, but hardly three."""
    assert any(0 < ends[0] < ends[2] for ends in (milliseconds_at_the_end(port) for _ in range(3)))


def milliseconds_at_the_end(port: str) -> list[float]:
    """Return the milliseconds at the end of a step, with every setting."""
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", port)
    done = run_python(*launcher, "-m", "launch.studies.monitoring_cost", "--steps", "10", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stdout.splitlines() if ", this costs " in line]
    names = ["nothing", "monitor every 10", "monitor every 1", "schedule", "guard", "adaptive, measured every 10"]
    assert [line.split(": step")[0] for line in lines] == [f"{clock}: {name}" for clock in CLOCKS for name in names]
    return [float(re.search(r"its end ([\d.]+) ms", line)[1]) for line in lines]  # type: ignore[index]
