"""Atomic writing of files, which are either complete or absent."""

import json
import os
from pathlib import Path


def write_json(file: Path, value: object, private: bool = False) -> None:
    """Write `value` as indented JSON. If `private`, only the user can read the file, which may contain passwords."""
    write_text(file, json.dumps(value, indent=2) + "\n", private)


def write_text(file: Path, text: str, private: bool = False) -> None:
    """Write `text` under a temporary name first, so that an interruption leaves the old file intact."""
    scratch = file.with_name(f".{file.name}.new")
    scratch.unlink(missing_ok=True)
    # Permissions are set at creation, so that others can never read the file.
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    # File names need not be UTF-8. Python's escapes for invalid bytes are written back as the original bytes.
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(text)
    os.replace(scratch, file)
