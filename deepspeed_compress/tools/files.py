"""Files that are there whole or not at all."""

import json
import os
from pathlib import Path

__all__ = ["write_json", "write_text"]


def write_json(file: Path, value: object, private: bool = False) -> None:
    """Write `value` with indentation. `private`: only the user may read the file, as it may hold passwords."""
    write_text(file, json.dumps(value, indent=2) + "\n", private)


def write_text(file: Path, text: str, private: bool = False) -> None:
    """Write under another name first, so that whoever interrupts it leaves the old file whole."""
    scratch = file.with_name(f".{file.name}.new")
    scratch.unlink(missing_ok=True)
    # Permissions are set when the file is made: nobody may read it between the two.
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
    # Names of files need not be UTF-8: what Python has made of such a one is written as it was.
    with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as stream:
        stream.write(text)
    os.replace(scratch, file)
