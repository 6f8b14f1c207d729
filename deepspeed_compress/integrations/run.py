"""`python -m deepspeed_compress.integrations.run [--local_rank=N] SCRIPT ...`: a program, with compression installed.

What the processes of `ds-compress run` do. SCRIPT, or `-m MODULE`, runs as `__main__` and sees the arguments that it
would see without us, a `--local_rank=N` of DeepSpeed's launcher among them.
"""

import functools
import runpy
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import deepspeed

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.integrations.install import install

__all__ = ["main"]

USAGE = "usage: python -m deepspeed_compress.integrations.run [--local_rank=N] [-m] SCRIPT [ARGUMENT ...]"


def main(arguments: Sequence[str]) -> None:
    """Install, and run the program that `arguments` name; what it raises, and how it exits, is passed on.

    Warns (CompressWarning) at the end of a program in which nothing was compressed.
    """
    given = list(arguments)
    # DeepSpeed's launcher puts its option first, where it was to come right after the script.
    injected = [given.pop(0)] if given[:1] and given[0].startswith("--local_rank=") else []
    module = given[:1] == ["-m"] and bool(given.pop(0))
    if not given:
        raise SystemExit(USAGE)
    install()
    attached = _watch()
    sys.argv = [given[0], *injected, *given[1:]]
    try:
        _run(given[0], module)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    if not any(attached):
        text = (
            f'nothing was compressed: no engine with an optimizer had "{SECTION}" in its configuration (allowed: {{}})'
        )
        warnings.warn(f"{text}. Write it into the file that the script reads.", CompressWarning, stacklevel=1)


def _run(program: str, module: bool) -> None:
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        # As Python does for `python SCRIPT`: its neighbours can be imported.
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


def _watch() -> list[bool]:
    """Grows by an entry for every engine that is made from now on: whether it is compressed."""
    attached: list[bool] = []
    initialize = deepspeed.initialize

    @functools.wraps(initialize)
    def watched(*args: Any, **options: Any) -> Any:
        result = initialize(*args, **options)
        attached.append("compression" in vars(result[0]))
        return result

    deepspeed.initialize = watched
    return attached


if __name__ == "__main__":
    main(sys.argv[1:])
