"""Detection and removal of abandoned locks of torch extension builds, for which a program would wait forever.

DeepSpeed builds its operators with torch.utils.cpp_extension.load, whose lock is an existing file (`FileBaton`). A
build that is killed leaves it behind. A lock is considered abandoned if no process of this machine has the file open,
as a builder does until it is done, and none works in its directory, as compilers do. Other machines or containers that
share the directory cannot be seen, so without an explicit request only locks older than any build are removed. This
module does not import torch.

`python -m deepspeed_compress.backends.deepspeed.builds [--clear-locks]` reports abandoned locks, or removes them all.
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

GRACE = 10.0
"""Age in seconds below which a lock is ignored, because every load takes the lock for a moment."""
STALE = 2 * 3600.0
"""Age in seconds that is longer than any build of an operator takes, on any machine."""


def print_locks(clear: bool = False) -> None:
    """Report abandoned locks on standard error, and remove the stale ones; with `clear`, remove all of them.

    Call it before anything loads DeepSpeed's operators.
    """
    clear_locks(clear, _print)


def _print(text: str) -> None:
    print(f"ds-compress: {text}", file=sys.stderr, flush=True)


def clear_locks(every: bool, tell: Callable[[str], None], environment: Mapping[str, str] = os.environ) -> None:
    """Remove stale abandoned locks, or `every` abandoned lock, and call `tell` with what was done about each.

    Only the first rank of a machine does anything.
    """
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
    """Warn (CompressWarning) of each abandoned lock, with the command that removes it, in one process per machine.

    Nothing is removed, because another machine or container that shares the directory may be building.
    """
    if environment.get("LOCAL_RANK", "0") != "0":
        return
    # A failed check (a process ended meanwhile, for example) must not stop a single rank.
    with contextlib.suppress(OSError, RuntimeError):
        for lock in abandoned_locks(environment):
            warnings.warn(_told(lock), CompressWarning, stacklevel=2)


def abandoned_locks(environment: Mapping[str, str] = os.environ, grace: float = GRACE) -> list[Path]:
    """Return the locks that no process of this machine holds, and that are older than `grace` seconds."""
    locks = [lock for lock in _locks(environment) if _age(lock) > grace]
    used = set(_used_by_processes()) if locks else set()
    return [lock for lock in locks if not used & {os.path.realpath(lock), os.path.realpath(lock.parent)}]


def _locks(environment: Mapping[str, str]) -> Iterator[Path]:
    """Yield all locks: torch has one directory per extension, by default below one per version."""
    given = environment.get("TORCH_EXTENSIONS_DIR")
    cache = environment.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    yield from sorted(Path(given).glob("*/lock") if given else Path(cache, "torch_extensions").glob("*/*/lock"))


def _age(lock: Path) -> float:
    """Return the age of a lock in seconds; 0.0 if it no longer exists."""
    with contextlib.suppress(OSError):
        return time.time() - lock.stat().st_mtime
    return 0.0


def _used_by_processes() -> Iterator[str]:
    """Yield the open files and working directories of all processes that this process may inspect.

    A builder keeps its lock open until it releases it, and compilers work in the lock's directory.
    """
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
