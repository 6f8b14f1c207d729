"""The program that starts training, an endpoint and runners: it leaves no process behind, and shows why it failed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.agents import PATIENCE

ROOT = Path(__file__).parents[2]
MARK = "TRAIN_AGENTS_TEST"
"""Variable of the environment by which all processes of a run are found."""
FAMILY = """
import os, pathlib, time
from deepspeed_compress.launcher.workers import die_with
os.register_at_fork(after_in_child=lambda: die_with(os.getppid()))
os.fork() and os.fork()
pathlib.Path(f"ready-{os.getpid()}").touch()
time.sleep(1000)
"""
"""An agent with two runners."""
SLEEP = "import os, pathlib, time; pathlib.Path(f'ready-{os.getpid()}').touch(); time.sleep(1000)"
RANK = f"import os; from deepspeed_compress.launcher.workers import die_with; die_with(os.getppid())\n{SLEEP}"
PROCESSES = 1 + 3 + 1
"""The endpoint, the agent with two runners, and a rank."""


def marked(mark: str) -> set[int]:
    """Return the processes of a run."""
    found = set()
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (directory / "environ").read_bytes().split(b"\0"):
                found.add(int(directory.name))
        except OSError:
            continue
    return found


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def running(directory: Path, **programs: str) -> Iterator["subprocess.Popen[str]"]:
    """Run the program, with other programs in place of its own ones."""
    for name, text in ({"sampler": SLEEP, "agent": FAMILY, "learn": RANK} | programs).items():
        file = directory / "fakes" / "launch" / "agents" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    (directory / "run" / "model").mkdir(parents=True)
    # The packages `launch` and `launch.agents` have parts in both directories.
    environment = os.environ | {MARK: str(directory), "PYTHONPATH": f"{directory / 'fakes'}:{ROOT}"}
    command = [sys.executable, "-m", "launch.train_agents", "--output-dir", str(directory / "run"), "--resume"]
    with subprocess.Popen(
        [*command, "--ranks", "1"], cwd=directory, env=environment, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()
            for left in marked(str(directory)):
                os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        signal.SIGKILL,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_no_process_outlives_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    with running(tmp_path) as process:
        wait_until(lambda: len(list(tmp_path.glob("ready-*"))) == PROCESSES)
        process.send_signal(number)
        process.wait(PATIENCE)
        wait_until(lambda: not marked(str(tmp_path)))


def test_no_process_outlives_a_training_that_fails_and_its_first_error_is_shown(tmp_path: Path) -> None:
    with running(tmp_path, learn="raise ConnectionError('the store of weights is away')") as process:
        _, errors = process.communicate(timeout=PATIENCE)
        assert process.returncode == 1
        assert "ConnectionError: the store of weights is away" in errors
        wait_until(lambda: not marked(str(tmp_path)))


@pytest.mark.slow
def test_training_does_not_wait_for_an_endpoint_that_has_failed(tmp_path: Path) -> None:
    with running(tmp_path, sampler="raise ImportError('no uvicorn')") as process:
        _, errors = process.communicate(timeout=PATIENCE)
        assert "training was ended, because endpoint ended with exit code 1: ImportError: no uvicorn" in errors
        wait_until(lambda: not marked(str(tmp_path)))
