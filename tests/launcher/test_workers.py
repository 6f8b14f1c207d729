"""The processes of ranks: how they end, and what they leave behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from deepspeed_compress.launcher.workers import Workers
from tests.support.processes import alive
from tests.support.transport import until

RUN = [sys.executable, "-m", "deepspeed_compress.integrations.run"]
AGENT = f"""
import sys, time
from deepspeed_compress.launcher.workers import Workers
Workers([*{RUN!r}, sys.argv[1]]).start({{0: {{"RANK": "0", "WORLD_SIZE": "1"}}}})
time.sleep(1000)
"""
RANK = """
import os, pathlib, time
assert "DS_COMPRESS_PARENT" not in os.environ
pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
time.sleep(1000)
"""


def test_a_rank_that_ends_takes_its_children_with_it(tmp_path: Path) -> None:
    child = tmp_path / "child"
    workers = Workers(["bash", "-c", f'sleep 1000 & echo $! > {child}; read -r line; exit "$CODE"'])
    workers.start({5: {"CODE": "3"}})
    ended: dict[int, int] = {}
    until(lambda: ended.update(workers.ended()) or ended)
    # Standard input is empty, so a rank that reads it does not wait.
    assert (ended, workers.living) == ({5: 3}, frozenset())
    until(lambda: not alive(int(child.read_text())))


def test_signals_reach_the_ranks_that_are_named() -> None:
    workers = Workers(["sleep", "1000"])
    workers.start({0: {}, 1: {}})
    workers.signal(signal.SIGTERM, [1])
    ended: dict[int, int] = {}
    until(lambda: ended.update(workers.ended()) or ended)
    assert (ended, workers.living) == ({1: -signal.SIGTERM}, frozenset({0}))
    workers.close()
    assert workers.ended() == {0: -signal.SIGKILL}


def test_a_rank_ends_with_its_agent(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANK)
    agent = subprocess.Popen([sys.executable, "-c", AGENT, str(tmp_path / "train.py")], env=os.environ)
    file = tmp_path / "pid"
    until(lambda: file.is_file() and bool(file.read_text()))
    assert alive(int(file.read_text()))
    agent.kill()
    agent.wait()
    until(lambda: not alive(int(file.read_text())))
