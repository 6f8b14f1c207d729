"""The extension of vLLM's worker, against the interface that vLLM documents; vLLM itself is not run."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.rollout.holder import make_holder
from deepspeed_compress.rollout.vllm import WeightUpdates


class Engine:
    """A model of vLLM: query, key and value are one matrix, which is loaded from three."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}
        self.loads = 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.loads += 1
        given = dict(weights)
        self.weights["qkv"] = torch.cat([given[f"layers.0.{part}.weight"] for part in "qkv"])


class Worker:
    """vLLM's worker, with methods of its own for weights."""

    def __init__(self) -> None:
        self.model_runner = SimpleNamespace(model=Engine())

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, str]) -> None: ...

    def finish_weight_update(self) -> None: ...

    def reload_weights(self) -> None: ...


def extended() -> WeightUpdates:
    """Return a worker with the extension among its bases, as vLLM makes it, which refuses names that it has itself."""
    assert not [name for name in dir(WeightUpdates) if not name.startswith("__") and hasattr(Worker, name)]
    kind: type[WeightUpdates] = type("ExtendedWorker", (Worker, WeightUpdates), {})
    return kind()


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({part: nn.Linear(8, 8, bias=False) for part in "qkv"})])
    return model


def qkv(model: nn.Module) -> Tensor:
    return torch.cat([parameter.to(torch.bfloat16) for parameter in model.parameters()])


def test_an_engine_loads_each_version_once(tmp_path: Path) -> None:
    model, worker = trained(), extended()
    publisher = Publisher(model, DirectoryStore(tmp_path))
    publisher.publish()
    worker.follow_weights(str(tmp_path))
    engine = worker.model_runner.model
    for version in (1, 2, 3):
        assert worker.load_published_weights() == version
        assert worker.load_published_weights() == version
        assert engine.loads == version
        assert torch.equal(engine.weights["qkv"], qkv(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01
        publisher.publish()


def test_a_version_that_the_engine_could_not_load_is_loaded_by_the_next_call(tmp_path: Path, monkeypatch: Any) -> None:
    model, worker = trained(), extended()
    Publisher(model, DirectoryStore(tmp_path)).publish()
    worker.follow_weights(str(tmp_path))
    engine = worker.model_runner.model

    def fail(weights: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(engine, "load_weights", fail)
    with pytest.raises(MemoryError):
        worker.load_published_weights()
    monkeypatch.undo()
    assert worker.load_published_weights() == 1
    assert torch.equal(engine.weights["qkv"], qkv(model))


def test_versions_that_were_deleted_are_an_error(tmp_path: Path) -> None:
    store, worker = DirectoryStore(tmp_path), extended()
    Publisher(trained(), store).publish()
    worker.follow_weights(str(tmp_path))
    for name in store.names():
        store.delete(name)
    with pytest.raises(RolloutError, match="have been deleted"):
        worker.load_published_weights()
    assert not worker.model_runner.model.loads


def test_a_worker_without_weights_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="call follow_weights first"):
        extended().load_published_weights()
    with pytest.raises(RolloutError, match="nothing has been published yet"):
        extended().follow_weights(str(tmp_path))


def test_a_holder_has_the_names_of_the_model(tmp_path: Path) -> None:
    model, store = trained(), DirectoryStore(tmp_path)
    Publisher(model, store).publish()
    holder = make_holder(store)
    assert Receiver(holder, store).update()
    expected = {name: parameter.to(torch.bfloat16) for name, parameter in model.named_parameters()}
    found = dict(holder.named_parameters())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
