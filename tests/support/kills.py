"""Ranks that die in the middle of training, at a step and not after a time, so no machine is too fast or too slow."""

import os
import signal
import threading
import time
from dataclasses import dataclass

STEP_SECONDS = 0.01
"""Least duration of a step in a job with a kill, so that the kill may fall into one of several steps."""


@dataclass(frozen=True)
class Kill:
    """Death of a rank some seconds after it began a step, counted from one."""

    rank: int
    step: int
    seconds: float

    def begin_step(self, rank: int, step: int) -> None:
        """Kill this rank soon if it is time. To be called on every rank before every step."""
        if (rank, step) == (self.rank, self.step):
            threading.Timer(self.seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()
        time.sleep(STEP_SECONDS)

    def end_training(self, rank: int) -> None:
        """Wait for the death of this rank if it is the one that dies, so that no job ends before it."""
        while rank == self.rank:
            signal.pause()
