"""The process from which ranks are forked."""

import multiprocessing
import os
from multiprocessing.connection import Connection

from deepspeed_compress.launcher.fork_server import _Children


def ended(code: int) -> int:
    """Return the id of a process of its own group that has ended with `code`."""
    child = os.fork()
    if not child:
        os.setsid()
        os._exit(code)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return child


def reap(results: Connection) -> None:
    here, there = multiprocessing.Pipe()
    children = _Children(there)
    ended(0)
    children._living[ended(3)] = 5
    children._reap()
    results.send(here.recv())


def test_a_process_that_is_no_rank_is_not_reported() -> None:
    """Importing a library may start one."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=reap, args=(there,))
    process.start()
    there.close()
    assert here.recv() == (5, 3)
    process.join()
