"""Loading needs at most the memory of this rank's shard and one more tensor."""

import gc
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_compress.models import Layout, build_model, build_parallel, read_model_config
from deepspeed_compress.models.sources import build_skeleton, fill, open_source
from tests.models.families import MODELS, save_model, write_config
from tests.models.runs import SEED
from tests.support.forks import run_forks

SMALL = 1024
"""Bytes of rotary tables and short-lived scalar tensors."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode that counts the bytes of all live CPU tensors that operations have used or made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensors that are read from files are not made by an operation, so they are counted when they are used.
        self._count_all((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self._count_all(result)
        return result

    def _count_all(self, values: Any) -> None:
        for tensor in tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())

    def _count(self, storage: Any) -> None:
        if storage._cdata in self._seen:
            return
        self._seen.add(storage._cdata)
        self.bytes += storage.nbytes()
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.bytes -= size


@dataclass(frozen=True)
class Loaded:
    """Bytes of a rank's shard, live bytes after loading, and peak live bytes."""

    shard: int
    after: int
    peak: int


def load(rank: int, path: Path, layout: Layout) -> Loaded:
    deepspeed.init_distributed("gloo")
    config = read_model_config(path)
    with LiveBytes() as alive:
        module = build_parallel(path, config, SEED, layout)
        gc.collect()
    shard = sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())
    return Loaded(shard, alive.bytes, alive.peak)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout", [Layout(pipeline=2, partition="uniform"), Layout(tensor=2)], ids=["pipeline", "tensor"]
)
def test_peak_memory_of_loading_is_the_shard_and_one_tensor(family: str, layout: Layout, tmp_path: Path) -> None:
    """The embedding and the head are the largest tensors, and the head is loaded last."""
    path = save_model(tmp_path, family, tied=False, vocab_size=600)
    sizes = [parameter.numel() * 4 for parameter in build_skeleton(read_model_config(path)).parameters()]
    for rank in run_forks(2, load, path, layout):
        assert rank.after <= rank.shard + SMALL
        assert rank.peak <= rank.shard + max(sizes) + SMALL < sum(sizes)


@pytest.mark.parametrize("family", MODELS)
def test_a_filled_skeleton_equals_the_model(family: str, tmp_path: Path) -> None:
    check_tables(save_model(tmp_path, family))


ROTATIONS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
}


@pytest.mark.parametrize("kind", ROTATIONS)
def test_a_filled_skeleton_has_the_scaled_rotary_tables_of_the_model(kind: str, tmp_path: Path) -> None:
    check_tables(save_model(tmp_path, "llama", rope_parameters=ROTATIONS[kind] | {"rope_theta": 1e4}))


def check_tables(path: Path) -> None:
    """Check that buffers and weights of a filled skeleton equal those of the model that transformers loads."""
    config = read_model_config(path)
    whole, filled = build_model(path, config, SEED), build_skeleton(config)
    fill(filled, open_source(path, filled, SEED))
    for mine, theirs in ((filled.buffers(), whole.buffers()), (filled.parameters(), whole.parameters())):
        for found, expected in zip(mine, theirs, strict=True):
            assert torch.equal(found, expected)
            assert found.dtype == expected.dtype


def build(path: Path, seed: int) -> Any:
    return build_model(path, read_model_config(path), seed)


def test_the_seed_determines_new_weights(tmp_path: Path) -> None:
    file = write_config(tmp_path, "gpt2")
    weights = [build(file, seed).state_dict()["transformer.wpe.weight"] for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_weights_of_a_directory_are_loaded(tmp_path: Path) -> None:
    model = build(write_config(tmp_path, "gpt2"), seed=5)
    model.save_pretrained(tmp_path / "saved")
    loaded = build(tmp_path / "saved", seed=6)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt_1m", 1_152_128), ("gpt_2m", 2_243_040), ("gpt_10m", 10_481_152)]
)
def test_the_example_models_have_their_documented_sizes(name: str, parameters: int) -> None:
    file = Path(__file__).parents[2] / "configs" / "models" / f"{name}.json"
    assert build(file, seed=0).num_parameters() == parameters
