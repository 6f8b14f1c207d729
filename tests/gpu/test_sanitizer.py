"""Kernels under NVIDIA's compute-sanitizer, which finds invalid accesses, races and uninitialized reads."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from tests.gpu.few_comparisons import PREFIX
from tests.gpu.plugin import needs
from tests.gpu.ranks import environment_on

PROGRAM = "compute-sanitizer"
TOOLS = ("memcheck", "racecheck", "initcheck")
RESERVE = 5.0


@pytest.mark.gpu
@needs("triton")
@pytest.mark.parametrize("tool", TOOLS)
def test_errors(
    tool: str,
    device: torch.device,
    seconds_left: Callable[[], float],
    record_property: Callable[[str, object], None],
) -> None:
    record_property("goal", "0 errors")
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    if (program := shutil.which(PROGRAM)) is None:
        pytest.skip(f"{PROGRAM} is not on PATH")
    seconds = (seconds_left() - RESERVE) / (len(TOOLS) - TOOLS.index(tool))
    # Without its cache, the allocator gives every tensor separate memory, so that the tool sees where it ends.
    environment = {**environment_on(device.type), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = [program, "--tool", tool, sys.executable, "-m", "tests.gpu.few_comparisons"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired as ended:
        compared = (ended.stdout or b"").count(PREFIX.encode())
        pytest.skip(f"{seconds:.0f} s were enough for {compared} kernels alone")
    figure, trouble = summary(done.stdout + done.stderr)
    record_property("figure", figure)
    assert not trouble, trouble


def summary(output: str) -> tuple[str, str]:
    """Return the figure for the output of the tool and of the comparisons that ran under it, and what is wrong."""
    counted = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", output)
    compared = [line.removeprefix(PREFIX) for line in output.splitlines() if line.startswith(PREFIX)]
    wrong = [line for line in compared if not line.endswith(": ")]
    if counted is None:
        return "", f"no summary: {output.strip()[-300:]}"
    first = next(
        (line.strip("= ") for line in output.splitlines() if line.startswith("========= ") and "rror" in line), ""
    )
    why = "; ".join([*([first] if int(counted[1]) else []), *wrong[:1]])
    return f"{counted[1]} errors in {len(compared)} comparisons", why


@pytest.mark.parametrize(
    ("text", "figure", "wrong"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", "0 errors in 1 comparisons", False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors)\n", "0 errors in 1 comparisons", False),
        ("========= Invalid write, error\n========= ERROR SUMMARY: 3 errors\n", "3 errors in 1 comparisons", True),
        ("========= Error: no device\n", "", True),
    ],
)
def test_the_summary_of_the_tool_is_read(text: str, figure: str, wrong: bool) -> None:
    found, trouble = summary(f"{PREFIX}cast: \n{text}")
    assert (found, bool(trouble)) == (figure, wrong)
    assert summary(f"{PREFIX}cast: result 0 differs\n{text}")[1]
