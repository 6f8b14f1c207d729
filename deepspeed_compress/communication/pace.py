"""A cap on the rate of messages: each waits until those before it have had their time."""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.config import Communication
from deepspeed_compress.config.durations import bit_rate

__all__ = ["Pace", "make_pace"]


@dataclass
class Pace:
    """At most `rate` bytes a second leave this process, over any longer sequence of messages.

    A message that may go travels as fast as the link is: what is kept is the time between messages. Nothing is saved up
    while nothing is sent, so there are no bursts of several messages. (A token bucket whose burst is one message.)
    `clock`, `sleep`: in seconds.
    """

    rate: float
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    _free: float = float("-inf")

    def wait(self, size: int) -> None:
        """Until a message of `size` bytes may be sent, which it then is."""
        now = self.clock()
        begin = max(self._free, now)
        # From the time that is due: what a sleep takes longer does not add up. At once: another thread may come.
        self._free = begin + size / self.rate
        if begin > now:
            self.sleep(begin - now)


def make_pace(settings: Communication, group: ProcessGroup | None = None) -> Pace | None:
    """This process's share of what its host may send; None without a cap. Collective in `group` where there is one."""
    if settings.max_rate is None:
        return None
    return Pace(bit_rate(settings.max_rate) / 8 / _processes_of_host(group))


def _processes_of_host(group: ProcessGroup | None) -> int:
    """As the launcher says, or by the names of hosts."""
    given = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if given is not None:
        return int(given)
    names: list[str] = [""] * dist.get_world_size(group)
    dist.all_gather_object(names, socket.gethostname(), group=group)
    return names.count(socket.gethostname())
