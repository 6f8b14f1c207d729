"""Trials as processes: how they end, and what they leave behind."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.tools.tune import trials
from deepspeed_compress.tools.tune.search import Result, Rung
from deepspeed_compress.tools.tune.space import Candidate
from deepspeed_compress.tools.tune.trials import Trials
from tests.support.processes import wait_until_gone
from tests.support.transport import until

pytestmark = pytest.mark.sampled(3)

RUNG = Rung(1, 30, 0.01, 0.0)
CANDIDATE = Candidate("int4", {"gradients": {"bits": 4}})


DAY = 86_400.0


class Clock:
    """Stand-in for the module `time` in which a day passes once the program of a trial has written a file."""

    sleep = staticmethod(time.sleep)

    def __init__(self, file: Path) -> None:
        self._file = file

    def monotonic(self) -> float:
        return time.monotonic() + 2 * DAY * (self._file.is_file() and self._file.stat().st_size > 0)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a trial with a Python program as its process, and returns the result.

    The time of the trial is up once a file exists, whose name is its second argument.
    """
    made = Trials({"custom": 1}, Path("ds.json"), "none", ["train.py", "--deepspeed", "ds.json"], tmp_path / "out")

    def run(program: str, until: str = "") -> Result:
        def command(launcher: str, arguments: list[str], runner: str) -> list[str]:
            assert (launcher, runner) == ("none", "deepspeed_compress.tools.tune.rank")
            return [sys.executable, "-c", program, *arguments]

        monkeypatch.setattr("deepspeed_compress.integrations.launch.launch_command", command)
        if until:
            monkeypatch.setattr(trials, "time", Clock(made.directory(CANDIDATE, RUNG) / until))
        return made.run(CANDIDATE, RUNG, DAY)

    run.trials = made  # type: ignore[attr-defined]
    return run


WRITES = """
import json, pathlib, sys
config = pathlib.Path(sys.argv[3])
task = json.loads(config.read_text())["deepspeed_compress_trial"]
lines = [{"step": n, "loss": 2.0, "step_ms": 5.0, "bytes": 7} for n in range(1, task["steps"] + 1)]
(config.parent / "trial.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
"""


def test_a_trial_that_finishes(start: Any) -> None:
    result = start(WRITES)
    assert (result.status, result.loss, result.step_ms, result.bytes) == ("finished", 2.0, 5.0, 7.0)
    assert start.trials.find(CANDIDATE, RUNG) == result
    assert start.trials.find(CANDIDATE, Rung(1, 31, 0.01, 0.0)) is None
    assert start.trials.find(Candidate("int4", {"gradients": {"bits": 8}}), RUNG) is None
    directory = start.trials.directory(CANDIDATE, RUNG)
    assert directory.name == "int4-30steps"
    # It contains the passwords of the user's file, which the processes of a trial need.
    assert (directory / "ds_config.json").stat().st_mode & 0o777 == 0o600
    assert sorted(path.name for path in directory.iterdir()) == [
        "cmd.txt",
        "ds_config.json",
        "result.json",
        "stdout.log",
        "trial.jsonl",
    ]


FAILS = r"""
import sys
print("beginning", flush=True)
sys.stderr.write("[rank1]: Traceback ...\n\x1b[31m[rank1]: torch.OutOfMemoryError: CUDA out of memory\x1b[0m\n")
print("[ERROR] [launch.py] exits with return code = 1", flush=True)
sys.exit(1)
"""


def test_a_trial_that_fails_leaves_the_end_of_its_log(start: Any) -> None:
    result = start(FAILS)
    assert (result.status, result.error) == ("failed", "torch.OutOfMemoryError: CUDA out of memory")
    assert sorted(result.tail) == sorted(
        [
            "beginning",
            "[rank1]: Traceback ...",
            "[rank1]: torch.OutOfMemoryError: CUDA out of memory",
            "[ERROR] [launch.py] exits with return code = 1",
        ]
    )
    assert start.trials.find(CANDIDATE, RUNG) is None


LISTS = r"""
import sys
sys.stderr.write("[rank0]: Traceback ...\n")
sys.stderr.write("[rank0]: pkg.errors.ConfigError: 2 problems in the DeepSpeed configuration:\n")
sys.stderr.write("[rank0]:   - /a: wrong. Write b.\n[rank0]:   - /c: wrong.\n[rank0]:   - /a: wrong. Write b.\n")
print("[ERROR] [launch.py] exits with return code = 1 - bad", flush=True)
sys.exit(1)
"""


def test_the_problems_that_an_error_lists_are_part_of_it(start: Any) -> None:
    wanted = "pkg.errors.ConfigError: 2 problems in the DeepSpeed configuration: - /a: wrong. Write b. - /c: wrong."
    assert start(LISTS).error == wanted


@pytest.mark.parametrize("end", ["raise SystemExit(1)", "import os; os.abort()", "import time; time.sleep(600)"])
def test_figures_count_however_the_script_ends_after_them(end: str, start: Any) -> None:
    assert start(WRITES + end, until="trial.jsonl").status == "finished"


HANGS = """
import pathlib, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(pathlib.Path(sys.argv[3]).parent / "child").write_text(str(child.pid))
time.sleep(600)
"""


def test_a_trial_whose_time_is_up_ends_with_everything_that_it_started(start: Any) -> None:
    result = start(HANGS, until="child")
    assert (result.status, result.error) == ("stopped", "time was up")
    wait_until_gone(int((start.trials.directory(CANDIDATE, RUNG) / "child").read_text()))


TUNES = """
import signal, sys
# What a shell starts in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from pathlib import Path
from deepspeed_compress.tools.bench.hosts import signals_as_exceptions
from deepspeed_compress.tools.tune import trials
with signals_as_exceptions():
    trials._wait([sys.executable, "-c", Path(sys.argv[1]).read_text(), "", "", sys.argv[2] + "/x"],
                 Path(sys.argv[2]), float("inf"))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_trial_too(number: signal.Signals, tmp_path: Path) -> None:
    program = tmp_path / "hangs.py"
    program.write_text(HANGS)
    process = subprocess.Popen(
        [sys.executable, "-c", TUNES, str(program), str(tmp_path)], stderr=subprocess.DEVNULL, env={**os.environ}
    )
    child = tmp_path / "child"
    until(lambda: child.is_file() and child.read_text() != "")
    process.send_signal(number)
    assert process.wait(120) != 0
    wait_until_gone(int(child.read_text()))


def test_a_trial_that_says_nothing(start: Any) -> None:
    assert start("raise SystemExit(7)").error == "exit code 7, and no figures"
    assert start("pass").error == "exit code 0, and no figures"


def test_files_of_an_earlier_trial_are_removed(start: Any) -> None:
    start(WRITES)
    assert start("pass").status == "failed"


IGNORES = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
(pathlib.Path(sys.argv[3]).parent / "ignores").write_text("SIGTERM")
time.sleep(600)
"""


def test_a_trial_that_does_not_end_is_killed(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "PATIENCE", 0.5)
    result = start(IGNORES, until="ignores")
    assert result.status == "stopped"
