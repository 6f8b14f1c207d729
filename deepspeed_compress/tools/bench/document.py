"""The JSON file of a benchmark: where it was measured, and its rows."""

import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from deepspeed_compress import __version__
from deepspeed_compress.errors import ConfigError

__all__ = ["Row", "new_document", "read_document", "save_document"]

Row = dict[str, Any]


def new_document(rows: Sequence[Row] = ()) -> Row:
    """A document of this machine."""
    versions = {package: version(package) for package in ("torch", "deepspeed", "transformers")}
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


def read_document(path: Path) -> Row:
    """The document at `path`, or a new one. Raises ConfigError when the file holds something else."""
    if not path.is_file():
        return new_document()
    try:
        document: Row = json.loads(path.read_text(encoding="utf-8"))
        complete = all("workload" in row and "contender" in row for row in document["rows"])
    except (ValueError, KeyError, TypeError):
        complete = False
    if not complete:
        raise ConfigError(f"--output {path}: holds no measurements of steps; name another file")
    return document


def save_document(document: Row, path: Path) -> None:
    """Write under another name first, so that an interruption leaves the old file whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, path)
