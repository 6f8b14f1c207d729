"""A rank never holds more than what it keeps and one tensor besides."""

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
from deepspeed_compress.models.filling import fill
from deepspeed_compress.models.skeleton import build_skeleton
from deepspeed_compress.models.sources import open_source
from tests.models.families import MODELS, save_model
from tests.models.runs import SEED
from tests.support.forks import run_forks

SMALL = 1024
"""Bytes of tables of rotations and of numbers that are tensors for a moment."""


class Alive(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors on the CPU that operations inside meet, until they are freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Tensors that are read from files are made outside: they are met when they are used.
        self._meet((args, kwargs))
        result = function(*args, **(kwargs or {}))
        self._meet(result)
        return result

    def _meet(self, values: Any) -> None:
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


def test_the_count_follows_what_is_freed() -> None:
    with Alive() as alive:
        kept = torch.zeros(100)
        dropped = kept + 1
        view = dropped[:3]
        assert alive.bytes == 800
        del dropped
        assert alive.bytes == 800
        del view
        assert (alive.bytes, alive.peak) == (400, 800)


@dataclass(frozen=True)
class Loaded:
    """Bytes that a rank keeps, that are alive after loading, and that were alive at a time, at most."""

    shard: int
    after: int
    peak: int


def load(rank: int, path: Path, layout: Layout) -> Loaded:
    deepspeed.init_distributed("gloo")
    config = read_model_config(path)
    with Alive() as alive:
        module = build_parallel(path, config, SEED, layout)
        gc.collect()
    shard = sum(parameter.untyped_storage().nbytes() for parameter in module.parameters())
    return Loaded(shard, alive.bytes, alive.peak)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize(
    "layout", [Layout(pipeline=2, partition="uniform"), Layout(tensor=2)], ids=["stages", "slices"]
)
def test_peak_of_loading(family: str, layout: Layout, tmp_path: Path) -> None:
    """Embedding and head are the largest tensors, and the head comes last, when all else is there."""
    path = save_model(tmp_path, family, tied=False, vocab_size=600)
    sizes = [parameter.numel() * 4 for parameter in build_skeleton(read_model_config(path)).parameters()]
    for rank in run_forks(2, load, path, layout):
        assert rank.after <= rank.shard + SMALL
        assert rank.peak <= rank.shard + max(sizes) + SMALL < sum(sizes)


@pytest.mark.parametrize("family", MODELS)
def test_skeleton_has_the_tables_of_the_model(family: str, tmp_path: Path) -> None:
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
def test_tables_of_stretched_rotations(kind: str, tmp_path: Path) -> None:
    check_tables(save_model(tmp_path, "llama", rope_parameters=ROTATIONS[kind] | {"rope_theta": 1e4}))


def check_tables(path: Path) -> None:
    """Buffers and weights, filled in without any group, are those of the model that transformers loads."""
    config = read_model_config(path)
    whole, filled = build_model(path, config, SEED), build_skeleton(config)
    fill(filled, open_source(path, filled, SEED))
    for mine, theirs in ((filled.buffers(), whole.buffers()), (filled.parameters(), whole.parameters())):
        for made, wanted in zip(mine, theirs, strict=True):
            assert torch.equal(made, wanted)
            assert made.dtype == wanted.dtype
