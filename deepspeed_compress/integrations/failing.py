"""Error reports of ranks that an agent has started, arranged so that the actual cause stays visible.

When one rank fails, all others lose their connections to it, and each raises an error of its own. These tracebacks go
to files, so that they do not bury the cause. A configuration error, which no restart can cure, is one line.
"""

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed_compress.errors import ConfigError, SeamError, UnsupportedError
from deepspeed_compress.launcher.failures import EXIT_PERMANENT, RankError, record_error
from deepspeed_compress.launcher.heartbeat import AGENT

_LOST_PEER = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "socket closed",
    "remote process exited",
)
"""Texts in the errors of gloo, NCCL and torch's store on a rank that has lost a peer."""
_BACKENDS = ("gloo", "nccl")
"""Names in the errors of collectives. Programs have other connections, whose errors are causes of their own."""
_AFTER_FIRST = 1.0
"""Seconds that other ranks wait for the one with the cause to print and end first."""
_LAST_LINES, _LONGEST = 12, 3000
"""Number of the last lines of a traceback that the agent shows, and of their characters."""


@contextmanager
def report_failures() -> Iterator[None]:
    """Report configuration errors and lost peers on standard error, and exit, if an agent has started this process.

    All other exceptions are passed on. The agent is told of them, because it shows the first one.
    """
    try:
        yield
    except (ConfigError, SeamError, UnsupportedError) as error:
        if AGENT not in os.environ:
            raise
        _report_permanent(error)
        raise SystemExit(EXIT_PERMANENT) from error
    except Exception as error:
        if AGENT not in os.environ:
            raise
        text = "".join(traceback.format_exception(error))
        file = _written(text)
        if not _has_lost_a_peer(error) or not file:
            lines = "\n".join(text.splitlines()[-_LAST_LINES:])[-_LONGEST:]
            record_error(Path(os.environ[AGENT]), RankError(time.time(), int(_rank()), file, lines))
            raise
        print(
            f"ds-compress: rank {_rank()} has lost another rank; its traceback is in {file}",
            file=sys.stderr,
            flush=True,
        )
        time.sleep(_AFTER_FIRST)
        raise SystemExit(1) from error


def _report_permanent(error: Exception) -> None:
    if _rank() != "0":
        time.sleep(_AFTER_FIRST)
    print(f"ds-compress: error: rank {_rank()}: {error}", file=sys.stderr, flush=True)


def _has_lost_a_peer(error: BaseException) -> bool:
    """Return True if a collective or torch's store has lost its connection to another rank."""
    text = str(error).lower()
    ours = type(error).__module__ == "torch.distributed" or any(name in text for name in _BACKENDS)
    return isinstance(error, RuntimeError) and ours and any(sign in text for sign in _LOST_PEER)


def _written(text: str) -> str:
    """Write `text` to a new file that only this user can read, and return its path; "" if the disk is full."""
    name = ""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f"ds_compress_rank_{_rank()}_", suffix=".txt")
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except OSError:
        with suppress(OSError):
            os.unlink(name)
        return ""
    return name


def _rank() -> str:
    return os.environ.get("RANK", "0")
