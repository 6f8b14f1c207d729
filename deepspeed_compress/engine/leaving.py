"""SIGTERM, by which clusters take machines back: ranks hear of it, and end together after a step."""

import os
import signal
import threading
import warnings
from collections.abc import Callable
from types import FrameType

from deepspeed_compress.config import Checkpointing
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.services.agent.signs import AGENT

__all__ = ["Leaving", "saves_on_sigterm"]


def saves_on_sigterm(settings: Checkpointing) -> bool:
    """Whether SIGTERM has ranks save: it is said, or an agent has started them."""
    return AGENT in os.environ if settings.save_on_sigterm is None else settings.save_on_sigterm


class Leaving:
    """`asked`: SIGTERM has come to this process since `listen`."""

    def __init__(self) -> None:
        self.asked = False
        self.listens = False
        self.tell: Callable[[bool], None] = lambda listens: None
        """Hears when `listens` changes."""
        self._former: Leaving | None = None
        """Of an engine that was made before, and hears of it too."""
        self._mask: set[int] = set()
        """Signals that were blocked before a fork."""

    def listen(self) -> None:
        """From now on SIGTERM does not end this process. A program that has its own way with it keeps that, and a
        CompressWarning says so; so does one whose engine is not made in its main thread."""
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
        # Whoever waits for this rank to end must not ask one that no longer ends when asked.
        self.listens = True
        os.register_at_fork(
            before=self._before_fork, after_in_parent=self._after_fork, after_in_child=self._after_fork_in_child
        )
        self.tell(True)
        signal.signal(signal.SIGTERM, self._hear)

    def listen_no_more(self) -> None:
        """SIGTERM is as before, unless the program has taken it over since."""
        if self.listens and _in_main_thread() and signal.getsignal(signal.SIGTERM) == self._hear:
            signal.signal(signal.SIGTERM, self._before())
        self.listens = False
        self.tell(False)

    def _before(self) -> "signal.Handlers | Callable[[int, FrameType | None], None]":
        """Who heard of it before, and still listens."""
        if self._former is None:
            return signal.SIG_DFL
        return self._former._hear if self._former.listens else self._former._before()

    def _before_fork(self) -> None:
        """Keep SIGTERM back until the new process, such as a worker of a DataLoader, no longer has our handler."""
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if self.listens else ())

    def _after_fork(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def _after_fork_in_child(self) -> None:
        """Have the new process end by SIGTERM, as without us: it takes no part in saving."""
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
