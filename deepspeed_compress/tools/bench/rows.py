"""Rows of a benchmark, which ranks write on emulated hosts or under a launcher, stored in a JSON file."""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepspeed_compress import __version__
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench.hosts import Cluster, Run, signals_as_exceptions
from deepspeed_compress.tools.files import write_json

Row = dict[str, Any]


def new_document(rows: Sequence[Row] = ()) -> Row:
    """Return a new document with the environment of this machine."""
    versions = {package: _version(package) for package in ("torch", "deepspeed", "transformers", "triton")}
    return {
        "environment": {
            "python": platform.python_version(),
            "kernel": platform.release(),
            "cores": os.cpu_count(),
            "deepspeed_compress": __version__,
            **versions,
        },
        "rows": list(rows),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def read_document(path: Path) -> Row:
    """Return the document at `path`, or a new one if there is no file.

    Raises:
        ConfigError: The file holds something else.
    """
    if not path.is_file():
        return new_document()
    try:
        document: Row = json.loads(path.read_text(encoding="utf-8"))
        complete = all("workload" in row and "contender" in row for row in document["rows"])
        for row in document["rows"] if complete else ():
            row["workload"].setdefault("sequence", 1)  # rows of versions that could not divide sequences
    except (ValueError, KeyError, TypeError):
        complete = False
    if not complete:
        raise ConfigError(f"--output {path}: contains no measurements of steps; choose another file")
    return document


def save_document(document: Row, path: Path) -> None:
    """Write the document atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document)


PROGRESS = "progress: "
"""Prefix of the lines meant for the user. All other output is DeepSpeed's."""

Emit = Callable[[Row], None]
Log = Callable[[str], None]


def check_launched() -> None:
    """Check that a launcher started this process, because a single process has nothing to communicate with.

    Raises:
        ConfigError: No launcher started it.
    """
    if "RANK" not in os.environ:
        raise ConfigError(
            "a single process has nothing to communicate with; write --emulate HOSTS,RATE, such as --emulate 2,1gbit, "
            "or start it with torchrun --no-python --nproc-per-node N ds-compress bench ..."
        )


def run_ranks(options: argparse.Namespace, module: str, job: Row) -> tuple[list[Row], bool]:
    """Run `module` (see `rank_main`) with `job` as every rank: of emulated hosts, or else of a launcher's job.

    Returns:
        The rows, of which a launcher's job has some on rank 0 only, and True if a rank failed.
    """
    if options.emulate:
        with signals_as_exceptions():
            rows, failure = run_on_hosts(options.emulate.hosts, module, job, options.timeout, options.emulate.per_host)
        return rows, failure is not None
    check_launched()
    import torch.distributed as dist

    from deepspeed_compress.tools.bench.gauges import join

    join()
    rows = []
    import_module(module).measure(job, rows.append, print_indented)
    dist.destroy_process_group()
    return rows, False


def print_indented(text: str) -> None:
    """Print a line on the progress of a benchmark."""
    print(f"  {text}", flush=True)


def run_on_hosts(hosts: int, module: str, job: Row, timeout: float, per_host: int = 1) -> tuple[list[Row], str | None]:
    """Run `module` (see `rank_main`) with `job` as every rank of `hosts` hosts.

    Returns:
        The rows written so far, and what failed, or None.
    """
    with tempfile.TemporaryDirectory() as directory, Cluster(hosts, per_host=per_host) as cluster:
        description, result = Path(directory) / "job.json", Path(directory) / "rows.jsonl"
        description.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-m", module, str(description), str(result)]
        run = cluster.run(command, timeout=timeout, on_line=_forward_progress)
        rows = [json.loads(line) for line in result.read_text().splitlines()] if result.is_file() else []
    _report_failure(run)
    return rows, run.failure


def rank_main(measure: Callable[[Any, Emit, Log], None]) -> None:
    """Join the other hosts and run `measure(job, emit, log)`. Rank 0 appends its rows to the result file."""
    import torch.distributed as dist

    from deepspeed_compress.tools.bench.gauges import join

    job, result = (Path(argument) for argument in sys.argv[1:])
    join()
    measure(json.loads(job.read_text(encoding="utf-8")), partial(_append, result), _print_progress)
    dist.barrier()
    dist.destroy_process_group()


def _append(file: Path, row: Row) -> None:
    with file.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def _print_progress(text: str) -> None:
    print(PROGRESS + text, flush=True)


def _forward_progress(line: str) -> None:
    if line.startswith(PROGRESS):
        print("  " + line.removeprefix(PROGRESS), end="", flush=True)


def _report_failure(run: Run) -> None:
    if run.failure is None:
        return
    for host, output in enumerate(run.outputs):
        print(f"--- host {host}, last lines\n{output[-2000:]}", file=sys.stderr)
    print(f"error: {run.failure} after {run.seconds:.0f} s; earlier measurements are kept", file=sys.stderr)
