"""Documents of benchmarks: rows of measurements with the environment they were made in, stored in a JSON file."""

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepspeed_compress import __version__
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import write_json

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
