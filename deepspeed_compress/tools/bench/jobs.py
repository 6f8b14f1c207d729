"""Jobs of benchmarks: programs that ranks run on emulated hosts, or in the processes of a launcher, and their rows.

Every rank runs `rank.measure`, which emits rows and logs its progress. Both have an effect on rank 0 only.
"""

import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self, TypeVar

from deepspeed_compress import __version__
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench.hosts import Cluster, signals_as_exceptions
from deepspeed_compress.tools.bench.links import check_machine
from deepspeed_compress.tools.bench.options import Emulation

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


def save_document(document: Row, path: Path) -> None:
    """Write the document atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, document)


RANK_PROGRAM = "deepspeed_compress.tools.bench.rank"
PROGRESS = "progress: "
"""Prefix of the lines meant for the user. All other output is DeepSpeed's."""

Emit = Callable[[Row], None]
Log = Callable[[str], None]
T = TypeVar("T")


class EmulatedRanks:
    """Ranks on emulated hosts of this machine. Every job starts new processes, which may take `timeout` seconds."""

    is_first = True

    def __init__(self, emulation: Emulation, timeout: float) -> None:
        self.emulation, self.timeout = emulation, timeout
        self.count = emulation.ranks
        self.rates: Sequence[str | None] = emulation.rates
        """Rates of links to measure at."""

    def gather(self, mine: T) -> list[T]:
        """Return `mine`, which is that of all ranks."""
        return [mine]

    def run(self, jobs: Sequence[Row]) -> tuple[list[Row], str | None]:
        """Run `jobs` on every rank.

        Returns:
            The rows written so far, and what failed, or None.
        """
        cluster = Cluster(self.emulation.hosts, per_host=self.emulation.per_host)
        with signals_as_exceptions(), tempfile.TemporaryDirectory() as directory, cluster:
            description, result = Path(directory) / "job.json", Path(directory) / "rows.jsonl"
            description.write_text(json.dumps(jobs), encoding="utf-8")
            command = [sys.executable, "-m", RANK_PROGRAM, str(description), str(result)]
            run = cluster.run(command, timeout=self.timeout, on_line=_forward_progress, forks=True)
            rows = [json.loads(line) for line in result.read_text().splitlines()] if result.is_file() else []
        if run.failure is not None:
            run.print_ends()
            print(f"error: {run.failure} after {run.seconds:.0f} s; earlier measurements are kept", file=sys.stderr)
        return rows, run.failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Do nothing, since every job ends its processes."""


class LaunchedRanks:
    """Processes of a launcher, of which this is one, or one rank and its mirror images if `images` is their number.

    All jobs share the groups of these processes, which are destroyed at the end of the context.
    """

    rates: Sequence[str | None] = (None,)

    def __init__(self, images: int | None = None) -> None:
        from deepspeed_compress.tools.bench import gauges

        ranks = gauges.join() if images is None else gauges.join_images(images, images)
        self.count, self.is_first = ranks.world_size, ranks.is_first

    def gather(self, mine: T) -> list[T]:
        """Return `mine` of every rank."""
        from deepspeed_compress.tools.bench import gauges

        return gauges.gather(mine)

    def run(self, jobs: Sequence[Row]) -> tuple[list[Row], str | None]:
        """Run `jobs` on every rank. Return their rows on every rank, and None."""
        from deepspeed_compress.tools.bench import gauges, rank

        rows: list[Row] = []
        rank.measure(jobs, rows.append, _print_indented if self.is_first else ignore)
        return gauges.gather(rows)[0], None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        from deepspeed_compress.training.ranks import end_ranks

        end_ranks()


JobRanks = EmulatedRanks | LaunchedRanks
"""Context of the ranks for some jobs."""


def has_ranks(emulation: Emulation | None) -> bool:
    """Return True if there are ranks: emulated hosts, or the processes of a launcher, of which this is one."""
    return emulation is not None or "RANK" in os.environ


def find_ranks(emulation: Emulation | None, timeout: float, command: str) -> JobRanks:
    """Return the ranks for the jobs of `ds-compress COMMAND`.

    Raises:
        ClusterError: Hosts cannot be emulated here.
        ConfigError: No launcher started this process, which has nothing to communicate with if it is alone.
    """
    if emulation is not None:
        check_machine()
        return EmulatedRanks(emulation, timeout)
    if not has_ranks(emulation):
        start = f"start it by torchrun --no-python --nproc-per-node N ds-compress {command} ..."
        raise ConfigError(f"a single process has nothing to communicate with; write --emulate 2,1gbit, or {start}")
    return LaunchedRanks()


def ignore(_: object) -> None:
    """Do nothing, on ranks other than the first."""


def _print_indented(text: str) -> None:
    print(f"  {text}", flush=True)


def print_progress(text: str) -> None:
    print(PROGRESS + text, flush=True)


def _forward_progress(line: str) -> None:
    if line.startswith(PROGRESS):
        _print_indented(line.removeprefix(PROGRESS).rstrip("\n"))
