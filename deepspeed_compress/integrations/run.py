"""`python -m deepspeed_compress.integrations.run [--local_rank=N] [--section=FILE] SCRIPT ...`: run SCRIPT compressed.

Processes of `ds-compress run` run this. SCRIPT, or `-m MODULE`, runs as `__main__` with the arguments that it would get
without us, including a `--local_rank=N` of DeepSpeed's launcher. No library is imported before it begins, so that
environment variables that it sets have the same effect as without us.
"""

import gc
import os
import runpy
import socket
import sys
import warnings
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.foreign_warnings import hide_foreign_warnings
from deepspeed_compress.integrations.failing import tell_failures
from deepspeed_compress.integrations.importing import Undo, after_import
from deepspeed_compress.integrations.install import install
from deepspeed_compress.integrations.replacing import replace_method

__all__ = ["main"]

USAGE = "usage: python -m deepspeed_compress.integrations.run [--local_rank=N] [--section=FILE] [-m] SCRIPT ..."
_SECTION = "--section="


def main(arguments: Sequence[str]) -> None:
    """Install compression, and run the program that `arguments` name. Its exceptions and exit status are passed on.

    Issues a CompressWarning at the end of a program in which nothing was compressed.
    """
    given = list(arguments)
    # DeepSpeed's launcher puts its option first, but the program expects it right after the script.
    injected = [given.pop(0)] if given[:1] and given[0].startswith("--local_rank=") else []
    section = given.pop(0).removeprefix(_SECTION) if given and given[0].startswith(_SECTION) else None
    module = given[:1] == ["-m"] and bool(given.pop(0))
    if not given:
        raise SystemExit(USAGE)
    if not _has_launcher(os.environ):
        _be_alone(os.environ)
    hide_foreign_warnings()
    install(section)
    methods = _watch()
    sys.argv = [given[0], *injected, *given[1:]]
    try:
        with tell_failures():
            _run(given[0], module)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            raise
    _leave_gloo()
    if not methods:
        warnings.warn(_why_nothing(section), CompressWarning, stacklevel=1)


def _leave_gloo() -> None:
    """Destroy a process group of gloo.

    A process that ends while the threads of the group are alive may be aborted, although its program has done its work.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized() and dist.get_backend() == "gloo":
        gc.collect()
        dist.destroy_process_group()


def _why_nothing(section: str | None) -> str:
    if section is not None:
        return (
            f"nothing was compressed: --section {section} is for models of DistributedDataParallel and of fully_shard "
            "(allowed: a program that trains one; with Accelerate fsdp_version 2). With DeepSpeed write the section "
            "into the file that the script reads."
        )
    what = f'nothing was compressed: no engine with an optimizer had "{SECTION}" in its configuration (allowed: {{}})'
    return f"{what}. Write it into the file that the script reads, or without DeepSpeed use --section FILE."


_BY_LAUNCHERS = ("RANK", "WORLD_SIZE", "AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV")
_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables of MPI and Slurm with the number of processes that run this program."""


def _has_launcher(environment: Mapping[str, str]) -> bool:
    """Return True if a launcher has started several processes, or has set this process's rank."""
    return any(name in environment for name in _BY_LAUNCHERS) or any(
        environment.get(name, "1") != "1" for name in _SIZES
    )


def _be_alone(environment: MutableMapping[str, str]) -> None:
    """Declare this the only process. Otherwise DeepSpeed would ask MPI, and fail without mpi4py."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment.update({name: value for name, value in alone.items() if name not in environment})


def _run(program: str, module: bool) -> None:
    if module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        # As Python does for `python SCRIPT`: modules next to it can be imported.
        sys.path[0] = str(Path(program).resolve().parent)
        runpy.run_path(program, run_name="__main__")


def _watch() -> list[str]:
    """Return a list to which the method of every engine that is compressed from now on is appended.

    The entry point does not matter. The session itself is not kept: objects that hold process groups must end before
    the program does.
    """
    methods: list[str] = []
    after_import("deepspeed_compress.session.session", partial(_note_methods, methods))
    return methods


def _note_methods(methods: list[str]) -> Undo:
    from deepspeed_compress.session.session import Session

    return replace_method(Session, "__init__", partial(_noting, methods))


def _noting(methods: list[str], original: Callable[..., None]) -> Callable[..., None]:
    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807  (put into a class)
        original(self, *args, **options)
        methods.append(self.config.gradients.method)

    return __init__


if __name__ == "__main__":
    main(sys.argv[1:])
