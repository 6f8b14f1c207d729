"""Benchmarks of `ds-compress bench`, run as programs."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.ranks import environment_on

_SHOWN = 600


def bench(
    device: str, arguments: Sequence[str], output: Path, seconds: float, launcher: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the document that a benchmark writes to `output`. Fails if it fails or takes longer than `seconds`."""
    environment, limit = environment_on(device), max(1.0, seconds)
    command = [sys.executable, *launcher, "-m", "deepspeed_compress.cli", "bench", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment)
    except subprocess.TimeoutExpired:
        pytest.fail(f"bench {arguments[0]} took more than {seconds:.0f} s")
    if done.returncode:
        pytest.fail(f"bench {arguments[0]}: {(done.stderr or done.stdout).strip()[-_SHOWN:]}")
    document: dict[str, Any] = json.loads(output.read_text())
    return document
