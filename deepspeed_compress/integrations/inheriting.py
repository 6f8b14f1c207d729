"""Inheritance of compression by processes that a program starts, such as those of `llamafactory-cli` or `mp.spawn`.

Python imports a module `sitecustomize` at its start. `inherited/` has one, which calls `install_inherited` if
`ds-compress run` has set a variable, and `PYTHONPATH` leads there. Forked processes need nothing.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_compress.integrations.importing import Undo, after_import
from deepspeed_compress.integrations.install import install
from deepspeed_compress.integrations.replacing import replace_method

INHERIT = "DS_COMPRESS_INHERIT"
"""Environment variable that makes new Python processes install compression: the file of `--section`, or ""."""
_REPORTS = "DS_COMPRESS_REPORTS"
"""Environment variable: path of an unnamed file, to which processes append a byte when they compress something."""
_NAME = "ds_compress_reports"
_DIRECTORY = str(Path(__file__).with_name("inherited"))


@contextmanager
def inheriting(section: str | None) -> Iterator[Callable[[], bool]]:
    """Let processes that are started within the block install compression, like this one.

    Yields:
        A function that returns True if this process or any of them has compressed something.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _DIRECTORY)]
    descriptor = os.memfd_create(_NAME)
    try:
        os.environ[INHERIT], os.environ[_REPORTS] = section or "", f"/proc/{os.getpid()}/fd/{descriptor}"
        os.environ["PYTHONPATH"] = os.pathsep.join([_DIRECTORY, *paths])
        _report_compression()
        yield lambda: os.fstat(descriptor).st_size > 0
    finally:
        os.close(descriptor)


def install_inherited() -> None:
    """Install compression in a process that a program under `ds-compress run` has started."""
    install(os.environ[INHERIT] or None)
    _report_compression()


def _report_compression() -> None:
    after_import("deepspeed_compress.session.session", _follow_sessions)


def _follow_sessions() -> Undo:
    from deepspeed_compress.session.session import Session

    return replace_method(Session, "__init__", partial(_reporting, os.environ.get(_REPORTS, "")))


def _reporting(reports: str, original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807  (put into a class)
        original(self, *args, **options)
        # The process that reads the reports may have ended, and its number may have been given to another one.
        with suppress(OSError):
            if _NAME in os.readlink(reports):
                Path(reports).write_bytes(b"1")

    return __init__
