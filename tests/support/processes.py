"""Processes that tests start or watch: their end, their memory, and servers of islands."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.transport import until

MEGABYTE = 1 << 20


def alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def start_ticks(pid: int) -> int:
    """Return when the process started, in clock ticks since boot: with its id, this identifies it.

    Raises:
        OSError: there is no such process.
    """
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def wait_until_gone(pid: int) -> None:
    """Wait until a process that is not a child of this one has ended.

    Raises:
        AssertionError: it hangs.
    """
    until(lambda: not alive(pid))


def resident_memory(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def run_python(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python with `arguments`, and return its exit status and what it prints. `options` are those of a process."""
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, **options)


def run_command(*arguments: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run `ds-compress` in a new process."""
    return run_python("-m", "deepspeed_compress.cli", *arguments, **options)


@contextmanager
def serve_islands(directory: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Run `ds-compress islands serve`, and yield its address and its process id.

    Its output is in `directory`/log, and its state in `directory`/state.
    """
    directory.mkdir(exist_ok=True)
    log = directory / "log"
    command = [sys.executable, "-m", "deepspeed_compress.cli", "islands", "serve", "--port", "0", *options]
    command += ["--state", str(directory / "state")]
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            until(lambda: b"port " in log.read_bytes())
            port = log.read_text().split("port ")[1].split()[0]
            yield f"127.0.0.1:{port}", process.pid
            assert process.poll() is None, log.read_text()
            process.terminate()
            assert process.wait(120) == 0, "the server does not end"
        finally:
            process.kill()


def start_threads(*works: Callable[[], object]) -> list[threading.Thread]:
    """Run each of `works` in a thread."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    return threads


def join_threads(threads: list[threading.Thread]) -> None:
    """Wait for `threads`, at most two minutes for each."""
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread does not end"
