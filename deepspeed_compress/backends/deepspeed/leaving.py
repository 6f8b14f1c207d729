"""Handling of SIGTERM, with which clusters reclaim machines: ranks note it, and stop together after a step."""

import os
import signal
import threading
import warnings
from collections.abc import Callable
from types import FrameType

from deepspeed_compress.config import Checkpointing
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.launcher.heartbeat import AGENT

__all__ = ["Leaving", "saves_on_sigterm"]


def saves_on_sigterm(settings: Checkpointing) -> bool:
    """Return True if ranks save a checkpoint on SIGTERM: as configured, otherwise if an agent started them."""
    return AGENT in os.environ if settings.save_on_sigterm is None else settings.save_on_sigterm


class Leaving:
    """SIGTERM handler of one engine.

    Attributes:
        asked: True if this process has received SIGTERM since `listen`.
        listens: True while SIGTERM does not end this process.
    """

    def __init__(self) -> None:
        self.asked = False
        self.listens = False
        self._tell: Callable[[bool], None] = lambda listens: None
        """Function called with the new value when `listens` changes."""
        self._former: Leaving | None = None
        """Handler of an earlier engine, to which the signal is forwarded."""
        self._mask: set[int] = set()
        """Signals that were blocked before a fork."""

    def report_to(self, tell: Callable[[bool], None]) -> None:
        """Call `tell` with the value of `listens`, now and whenever it changes."""
        self._tell = tell
        tell(self.listens)

    def listen(self) -> None:
        """Keep SIGTERM from ending this process, and record it instead.

        A program that already handles SIGTERM keeps its handler, and an engine made outside the main thread cannot
        install one. A CompressWarning says so in both cases.
        """
        if self.listens:
            return
        handler = signal.getsignal(signal.SIGTERM)
        former = getattr(handler, "__self__", None)
        self._former = former if isinstance(former, Leaving) else None
        if (handler is not signal.SIG_DFL and self._former is None) or not _in_main_thread():
            what = (
                "the program handles SIGTERM itself, or makes its engine in a thread: it saves by itself, or not at all"
            )
            warnings.warn(f"/deepspeed_compress/checkpointing/save_on_sigterm: {what}", CompressWarning, stacklevel=3)
            return
        # Announced before the handler is installed: whatever stops this rank must not rely on a signal that no longer
        # ends it.
        self.listens = True
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        self._tell(True)
        signal.signal(signal.SIGTERM, self._hear)

    def listen_no_more(self) -> None:
        """Restore the previous handling of SIGTERM, unless the program has replaced it since."""
        if self.listens and _in_main_thread() and signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, self._before())
        self.listens = False
        self._tell(False)

    def _before(self) -> "signal.Handlers | Callable[[int, FrameType | None], None]":
        """Return the previous handler, or the one before it if that no longer listens."""
        if self._former is None:
            return signal.SIG_DFL
        return self._former._hear if self._former.listens else self._former._before()

    def _before_fork(self) -> None:
        """Block SIGTERM until the new process (a DataLoader worker, for example) no longer has our handler."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if self.listens else ())

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _after_fork_in_child(self) -> None:
        """Let SIGTERM end the new process, as without this package: it takes no part in saving."""
        if self.listens and isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Leaving):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.listens = False
        self._after_fork()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        if self._former is not None:
            self._former._hear(number, frame)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
