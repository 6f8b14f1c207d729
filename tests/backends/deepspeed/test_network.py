"""A link that becomes slow during a run and recovers, on hosts whose links are really limited."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.tools.bench.hosts import Cluster
from tests.support.hosts import measures_links

PROGRAM = str(Path(__file__).with_name("network_rank.py"))
STEPS, FALLS, RISES = 150, 40, 80
"""Total number of steps, and the steps after which the rate falls and recovers."""
FIXED = {"gradients": {"bits": 8}, "weights": {"bits": 4}}
ADAPTIVE = {
    **FIXED,
    # Early in training, 4 bits are predicted to cost a tenth more steps, so the link must save more than that.
    "adaptive": {"probe_every": 20, "max_error": 0.6, "candidates": [{"bits": 4}, {"bits": 2}]},
}


def live(section: dict[str, Any], rates: dict[int, str]) -> list[dict[str, Any]]:
    """Return the final lines of the ranks on two hosts. The rate of links changes after the steps in `rates`."""
    with Cluster(2, "1gbit") as cluster:

        def follow(line: str) -> None:
            step = int(line.split()[1]) if line.startswith("done ") else None
            if step in rates:
                cluster.set_rate(rates[step])

        command = [sys.executable, PROGRAM, str(STEPS), json.dumps(section)]
        run = cluster.run(command, {"PYTHONPATH": str(Path(__file__).parents[3])}, timeout=400, on_line=follow)
    assert run.failure is None, run.outputs[0][-3000:]
    return [json.loads(output.strip().splitlines()[-1]) for output in run.outputs]


def bits(settings: str) -> int:
    return 32 if settings == "none" else int(settings.rpartition("bits=")[2])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@measures_links
def test_settings_follow_a_link_that_becomes_slow_and_recovers() -> None:
    # Other load on the machine may hide the effect of the link, but hardly three times.
    events = []
    for _ in range(3):
        first, second = live(ADAPTIVE, {FALLS: "20mbit", RISES: "1gbit"})
        assert first["events"] == second["events"]
        assert first["settings"] == second["settings"]
        assert {kind for _, kind, _, _ in first["events"]} <= {"adapt"}
        sizes = [bits(settings) for settings in first["settings"]]
        events.append(first["events"])
        if sizes[FALLS - 1] > min(sizes[FALLS:RISES]) < sizes[-1]:
            break
    else:
        pytest.fail(f"settings did not follow the link: {events}")
    steady, _ = live(FIXED, {})
    assert first["loss"] == pytest.approx(steady["loss"], rel=0.01)
