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
from contextlib import contextmanager
from pathlib import Path

from deepspeed_compress.errors import ConfigError, SeamError, UnsupportedError
from deepspeed_compress.launcher.failures import EXIT_PERMANENT
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
_AFTER_FIRST = 1.0
"""Seconds that other ranks wait for rank 0 to print first."""


@contextmanager
def report_failures() -> Iterator[None]:
    """Report configuration errors and lost peers on standard error, and exit, if an agent has started this process.

    All other exceptions are passed on.
    """
    try:
        yield
    except (ConfigError, SeamError, UnsupportedError) as error:
        if AGENT not in os.environ:
            raise
        _report_permanent(error)
        raise SystemExit(EXIT_PERMANENT) from error
    except Exception as error:
        if AGENT not in os.environ or not _has_lost_a_peer(error):
            raise
        _report_lost_peer(error)
        raise SystemExit(1) from error


def _report_permanent(error: Exception) -> None:
    if _rank() != "0":
        time.sleep(_AFTER_FIRST)
    print(f"ds-compress: error: rank {_rank()}: {error}", file=sys.stderr, flush=True)


def _has_lost_a_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, RuntimeError | OSError) and any(sign in text for sign in _LOST_PEER)


def _report_lost_peer(error: BaseException) -> None:
    file = Path(tempfile.gettempdir(), f"ds_compress_rank_{_rank()}_{os.getpid()}.txt")
    file.write_text("".join(traceback.format_exception(error)), encoding="utf-8", errors="backslashreplace")
    print(f"ds-compress: rank {_rank()} has lost another rank; its traceback is in {file}", file=sys.stderr, flush=True)


def _rank() -> str:
    return os.environ.get("RANK", "0")
