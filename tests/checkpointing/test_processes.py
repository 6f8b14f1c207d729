"""Properties that a writer process inherits from its rank, and those that it changes."""

import os
from multiprocessing import Pipe

from deepspeed_compress.checkpointing.processes import fork_from_rank


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
