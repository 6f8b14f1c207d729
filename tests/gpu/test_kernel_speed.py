"""The speed of every kernel, relative to a device-to-device copy of the bytes that it reads and writes."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_compress.tools.bench.kernels import COPY, OPERATIONS
from tests.gpu.benchmarks import bench
from tests.gpu.plugin import needs

RecordProperty = Callable[[str, object], None]

NUMEL = {"cuda": 1 << 28, "cpu": 1 << 16}
"""Elements by device. On a GPU these are a gigabyte, much larger than its caches."""
REPEATS = {"cuda": 15, "cpu": 3}
NEEDED = 16
"""Maximum bytes of device memory per element."""
PLAIN = re.compile("rows|of all")
"""Operations that plain PyTorch does on every GPU."""
GOAL, GOAL_TOP_K = 0.8, 0.5
"""Goals as fractions of the speed of a copy."""


@pytest.fixture(scope="module")
def rows(
    device: torch.device, seconds_left: Callable[[], float], tmp_path_factory: pytest.TempPathFactory
) -> Mapping[str, Any]:
    """Rows of `bench kernels`, by operation."""
    output: Path = tmp_path_factory.mktemp("kernels") / "kernels.json"
    numel, repeats = numel_on(device), REPEATS[device.type]
    sizes = ("--numel", str(numel), "--repeats", str(repeats))
    arguments = ("kernels", "--device", device.type, *sizes, "--json", str(output))
    return {row["operation"]: row for row in bench(device.type, arguments, output, 0.95 * seconds_left())["rows"]}


def numel_on(device: torch.device) -> int:
    """Return the number of elements, fewer if the device has too little memory."""
    if device.type != "cuda":
        return NUMEL[device.type]
    free, _ = torch.cuda.mem_get_info()
    return min(NUMEL["cuda"], 1 << (free // NEEDED).bit_length() - 1)


@pytest.mark.gpu
@needs("triton", "rich")
@pytest.mark.parametrize("operation", [COPY, *(name for name in OPERATIONS if not PLAIN.search(name))])
def test_speed(operation: str, rows: Mapping[str, Any], device: torch.device, record_property: RecordProperty) -> None:
    judge(rows[operation], device.type, record_property)


def judge(row: Mapping[str, Any], device: str, record_property: RecordProperty) -> None:
    """Compare the speed of an operation with its goal."""
    share, goal = row["moved_of_copy"], GOAL_TOP_K if "top-k" in row["operation"] else GOAL
    time = f"{1e3 * row['seconds']['median']:.2f} ms, {row['moved_gb_per_s']:,.0f} GB/s"
    record_property("figure", f"{share:.0%} of copy, {time}")
    if row["operation"] != COPY:
        record_property("goal", f">= {goal:.0%} of copy")
    if device != "cuda":
        pytest.skip("needs CUDA; the figure is of the CPU")
    if row["implementation"] == "reference":
        pytest.fail("plain PyTorch is in use, not the Triton kernel")
    if share < goal:
        pytest.xfail(f"{share:.0%} of copy")


def row_of(operation: str, share: float) -> dict[str, Any]:
    seconds = {"median": 0.001}
    found = {"operation": operation, "moved_of_copy": share, "moved_gb_per_s": 1000.0, "seconds": seconds}
    return found | {"implementation": "gpu"}


@pytest.mark.parametrize(("operation", "goal"), [("quantize int4", 0.8), ("block top-k 1 % of 4096", 0.5)])
def test_a_speed_is_held_against_its_goal(operation: str, goal: float) -> None:
    found: dict[str, object] = {}
    judge(row_of(operation, goal), "cuda", found.__setitem__)
    assert found == {"figure": f"{goal:.0%} of copy, 1.00 ms, 1,000 GB/s", "goal": f">= {goal:.0%} of copy"}
    with pytest.raises(pytest.xfail.Exception):
        judge(row_of(operation, goal - 0.01), "cuda", found.__setitem__)
    with pytest.raises(pytest.skip.Exception, match="of the CPU"):
        judge(row_of(operation, goal), "cpu", found.__setitem__)
