"""Whether a process that something else started has ended."""

import time
from pathlib import Path

__all__ = ["alive", "wait_until_gone"]


def alive(pid: int) -> bool:
    """Not gone, nor waiting for somebody to hear that it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    """Who kills a process that is not its child cannot wait for its end, which takes a moment.

    Raises:
        AssertionError: after ten seconds.
    """
    deadline = time.monotonic() + 10
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(pid)
