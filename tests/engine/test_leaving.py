"""SIGTERM, of which every engine of a process hears."""

import os
import signal

from deepspeed_compress.engine.leaving import Leaving


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
