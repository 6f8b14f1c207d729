"""`python -m deepspeed_compress.integrations.run [--local_rank=N] [--section=FILE] SCRIPT ...`: run SCRIPT compressed.

`ds-compress run` starts its processes with this module. SCRIPT, or `-m MODULE`, runs as `__main__` with its usual
arguments, including the `--local_rank=N` of DeepSpeed's launcher. No library is imported before it begins, so that the
environment variables that it sets have their usual effect. With `--program PROGRAM`, a child process runs the program,
whose Python processes inherit compression.

When one rank of an agent fails, all others lose their connections to it, and each raises an error of its own. These
tracebacks go to files, so that they do not bury the cause. A configuration error, which no restart can cure, is one
line.
"""

import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning, ConfigError, SeamError, UnsupportedError
from deepspeed_compress.integrations.install import inheriting, install
from deepspeed_compress.integrations.launch import PROGRAM, find_uncompressed
from deepspeed_compress.launcher.heartbeat import AGENT, EXIT_PERMANENT, RankError, record_error
from deepspeed_compress.launcher.workers import die_with_agent

USAGE = (
    "usage: python -m deepspeed_compress.integrations.run [--local_rank=N] [--section=FILE] [-m | --program] SCRIPT ..."
)
_SECTION, _MODULE = "--section=", "-m"


def main(arguments: Sequence[str]) -> None:
    """Install compression, and run the program that `arguments` name. Its exceptions and exit status are passed on.

    At the end, the first rank issues a CompressWarning if nothing was compressed, unless only help was asked for, or
    `arguments` name a DeepSpeed configuration without the section.
    """
    die_with_agent()
    given = list(arguments)
    # DeepSpeed's launcher puts its option first, but a program expects it right after the script.
    injected = [given.pop(0)] if given[:1] and given[0].startswith("--local_rank=") else []
    section = given.pop(0).removeprefix(_SECTION) if given and given[0].startswith(_SECTION) else None
    kind = given.pop(0) if given and given[0] in (_MODULE, PROGRAM) else ""
    if not given:
        raise SystemExit(USAGE)
    if kind != PROGRAM:
        _become_single_rank(os.environ)
    if find_uncompressed(given):
        # `ds-compress run` has reported the file before the start.
        warnings.filterwarnings("ignore", "(an engine is not|nothing was) compressed", CompressWarning)
    install(section)
    sys.argv = [given[0], *injected, *given[1:]]
    with inheriting(section) as has_compressed:
        try:
            with report_failures():
                _run(kind, sys.argv)
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        is_compressed = has_compressed()
    _leave_gloo()
    if not is_compressed and os.environ.get("RANK", "0") == "0" and not {"-h", "--help"} & set(sys.argv):
        warnings.warn(_explain_no_compression(section), CompressWarning, stacklevel=1)


def _leave_gloo() -> None:
    """Destroy the default process group if its backend is gloo.

    If a process ends while the group's threads are alive, it may abort although its program has succeeded.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is None or not dist.is_initialized():
        return
    from deepspeed_compress.collectives.exchange import is_gloo

    if is_gloo():
        gc.collect()
        dist.destroy_process_group()


def _explain_no_compression(section: str | None) -> str:
    if section is not None:
        return (
            f"nothing was compressed: --section {section} applies only to DistributedDataParallel and fully_shard "
            "models, and the program trained none (Accelerate needs fsdp_version 2)"
        )
    return (
        f'nothing was compressed: no engine with an optimizer had "{SECTION}" in its configuration. Write it there or, '
        "without DeepSpeed, pass --section FILE; processes with another PYTHONPATH call deepspeed_compress.install()"
    )


_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "AZUREML_EXPERIMENT_ID", "SM_TRAINING_ENV")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Environment variables of MPI and Slurm that hold the number of processes of this job."""


def _become_single_rank(environment: MutableMapping[str, str]) -> None:
    """Declare this process the only rank, unless a launcher has set its rank, or has started several processes.

    Otherwise DeepSpeed would ask MPI, and fail without mpi4py.
    """
    sizes = {environment.get(name, "1") for name in _SIZE_VARIABLES}
    if sizes != {"1"} or any(name in environment for name in _LAUNCHER_VARIABLES):
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    single = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment.update({name: value for name, value in single.items() if name not in environment})


def _run(kind: str, command: Sequence[str]) -> None:
    if kind == PROGRAM:
        raise SystemExit(_run_program(command))
    if kind == _MODULE:
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    else:
        # Python does the same for `python SCRIPT`, so that the script can import the modules next to it.
        sys.path[0] = str(Path(command[0]).resolve().parent)
        runpy.run_path(command[0], run_name="__main__")


def _run_program(command: Sequence[str]) -> int:
    """Run a program, which gets the signals that this process receives, and return its exit code as a shell does."""
    early: list[int] = []
    _handle_signals(early.append)
    with subprocess.Popen(command) as process:
        _handle_signals(process.send_signal)
        for number in early:
            process.send_signal(number)
        # A terminal sends this one to the program, too.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = process.wait()
    return code if code >= 0 else 128 - code


def _handle_signals(handle: Callable[[int], object]) -> None:
    """Call `handle` with the numbers of signals that would otherwise end this process."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: handle(received))


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
    except Exception as error:
        if AGENT not in os.environ:
            raise
        if isinstance(error, ConfigError | SeamError | UnsupportedError):
            if _rank() != "0":
                time.sleep(_AFTER_FIRST)
            print(f"ds-compress: error: rank {_rank()}: {error}", file=sys.stderr, flush=True)
            raise SystemExit(EXIT_PERMANENT) from error
        text = "".join(traceback.format_exception(error))
        file = _written(text)
        if not _has_lost_a_peer(error) or not file:
            lines = "\n".join(text.splitlines()[-_LAST_LINES:])[-_LONGEST:]
            record_error(Path(os.environ[AGENT]), RankError(time.time(), int(_rank()), file, lines))
            raise
        text = f"rank {_rank()} has lost another rank; its traceback is in {file}"
        print(f"ds-compress: {text}", file=sys.stderr, flush=True)
        time.sleep(_AFTER_FIRST)
        raise SystemExit(1) from error


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


if __name__ == "__main__":
    main(sys.argv[1:])
