"""Handling of SIGTERM, with which clusters reclaim machines: ranks note it, and stop together after a step."""

import os
import signal
import threading
import warnings
from collections.abc import Callable
from types import FrameType

from deepspeed_compress.config.models import Checkpointing
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.launcher.heartbeat import AGENT


def saves_on_sigterm(settings: Checkpointing) -> bool:
    """Return True if ranks save a checkpoint on SIGTERM: as configured, otherwise if an agent started them."""
    return AGENT in os.environ if settings.save_on_sigterm is None else settings.save_on_sigterm


class SigtermHandler:
    """SIGTERM handler of one engine.

    Attributes:
        received: True if this process has received SIGTERM since `listen`.
        is_listening: True while SIGTERM does not end this process.
    """

    def __init__(self) -> None:
        self.received = False
        self.is_listening = False
        self._tell: Callable[[bool], None] = lambda is_listening: None
        """Function called with the new value when `is_listening` changes."""
        self._former: SigtermHandler | None = None
        """Handler of an earlier engine, to which the signal is forwarded."""
        self._mask: set[int] = set()
        """Signals that were blocked before a fork."""

    def report_to(self, tell: Callable[[bool], None]) -> None:
        """Call `tell` with the value of `is_listening`, now and whenever it changes."""
        self._tell = tell
        tell(self.is_listening)

    def listen(self) -> None:
        """Keep SIGTERM from ending this process, and record it instead.

        A program that already handles SIGTERM keeps its handler, and an engine made outside the main thread cannot
        install one. A CompressWarning says so in both cases.
        """
        if self.is_listening:
            return
        handler = signal.getsignal(signal.SIGTERM)
        former = getattr(handler, "__self__", None)
        self._former = former if isinstance(former, SigtermHandler) else None
        if (handler is not signal.SIG_DFL and self._former is None) or not _in_main_thread():
            what = "the program handles SIGTERM itself, or makes its engine in a thread: no checkpoint is saved for it"
            warnings.warn(f"/deepspeed_compress/checkpointing/save_on_sigterm: {what}", CompressWarning, stacklevel=3)
            return
        # Announced before the handler is installed: whatever stops this rank must not rely on a signal that no longer
        # ends it.
        self.is_listening = True
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        self._tell(True)
        signal.signal(signal.SIGTERM, self._handle)

    def stop_listening(self) -> None:
        """Restore the previous handling of SIGTERM, unless the program has replaced it since."""
        if self.is_listening and _in_main_thread() and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._before())
        self.is_listening = False
        self._tell(False)

    def _before(self) -> "signal.Handlers | Callable[[int, FrameType | None], None]":
        """Return the previous handler, or the one before it if that no longer listens."""
        if self._former is None:
            return signal.SIG_DFL
        return self._former._handle if self._former.is_listening else self._former._before()

    def _before_fork(self) -> None:
        """Block SIGTERM until the new process (a DataLoader worker, for example) no longer has our handler."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if self.is_listening else ())

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _after_fork_in_child(self) -> None:
        """Let SIGTERM end the new process, as without this package: it takes no part in saving."""
        current = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
        if self.is_listening and isinstance(current, SigtermHandler):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self.is_listening = False
        self._after_fork()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        if self._former is not None:
            self._former._handle(number, frame)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()
