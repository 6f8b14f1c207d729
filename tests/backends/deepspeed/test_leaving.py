"""SIGTERM, of which every engine of a process hears."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator

import pytest

from deepspeed_compress.backends.deepspeed.leaving import Leaving


def test_an_engine_that_is_made_later_hears_too(recwarn):
    """Nobody need have ended the first one, as Trainer does not when it trains again."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    first, second, third = Leaving(), Leaving(), Leaving()
    try:
        first.listen()
        second.listen()
        third.listen()
        assert [str(one.message) for one in recwarn] == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert (first.asked, second.asked, third.asked) == (True, True, True)
        second.listen_no_more()
        third.listen_no_more()
        first.asked = False
        os.kill(os.getpid(), signal.SIGTERM)
        assert first.asked
        first.listen_no_more()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.fixture
def listening() -> Iterator[Leaving]:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    leaving = Leaving()
    leaving.listen()
    yield leaving
    leaving.listen_no_more()
    signal.signal(signal.SIGTERM, before)


def test_processes_that_are_forked_end_when_they_are_asked(listening: Leaving) -> None:
    """Such as workers of a DataLoader, which their parent ends by SIGTERM."""
    helper = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,), daemon=True)
    helper.start()
    helper.terminate()
    helper.join(20)
    assert helper.exitcode == -signal.SIGTERM
    assert not listening.asked


def of_an_engine_in_a_fork() -> None:
    own = Leaving()
    own.listen()
    os.kill(os.getpid(), signal.SIGTERM)
    assert own.asked
    own.listen_no_more()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_engine_that_is_made_in_a_fork_hears_alone(listening: Leaving) -> None:
    helper = multiprocessing.get_context("fork").Process(target=of_an_engine_in_a_fork)
    helper.start()
    helper.join(20)
    assert helper.exitcode == 0
    assert not listening.asked
