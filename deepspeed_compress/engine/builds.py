"""Locks of torch's extension builds that nobody holds any more: a program that loads the extension waits forever.

DeepSpeed builds its operators with torch.utils.cpp_extension.load, whose lock is a file that exists (`FileBaton`). A
build that is killed leaves it behind. A lock counts as abandoned if no process of this machine has the file open, as a
builder does until it is done, and none works in its directory, as compilers do. Another machine or container that
shares the directory cannot be seen, so only locks that are older than any build takes are removed without being asked.
No torch here.

`python -m deepspeed_compress.engine.builds [--clear-locks]` tells of abandoned locks, or removes them all.
"""

import contextlib
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from deepspeed_compress.errors import CompressWarning

__all__ = ["abandoned_locks", "clear_locks", "print_locks", "warn_of_abandoned_locks"]

GRACE = 10.0
"""Seconds for which a lock is nobody's business: every load takes it for a moment."""
STALE = 2 * 3600.0
"""Seconds that no build of an operator takes, on whatever machine."""


def print_locks(clear: bool = False) -> None:
    """Tell on standard error of abandoned locks, and remove stale ones; with `clear` all of them. Call it before
    anything loads operators of DeepSpeed."""
    clear_locks(clear, _print)


def _print(text: str) -> None:
    print(f"ds-compress: {text}", file=sys.stderr, flush=True)


def clear_locks(every: bool, tell: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> None:
    """Remove abandoned locks that are stale, or `every` abandoned one, and `tell` of each lock what was done. Does
    nothing in ranks but the first one of a machine."""
    if environment.get("LOCAL_RANK", "0") != "0":
        return
    with contextlib.suppress(OSError, RuntimeError):
        for lock in abandoned_locks(environment, 0.0 if every else GRACE):
            if every or _age(lock) > STALE:
                age = _age(lock)
                lock.unlink(missing_ok=True)
                tell(f"{lock}: removed, {age / 60:,.0f} minutes old: it was left by a build that was ended")
            else:
                tell(f"warning: {_told(lock)}")


def warn_of_abandoned_locks(environment: Mapping[str, str] = os.environ) -> None:
    """CompressWarning for each abandoned lock, with what to type, in one process of each machine. Nothing is removed:
    another machine or container that shares the directory may be building."""
    if environment.get("LOCAL_RANK", "0") != "0":
        return
    # A look that fails, as where processes end meanwhile, must not stop one rank.
    with contextlib.suppress(OSError, RuntimeError):
        for lock in abandoned_locks(environment):
            warnings.warn(_told(lock), CompressWarning, stacklevel=2)


def abandoned_locks(environment: Mapping[str, str] = os.environ, grace: float = GRACE) -> list[Path]:
    """Return the locks that no process of this machine holds, and that are older than `grace` seconds."""
    locks = [lock for lock in _locks(environment) if _age(lock) > grace]
    used = set(_used_by_processes()) if locks else set()
    return [lock for lock in locks if not used & {os.path.realpath(lock), os.path.realpath(lock.parent)}]


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


def _used_by_processes() -> Iterator[str]:
    """Yield the files that processes have open, and the directories that they work in, of those that we may look into:
    a builder has its lock open until it gives it back, and compilers work beside it."""
    for pattern in ("[0-9]*/fd/*", "[0-9]*/cwd"):
        for link in Path("/proc").glob(pattern):
            with contextlib.suppress(OSError):
                yield os.readlink(link)


def _told(lock: Path) -> str:
    return (
        f"{lock}: was left by a build that was ended: it is {_age(lock) / 60:,.0f} minutes old, and no process of this "
        f"machine holds it. A program that loads {lock.parent.name} waits for it forever. Unless another machine or "
        f"container that shares the directory builds it now, write --clear-locks, or type: rm {shlex.quote(str(lock))}"
    )


if __name__ == "__main__":
    print_locks("--clear-locks" in sys.argv[1:])
