"""A cap on the rate of messages. Each message waits until the previous ones have used up their time."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.config.models import Communication
from deepspeed_compress.config.numbers import bit_rate


@dataclass
class Pace:
    """Rate limiter: at most `rate` bytes per second leave this process, averaged over a longer sequence of messages.

    A message that may be sent travels at the full speed of the link; only the interval between messages is limited.
    Idle time earns no credit, so there are no bursts of several messages (a token bucket whose burst is one message).
    `clock` and `sleep` use seconds.
    """

    rate: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _free: float = float("-inf")
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def wait(self, size: int) -> None:
        """Block until a message of `size` bytes may be sent, and reserve its time."""
        # Not while sleeping, because other threads may call this meanwhile.
        with self._lock:
            now = self.clock()
            begin = max(self._free, now)
            # Counted from the due time, so that late wakeups do not add up.
            self._free = begin + size / self.rate
        if begin > now:
            self.sleep(begin - now)


def make_pace(settings: Communication, group: ProcessGroup | None = None) -> Pace | None:
    """Return the rate limiter for this process's share of its host's rate; None without a cap.

    If there is a cap, this may be a collective call in `group`.
    """
    if settings.max_rate is None:
        return None
    host = socket.gethostname()
    processes = launched_ranks_of_host() or gather_objects(host, group).count(host)
    return Pace(bit_rate(settings.max_rate) / 8 / processes)


def launched_ranks_of_host() -> int | None:
    """Return the number of ranks on this host, from the variables of torchrun or the deepspeed launcher, or None."""
    given = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    return int(given) if given else None
