"""Control of vLLM's engines, and the names that they load. See `test_vllm_engine` for the engines themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed_compress.errors import RolloutError, UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.rollout.checkpoint_names import CheckpointNames
from deepspeed_compress.rollout.module_weights import make_holder
from deepspeed_compress.rollout.vllm import LocalEngine, ServedEngine, follow_weights, load_version
from deepspeed_compress.rollout.vllm_adapters import ServedAdapters
from tests.support import http_servers


def trained() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleDict({part: nn.Linear(8, 8, bias=False) for part in "qkv"})])
    return model


@pytest.mark.parametrize("family", ["Qwen3Moe", "Mixtral"])
def test_experts_have_the_names_and_shapes_of_a_checkpoint(family: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 8}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    found = CheckpointNames(model.config).convert(dict(model.named_parameters()))
    expected = load_file(tmp_path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_names_of_a_model_that_transformers_does_not_have_stay_as_they_are() -> None:
    weights = dict(trained().named_parameters())
    assert CheckpointNames(None).convert(weights) is weights


def test_adapters_of_peft_are_refused() -> None:
    model = nn.ModuleDict({"base_model": nn.ModuleDict({"model": trained()})})
    with pytest.raises(UnsupportedError, match=r'is a name of PEFT, which no engine has .*"adapters": "merged"'):
        CheckpointNames(None).convert(dict(model.named_parameters()))


class Llm:
    """The methods of `vllm.LLM` that concern weights."""

    def __init__(self, resets: bool = True) -> None:
        self.resets, self.calls = resets, list[Any]()

    def init_weight_transfer_engine(self, request: Any) -> None:
        self.calls.append(request)

    def start_weight_update(self) -> None:
        self.calls.append("start")

    def update_weights(self, request: Any) -> None:
        self.calls.append(request)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(weight_version)

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return self.resets


def test_an_engine_in_this_process_loads_a_version_and_forgets_its_prefixes() -> None:
    llm = Llm()
    follow_weights(LocalEngine(llm), "/shared/policy")
    load_version(LocalEngine(llm), 3)
    update = ["start", {"update_info": {"version": 3}}, "3", "reset"]
    assert llm.calls == [{"init_info": {"place": "/shared/policy"}}, *update]
    with pytest.raises(RolloutError, match="because requests run"):
        load_version(LocalEngine(Llm(resets=False)), 3)


class Handler(http_servers.Handler, BaseHTTPRequestHandler):
    """A server that fails to load version 13, and has no other routes than those for weights."""

    calls: list[tuple[str, Any]]

    def do_POST(self) -> None:
        body = self.read_json()
        self.calls.append((self.path, body))
        missing = 404 if body == {"init_info": {"place": ""}} else 200
        self.answer(b"the reason", 500 if body == {"update_info": {"version": 13}} else missing)


@contextmanager
def served() -> Iterator[str]:
    Handler.calls = []
    with http_servers.serving(HTTPServer(("127.0.0.1", 0), Handler)) as url:
        yield url


def test_a_server_is_paused_during_an_update_and_stays_so_if_it_fails() -> None:
    with served() as url:
        engine = ServedEngine(f"{url}/", "keep")
        load_version(engine, 12)
        with pytest.raises(RolloutError, match="update_weights has failed with status 500: the reason"):
            load_version(engine, 13)
        with pytest.raises(RolloutError, match="404; start it with VLLM_SERVER_DEV_MODE=1"):
            follow_weights(engine, "")
    begin = [("/pause?mode=keep", {}), ("/start_weight_update", {})]
    assert Handler.calls == [
        *begin,
        ("/update_weights", {"update_info": {"version": 12}}),
        ("/finish_weight_update", {"weight_version": "12"}),
        ("/reset_prefix_cache?reset_running_requests=true", {}),
        ("/resume", {}),
        *begin,
        ("/update_weights", {"update_info": {"version": 13}}),
        ("/init_weight_transfer_engine", {"init_info": {"place": ""}}),
    ]


def publish_adapter(store: Path, versions: int) -> None:
    """Publish versions of an adapter."""
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(trained(), peft.LoraConfig(r=1, target_modules=["q"]))
    publisher = Publisher(model, DirectoryStore(store), adapters="alone")
    for _ in range(versions):
        with torch.no_grad():
            model.base_model.model.layers[0]["q"].lora_B["default"].weight += 1
        publisher.publish()


def test_a_server_has_the_newest_adapters_under_a_name_for_each_version(tmp_path: Path) -> None:
    publish_adapter(tmp_path / "store", 4)
    with served() as url:
        adapters = ServedAdapters(f"{url}/", str(tmp_path / "store"), str(tmp_path / "adapters"))
        assert [adapters.load(version) for version in (1, 2, 2, 4)] == ["policy@1", "policy@2", "policy@2", "policy@4"]
    places = {version: tmp_path / "adapters" / f"adapter_v00000{version}" for version in (1, 2, 4)}
    loads = [
        ("/v1/load_lora_adapter", {"lora_name": f"policy@{version}", "lora_path": str(place), "load_inplace": True})
        for version, place in places.items()
    ]
    assert Handler.calls == [*loads, ("/v1/unload_lora_adapter", {"lora_name": "policy@1"})]
    assert all((place / "adapter_config.json").exists() for place in places.values())


def test_a_receiver_tells_what_has_changed_on_the_way_to_a_version(tmp_path: Path) -> None:
    model, store = trained(), DirectoryStore(tmp_path)
    publisher = Publisher(model, store)
    for step in range(4):
        with torch.no_grad():
            model.layers[0]["k"].weight.view(-1)[3 * step + 2] += 1  # type: ignore[operator, index]
        publisher.publish()
    changes: list[tuple[str, Any]] = []
    receiver = Receiver(make_holder(store), store, lambda name, positions: changes.append((name, positions)))
    assert receiver.update(2)
    assert receiver.version == 2
    assert {name for name, positions in changes if positions is None} == dict(model.named_parameters()).keys()
    changes.clear()
    assert receiver.update(4)
    found = [(name, positions.tolist()) for name, positions in changes if positions.size]
    assert found == [("layers.0.k.weight", [8]), ("layers.0.k.weight", [11])]
    assert all(positions.dtype == np.int64 for _, positions in changes)
    with pytest.raises(RolloutError, match="version 7 is no longer in the store"):
        receiver.update(7)


def test_a_holder_has_the_names_of_the_model(tmp_path: Path) -> None:
    model, store = trained(), DirectoryStore(tmp_path)
    with pytest.raises(RolloutError, match="nothing has been published yet"):
        make_holder(store)
    Publisher(model, store).publish()
    holder = make_holder(store)
    assert Receiver(holder, store).update()
    expected: dict[str, Tensor] = {name: value.to(torch.bfloat16) for name, value in model.named_parameters()}
    found = dict(holder.named_parameters())
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
