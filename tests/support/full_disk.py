"""A disk that is full for some files: they can be created, but nothing gets to the disk."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch


@contextmanager
def full_disk(flag: Path) -> Iterator[None]:
    """Let writes fail for files whose path matches the expression in the file `flag`, while it exists.

    Processes that are forked within the block see the same disk.
    """
    with patch.object(os, "fsync", _failing(os.fsync, flag)), patch.object(os, "pwrite", _failing(os.pwrite, flag)):
        yield


def _failing(original: Callable[..., Any], flag: Path) -> Callable[..., Any]:
    def write(descriptor: int, *args: Any) -> Any:
        if flag.exists() and re.search(flag.read_text(), os.readlink(f"/proc/self/fd/{descriptor}")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(descriptor, *args)

    return write
