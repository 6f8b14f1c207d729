"""The program of a rank, started on emulated hosts, and the rows that it leaves; or run by the launcher's processes."""

import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench.document import Row
from deepspeed_compress.tools.bench.hosts import Cluster, Run

__all__ = ["Emit", "Say", "launched", "on_hosts", "rank_main"]

PROGRESS = "progress: "
"""What lines for the user begin with; the rest of the output is DeepSpeed's."""

Emit = Callable[[Row], None]
Say = Callable[[str], None]


def launched() -> bool:
    """Whether a launcher started this process. Raises ConfigError when there is nothing to communicate with."""
    if "RANK" not in os.environ:
        raise ConfigError(
            "there is one process only: write --emulate HOSTS,RATE, such as --emulate 2,1gbit, or start with "
            "torchrun --no-python --nproc-per-node N ds-compress bench ..."
        )
    return True


def on_hosts(hosts: int, module: str, job: Row, timeout: float) -> tuple[list[Row], str | None]:
    """Run `module` (see `rank_main`) with `job` on every host: the rows that it got to, and what failed, or None."""
    with tempfile.TemporaryDirectory() as directory, Cluster(hosts) as cluster:
        told, result = Path(directory) / "job.json", Path(directory) / "rows.jsonl"
        told.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", module, str(told), str(result)]
        run = cluster.run(command, timeout=timeout, on_line=_progress)
        rows = [json.loads(line) for line in result.read_text().splitlines()] if result.is_file() else []
    _report_failure(run)
    return rows, run.failure


def rank_main(measure: Callable[[Any, Emit, Say], None]) -> None:
    """The program on a host: `measure(job, emit, say)`, whose rows rank 0 appends to the result file."""
    told, result = (Path(argument) for argument in sys.argv[1:])

    def emit(row: Row) -> None:
        with result.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    measure(json.loads(told.read_text(encoding="utf-8")), emit, lambda text: print(PROGRESS + text, flush=True))


def _progress(line: str) -> None:
    if line.startswith(PROGRESS):
        print("  " + line.removeprefix(PROGRESS), end="", flush=True)


def _report_failure(run: Run) -> None:
    if run.failure is None:
        return
    for host, output in enumerate(run.outputs):
        print(f"--- host {host}, last lines\n{output[-2000:]}", file=sys.stderr)
    print(f"error: {run.failure} after {run.seconds:.0f} s; what it measured before is kept", file=sys.stderr)
