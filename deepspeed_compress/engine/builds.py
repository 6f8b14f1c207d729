"""Locks of torch's extension builds that nobody holds any more: whoever loads the extension waits for ever, silently.

DeepSpeed builds its operators with torch.utils.cpp_extension.load, whose lock is a file that exists (`FileBaton`). A
build that is killed leaves it behind. No torch here.
"""

import contextlib
import os
import shlex
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path

from deepspeed_compress.errors import CompressWarning

__all__ = ["abandoned_locks", "warn_of_abandoned_locks"]

GRACE = 10.0
"""Seconds for which a lock is nobody's business: every load takes it for a moment."""


def warn_of_abandoned_locks(environment: Mapping[str, str] = os.environ) -> None:
    """CompressWarning for each abandoned lock, with what to type, in one process of each machine. Nothing is removed:
    another machine or container that shares the directory may be building."""
    if environment.get("LOCAL_RANK", "0") != "0":
        return
    # A look that fails, as where processes end meanwhile, must not stop one rank.
    with contextlib.suppress(OSError, RuntimeError):
        for lock in abandoned_locks(environment):
            warnings.warn(_told(lock), CompressWarning, stacklevel=2)


def abandoned_locks(environment: Mapping[str, str] = os.environ) -> list[Path]:
    """Locks that no process of this machine holds, and that are older than any load takes to begin."""
    locks = [lock for lock in _locks(environment) if _age(lock) > GRACE]
    held = set(_open_files()) if locks else set()
    return [lock for lock in locks if os.path.realpath(lock) not in held]


def _locks(environment: Mapping[str, str]) -> Iterator[Path]:
    """As torch has it: a directory for each extension, by default below one for each version."""
    given = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    yield from sorted(Path(given).glob("*/lock") if given else Path(cache, "torch_extensions").glob("*/*/lock"))


def _age(lock: Path) -> float:
    """In seconds; 0 for one that is gone by now."""
    with contextlib.suppress(OSError):
        return time.time() - lock.stat().st_mtime
    return 0.0


def _open_files() -> Iterator[str]:
    """Files that processes which we may look into have open: the holder of a lock does, until it gives it back."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            yield os.readlink(link)


def _told(lock: Path) -> str:
    return (
        f"{lock}: is left of a build that was ended: it is {_age(lock) / 60:,.0f} minutes old, and no process of this "
        f"machine holds it. Whoever loads {lock.parent.name} waits for it for ever. Unless another machine or "
        f"container that shares the directory builds it now, type: rm {shlex.quote(str(lock))}"
    )
