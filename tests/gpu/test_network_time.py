"""GPT-2: the time of a step among 16 and 64 GPUs at 10, 25 and 100 Gbit/s. The network is computed."""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from tests.gpu.plugin import needs
from tests.gpu.ranks import PACKAGES, environment_on

RecordProperty = Callable[[str, object], None]

MODELS = {"cuda": ("124M", "774M", "1.3B"), "cpu": ("2M",)}
SIZES: Mapping[str, tuple[str, ...]] = {
    "cuda": ("--seq-len", "1024"),
    "cpu": ("--ranks", "16", "--seq-len", "16", "--micro-batch", "1", "--steps", "1"),
}
LAYOUTS = ("ZeRO 1", "ZeRO 2", "ZeRO 3", "hybrid")
LEAST_SECONDS = 10.0

pytestmark = [pytest.mark.gpu, needs(*PACKAGES, "transformers", "rich")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", range(3))
def test_steps(
    model: int,
    layout: str,
    device: torch.device,
    seconds_left: Callable[[], float],
    tmp_path: Path,
    record_property: RecordProperty,
) -> None:
    if model >= len(MODELS[device.type]):
        pytest.skip("only on a GPU")
    if seconds_left() < LEAST_SECONDS:
        pytest.skip("no time is left")
    program = (sys.executable, "-m", "launch.studies.network_table", "--output-dir", str(tmp_path))
    chosen = ("--device", device.type, "--models", MODELS[device.type][model], "--only", layout, *SIZES[device.type])
    try:
        environment = environment_on(device.type)
        done = subprocess.run(
            [*program, *chosen], capture_output=True, text=True, env=environment, timeout=seconds_left()
        )
    except subprocess.TimeoutExpired:
        pytest.skip("no time is left")
    assert done.returncode == 0, done.stderr
    found = {file.stem: json.loads(file.read_text()) for file in sorted(tmp_path.glob("*_*_*.json"))}
    record_property("figure", json.dumps(found))
    seconds = [one for rates in found.values() for one in rates.values()]
    assert seconds
    assert all(one.keys() == {"deepspeed", "8 bits", "4 bits", "3 bits"} and min(one.values()) > 0 for one in seconds)
