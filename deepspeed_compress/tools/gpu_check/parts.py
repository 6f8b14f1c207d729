"""The parts, each of which runs in its own process, because it may crash or hang."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from deepspeed_compress.tools.gpu_check.findings import Finding, Task, read_findings

__all__ = ["PARTS", "Part", "limits", "run_part"]

_HERE = "deepspeed_compress.tools.gpu_check"
_PROGRAM = f"{_HERE}.part"
_SHOWN = 600
"""Characters to show of the end of a part's output after a crash."""


@dataclass(frozen=True)
class Part:
    """Part of the check. `module` has a function `findings(task)`. `seconds` is the part's share of eight minutes."""

    name: str
    summary: str
    seconds: float
    module: str


PARTS = (
    Part("kernels", "every kernel against plain torch, bit for bit", 140, f"{_HERE}.kernels"),
    Part("speed", "time of every kernel against copying the same bytes", 30, f"{_HERE}.speed"),
    Part("synchronisation", "what waits for the GPU, or allocates, in an exchange", 40, f"{_HERE}.synchronisation"),
    Part("sanitizer", "kernels under compute-sanitizer", 45, f"{_HERE}.sanitizer"),
    Part("steps", "training of every ZeRO stage, whatever the order of streams", 85, f"{_HERE}.steps"),
    Part("profile", "where a step's time goes, with a trace", 40, f"{_HERE}.profile"),
    Part("language_model", "GPT-2: loss and step time with and without", 100, f"{_HERE}.language_model"),
)
"""Parts, most valuable first."""


def limits(parts: Sequence[Part], minutes: float) -> Mapping[str, float]:
    """Return the seconds after the start by which each part must have ended. Unused time goes to the next parts."""
    whole, passed, found = sum(part.seconds for part in PARTS), 0.0, {}
    for part in parts:
        passed += part.seconds / whole * 60 * minutes
        found[part.name] = passed
    return MappingProxyType(found)


def run_part(part: Part, task: Task, environment: Mapping[str, str] = MappingProxyType({})) -> list[Finding]:
    """Return the findings of `part`. If it crashes or exceeds its limit, the last finding reports that."""
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "findings.jsonl"
        ended = _run(part, task, environment, lines)
        found = list(read_findings(lines, part.name))
    if ended.trouble:
        found.append(Finding("the part itself", "fail", f"{ended.seconds:.0f} s", why=ended.trouble, part=part.name))
    elif not found:
        found.append(Finding("the part itself", "fail", why="it found nothing", part=part.name))
    return found


@dataclass(frozen=True)
class _Ended:
    trouble: str
    seconds: float


def _run(part: Part, task: Task, environment: Mapping[str, str], lines: Path) -> _Ended:
    begin = time.monotonic()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", _PROGRAM, part.module, str(lines), task.to_json()],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        trouble = _wait(process, task.seconds)
        output.seek(0)
        said = output.read()[-_SHOWN:].strip()
    return _Ended(f"{trouble}: {said}" if trouble and said else trouble, time.monotonic() - begin)


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Return what went wrong, or "", and end the process with all processes that it started."""
    try:
        code = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return f"ended at its limit of {seconds:.0f} s"
    finally:
        _end(process)
    return "" if code == 0 else f"crashed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
