"""Part 4: kernels under NVIDIA's compute-sanitizer, which finds invalid accesses, races and uninitialized reads."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from deepspeed_compress.tools.gpu_check.findings import Finding, Task, Verdict, read_findings

__all__ = ["findings", "summary"]

_PROGRAM = "compute-sanitizer"
_TOOLS = ("memcheck", "racecheck", "initcheck")
_MODULES = ("deepspeed_compress.tools.gpu_check.part", "deepspeed_compress.tools.gpu_check.kernels")
_RESERVE = 5.0
_GOAL = "0 errors"


def findings(task: Task) -> Iterator[Finding]:
    """Yield one finding per tool."""
    until = time.monotonic() + task.seconds - _RESERVE
    for number, tool in enumerate(_TOOLS):
        seconds = (until - time.monotonic()) / (len(_TOOLS) - number)
        yield _look(tool, replace(task, seconds=seconds, small=True))


def _look(tool: str, task: Task) -> Finding:
    program = shutil.which(_PROGRAM)
    if not task.on_gpu or program is None:
        missing = "needs CUDA" if not task.on_gpu else f"{_PROGRAM} is not on PATH"
        return Finding(tool, "not run", goal=_GOAL, why=missing)
    # Without its cache, the allocator gives every tensor separate memory, so that the tool sees where it ends.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    with tempfile.TemporaryDirectory() as directory:
        lines = Path(directory) / "findings.jsonl"
        command = [program, "--tool", tool, sys.executable, "-m", *_MODULES, str(lines), task.to_json()]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=task.seconds)
        except subprocess.TimeoutExpired:
            looked = len(list(read_findings(lines, "")))
            return Finding(
                tool, "not run", goal=_GOAL, why=f"{task.seconds:.0f} s were enough for {looked} kernels alone"
            )
        compared = list(read_findings(lines, ""))
    return summary(tool, done.stdout + done.stderr, compared)


def summary(tool: str, said: str, compared: list[Finding]) -> Finding:
    """Return the finding of a tool from its output `said` and the findings of the comparison that ran under it."""
    counted = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", said)
    wrong = [f"{one.what}: {one.why}" for one in compared if one.verdict == "fail"]
    if counted is None:
        return Finding(tool, "fail", goal=_GOAL, why=f"no summary: {said.strip()[-300:]}")
    first = next(
        (line.strip("= ") for line in said.splitlines() if line.startswith("========= ") and "rror" in line), ""
    )
    why = "; ".join([*([first] if int(counted[1]) else []), *wrong[:1]])
    verdict: Verdict = "fail" if int(counted[1]) or wrong else "pass"
    return Finding(tool, verdict, f"{counted[1]} errors in {len(compared)} comparisons", _GOAL, why)
