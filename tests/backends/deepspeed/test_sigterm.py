"""SIGTERM, which must reach every engine of a process."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest

from deepspeed_compress.backends.deepspeed.sigterm import SigtermHandler


def test_the_handlers_of_all_engines_receive_the_signal(recwarn):
    """A program may keep its first engine, as Trainer does when it trains again."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    first, second, third = SigtermHandler(), SigtermHandler(), SigtermHandler()
    try:
        first.listen()
        second.listen()
        third.listen()
        assert [str(one.message) for one in recwarn] == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert (first.received, second.received, third.received) == (True, True, True)
        second.stop_listening()
        third.stop_listening()
        first.received = False
        os.kill(os.getpid(), signal.SIGTERM)
        assert first.received
        first.stop_listening()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def listening() -> Iterator[SigtermHandler]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    handler = SigtermHandler()
    handler.listen()
    yield handler
    handler.stop_listening()
    signal.signal(signal.SIGTERM, before)


def test_sigterm_ends_forked_processes(listening: SigtermHandler) -> None:
    """A DataLoader ends its workers by SIGTERM."""
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    helper.start()
    helper.terminate()
    helper.join(20)
    assert helper.exitcode == -signal.SIGTERM
    assert not listening.received


def listen_in_a_fork() -> None:
    own = SigtermHandler()
    own.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert own.received
    own.stop_listening()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_only_the_handler_in_a_fork_receives_the_signal(listening: SigtermHandler) -> None:
    helper = multiprocessing.get_context("fork").Process(target=listen_in_a_fork)
    helper.start()
    helper.join(20)
    assert helper.exitcode == 0
    assert not listening.received
