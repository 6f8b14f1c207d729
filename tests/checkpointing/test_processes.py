"""Properties that a writer process inherits from its rank, and those that it changes."""

import os
import signal
from multiprocessing import Pipe
from pathlib import Path

import pytest

from deepspeed_compress.checkpointing.memory_copies import Receiver
from deepspeed_compress.checkpointing.processes import fork_from_rank
from deepspeed_compress.checkpointing.writer import Writer


def test_signals_to_the_group_spare_it_and_its_priority_counts_among_those_of_the_rank() -> None:
    """Linux (sched_autogroup) compares priorities only within a session."""
    here, there = Pipe()
    child = fork_from_rank(lambda: there.send((os.getpgid(0), os.getsid(0), os.nice(0))), {there.fileno()})
    assert here.poll(30)
    group, session, priority = here.recv()
    os.waitpid(child, 0)
    assert group == child
    assert session == os.getsid(0)
    assert priority == 19


@pytest.mark.parametrize("reaps", [True, False])
def test_processes_that_the_program_reaps_can_be_closed(reaps: bool, tmp_path: Path) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL if reaps else signal.SIG_IGN)
    try:
        for one in (Writer(), Receiver(tmp_path, b"key" * 11)):
            if reaps:
                os.kill(one.process, signal.SIGKILL)
                os.waitpid(one.process, 0)
            one.close()
    finally:
        signal.signal(signal.SIGCHLD, before)
