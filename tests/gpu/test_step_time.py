"""GPT-2: the time of a step with and without compression.

With a mirror, the network costs no time. With a GPU for each of two ranks, NCCL sends real messages.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from tests.gpu.benchmarks import bench
from tests.gpu.plugin import needs
from tests.gpu.ranks import PACKAGES

RecordProperty = Callable[[str, object], None]

MODELS = {
    "cuda": {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024},
    "cpu": {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16},
}
"""GPT-2 with 124 million parameters, and a toy model."""
SIZES = {
    "cuda": ("--micro-batch", "8", "--seq-len", "1024", "--steps", "15"),
    "cpu": ("--micro-batch", "4", "--seq-len", "16", "--steps", "3"),
}
PLACES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...], float]] = {
    "a mirror of 2": ((), ("--mirror", "2"), 0.3),
    "a mirror of 64": ((), ("--mirror", "64"), 0.4),
    "a mirror of 512": ((), ("--mirror", "512"), 0.7),
    "two ranks": (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"), (), 0.9),
}
"""Launcher and options of `bench step` by place, and its share of the seconds that are left."""
GOAL = 0.03


@pytest.fixture(scope="module", params=PLACES)
def rows(
    request: pytest.FixtureRequest,
    device: torch.device,
    seconds_left: Callable[[], float],
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, Mapping[str, Any]]:
    """Place, and rows of `bench step` there by name."""
    place: str = request.param
    if place == "two ranks" and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    directory = tmp_path_factory.mktemp("step")
    config, model, output = (directory / name for name in ("int4.json", "gpt2.json", "step.json"))
    config.write_text(json.dumps(ds_config(device.type)))
    model.write_text(json.dumps({"model_type": "gpt2", **MODELS[device.type]}))
    launcher, options, share = PLACES[place]
    files = ("--config", str(config), "--model", str(model), "--output", str(output))
    arguments = ("step", *files, *SIZES[device.type], *options)
    document = bench(device.type, arguments, output, share * seconds_left(), launcher)
    return place, {row["contender"]["name"]: row for row in document["rows"]}


def ds_config(device: str) -> dict[str, Any]:
    """Return a configuration with overlap, in bf16 on a GPU."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": device == "cuda"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 50_000_000},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4, "block_size": 64}},
    }


pytestmark = [pytest.mark.gpu, needs(*PACKAGES, "transformers", "rich")]


def test_4_bits(rows: tuple[str, Mapping[str, Any]], device: torch.device, record_property: RecordProperty) -> None:
    place, found = rows
    plain, compressed = (found[name]["step_s"]["median"] for name in ("deepspeed", "int4"))
    more = compressed / plain - 1
    record_property("figure", f"{1e3 * plain:.1f} to {1e3 * compressed:.1f} ms, {more:+.1%}")
    if device.type != "cuda":
        pytest.skip("needs CUDA; the figure is of the CPU")
    if place != "two ranks":
        record_property("goal", f"at most {GOAL:.0%} more")
        if more > GOAL:
            pytest.xfail(f"{more:+.1%} of the step")
