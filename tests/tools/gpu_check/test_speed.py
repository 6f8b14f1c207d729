"""Part 2: the bytes that are counted, and the goals."""

from pathlib import Path

import pytest
import torch

from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.tools.bench.kernels import OPERATIONS
from deepspeed_compress.tools.gpu_check import speed
from deepspeed_compress.tools.gpu_check.findings import Task
from deepspeed_compress.tools.gpu_check.speed import bytes_moved

NUMEL = 1 << 14
SCALES = 4 * NUMEL // 256


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("quantize int8", 5 * NUMEL + SCALES),
        ("quantize int4", 4.5 * NUMEL + SCALES),
        ("quantize int4, bf16 memory", 8.5 * NUMEL + SCALES),
        ("decode-accumulate int4", 8.5 * NUMEL + SCALES),
        ("decode-accumulate sign", 8.125 * NUMEL + SCALES),
        ("block top-k 1 % of 4096", 4 * NUMEL + 8 * 41 * NUMEL / 4096),
    ],
)
def test_every_byte_is_counted_once_and_twice_what_is_added_to(name: str, moved: float) -> None:
    [operation] = [one for one in OPERATIONS if one.name == name]
    assert bytes_moved(operation, reference, torch.randn(NUMEL)) == moved


def test_every_operation_is_measured_and_its_goal_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(speed._REPEATS, "cpu", 1)
    copy, *others = speed.findings(Task("cpu", 60, Path()))
    assert copy.what == "copy of 0.25 MiB"
    assert [one.what for one in others] == [operation.name for operation in OPERATIONS]
    assert {one.verdict for one in others} == {"not run"}
    assert {one.goal for one in others if "top-k" in one.what} == {">= 50% of copy"}
    assert {one.goal for one in others if "top-k" not in one.what} == {">= 80% of copy"}
