"""Adapters of PEFT: alone as PEFT saves them, or merged as PEFT merges them."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from deepspeed_compress.errors import ConfigError, RolloutError, UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.rollout.adapter_export import AdapterExporter
from deepspeed_compress.rollout.checkpoint_names import CheckpointNames
from deepspeed_compress.rollout.module_weights import make_holder
from deepspeed_compress.rollout.versions import read_manifest
from tests.support.forks import run_forks

pytest.importorskip("peft", reason="peft is not installed: pip install peft")
transformers = pytest.importorskip("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"intermediate_size": 24, "num_key_value_heads": 2, "tie_word_embeddings": False}
CLASSES = {"Llama": "LlamaForCausalLM", "GPT2": "GPT2LMHeadModel"}
ATTENTION: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}


def make_base(family: str = "Llama", dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    torch.manual_seed(0)
    extra = LLAMA if family == "Llama" else {}
    config = getattr(transformers, f"{family}Config")(**SIZES | extra | options)
    return getattr(transformers, CLASSES[family])(config).to(dtype)


def adapt(base: Any, **settings: Any) -> Any:
    """Return a model with an adapter whose matrices are all random."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base, LoraConfig(**ATTENTION | settings))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += torch.empty_like(parameter).normal_(0, 0.1, generator=generator)
    return model


def receive(store: DirectoryStore) -> dict[str, Tensor]:
    holder = make_holder(store)
    assert Receiver(holder, store).update()
    return dict(holder.named_parameters())


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name].view(torch.uint8), value.contiguous().view(torch.uint8)), name


def merged_weights(model: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    plain = copy.deepcopy(model).merge_and_unload()
    return {name: value.detach().to(dtype) for name, value in plain.named_parameters()}


FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "embedding and head": ({}, {"target_modules": ["embed_tokens", "lm_head", "down_proj"]}),
    "rank-stabilized": ({}, {"use_rslora": True}),
    "some layers": ({}, {"layers_to_transform": [1], "exclude_modules": ["v_proj"]}),
    "bf16 base": ({"dtype": torch.bfloat16}, {}),
    "transposed": ({"family": "GPT2"}, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
}
ONLY_MERGED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a trained head": ({}, {"modules_to_save": ["lm_head"]}),
    "trained biases": ({"attention_bias": True}, {"bias": "lora_only"}),
    "several scalings": ({}, {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 3}}),
    "another base": ({}, {"init_lora_weights": "pissa"}),
}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_an_adapter_alone_is_what_peft_saves(form: str, dtype: Any, tmp_path: Path) -> None:
    from peft import PeftModel

    base, settings = FORMS[form]
    model, store = adapt(make_base(**base), **settings), DirectoryStore(tmp_path / "store")
    Publisher(model, store, dtype=dtype, adapters="alone").publish()
    exporter = AdapterExporter(store, tmp_path / "adapters")
    assert exporter.update() == [1]
    model.save_pretrained(tmp_path / "saved", save_embedding_layers=False)
    target = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    expected = load_file(tmp_path / "saved" / "adapter_model.safetensors")
    found = load_file(exporter.place(1) / "adapter_model.safetensors")
    assert_same(found, {name: value.to(target) for name, value in expected.items()})
    settings_found = json.loads((exporter.place(1) / "adapter_config.json").read_text())
    saved = json.loads((tmp_path / "saved" / "adapter_config.json").read_text())
    for key, value in settings_found.items():
        assert sorted(value) == sorted(saved[key]) if isinstance(value, list) else value == saved[key], key
    if dtype == "fp32":
        loaded = PeftModel.from_pretrained(make_base(**base), exporter.place(1))
        tokens = torch.arange(8).view(1, -1)
        assert torch.equal(loaded.eval()(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS | ONLY_MERGED)
def test_merged_weights_are_those_of_peft(form: str, dtype: Any, tmp_path: Path) -> None:
    base, settings = (FORMS | ONLY_MERGED)[form]
    model, store = adapt(make_base(**base), **settings), DirectoryStore(tmp_path)
    before = copy.deepcopy(model.state_dict())
    Publisher(model, store, dtype=dtype, adapters="merged").publish()
    target = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    found, expected = receive(store), merged_weights(model, target)
    assert_same(found, expected)
    assert CheckpointNames(model.config).convert(found).keys() == found.keys()
    assert_same(model.state_dict(), before)
    plain = make_base(**base).named_parameters()
    assert any(not torch.equal(found[name], value.to(target)) for name, value in plain)


def test_an_adapter_in_a_model_of_transformers_has_the_same_names(tmp_path: Path) -> None:
    from peft import LoraConfig

    model = make_base()
    model.add_adapter(LoraConfig(**ATTENTION | {"init_lora_weights": False}))
    for adapters in ("alone", "merged"):
        Publisher(model, DirectoryStore(tmp_path / adapters), dtype="fp32", adapters=adapters).publish()  # type: ignore[arg-type]
    model.save_pretrained(tmp_path / "saved")
    assert_same(
        receive(DirectoryStore(tmp_path / "alone")), load_file(tmp_path / "saved" / "adapter_model.safetensors")
    )
    found = receive(DirectoryStore(tmp_path / "merged"))
    plain = make_base()
    assert found.keys() == dict(plain.named_parameters()).keys()
    layer = model.model.layers[0].self_attn.q_proj
    expected = layer.base_layer.weight + layer.get_delta_weight("default")
    assert torch.equal(found["model.layers.0.self_attn.q_proj.weight"], expected)


def test_the_adapter_that_is_active_is_published(tmp_path: Path) -> None:
    from peft import LoraConfig

    model, store = adapt(make_base()), DirectoryStore(tmp_path)
    model.add_adapter("other", LoraConfig(**ATTENTION | {"init_lora_weights": False}))
    publisher = Publisher(model, store, dtype="fp32", adapters="alone")
    publisher.publish()
    first = receive(store)
    model.set_adapter("other")
    publisher.publish()
    second = receive(store)
    model.save_pretrained(tmp_path / "saved")
    assert_same(first, load_file(tmp_path / "saved" / "adapter_model.safetensors"))
    assert_same(second, load_file(tmp_path / "saved" / "other" / "adapter_model.safetensors"))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(RolloutError, match=r"several adapters are active \(default, other\)"):
        publisher.publish()


class Quantized(nn.Linear):
    """A layer of another kind than those that PEFT merges without loss."""


def quantized() -> Any:
    base = make_base()
    for layer in base.model.layers:
        layer.self_attn.q_proj.__class__ = Quantized
    return adapt(base)


def with_trained_norm() -> Any:
    model = adapt(make_base())
    model.base_model.model.model.norm.weight.requires_grad_(True)
    return model


def already_merged() -> Any:
    model = adapt(make_base())
    model.merge_adapter()
    return model


def rescaled() -> Any:
    model = adapt(make_base())
    model.base_model.model.model.layers[1].self_attn.q_proj.set_scale("default", 3)
    return model


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("make", "adapters", "problem"),
    [
        (make_base, "alone", 'LlamaForCausalLM has no active LoRA adapter of PEFT: leave "adapters" out'),
        (lambda: adapt(make_base(), use_dora=True), "alone", "the variant DoraLinearVariant of LoRA"),
        (lambda: adapt(make_base(), use_dora=True), "merged", "the variant DoraLinearVariant of LoRA"),
        (lambda: adapt(make_base(attention_bias=True), lora_bias=True), "merged", "biases of its own (lora_bias)"),
        (already_merged, "merged", "merged into the base already; call unmerge_adapter()"),
        (quantized, "merged", "test_adapters.Quantized, into which no adapter is merged"),
        (lambda: adapt(make_base(tie_word_embeddings=True), target_modules=["lm_head"]), "merged", "embed_tokens"),
        (with_trained_norm, "alone", 'norm.weight" is trained, but is no part of the adapter'),
        (lambda: adapt(make_base(), modules_to_save=["lm_head"]), "alone", "is trained, but is no part"),
        (rescaled, "alone", "is multiplied by 4.5, but engines by 1.5 in all layers"),
        (lambda: adapt(make_base(), alpha_pattern={"q_proj": 1}), "alone", "is multiplied by 0.25"),
        (lambda: adapt(make_base(), init_lora_weights="pissa"), "alone", "'pissa' has changed the base"),
        (lambda: adapt(make_base(), trainable_token_indices=[1]), "merged", "trainable_token_indices are not"),
    ],
)
def test_what_an_engine_would_not_compute_is_refused(make: Any, adapters: Any, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(problem)):
        Publisher(make(), DirectoryStore(tmp_path), adapters=adapters)


def test_a_quantized_base_may_have_an_adapter_alone(tmp_path: Path) -> None:
    assert Publisher(quantized(), DirectoryStore(tmp_path), adapters="alone").publish() is not None


def test_options_that_cannot_be_are_refused(tmp_path: Path) -> None:
    store, other = DirectoryStore(tmp_path), "apart"
    with pytest.raises(ConfigError, match=r"adapters 'apart' is not known \(allowed: alone, merged, None\)"):
        Publisher(adapt(make_base()), store, adapters=other)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="names has no effect with adapters"):
        Publisher(adapt(make_base()), store, names={"a": "b"}, adapters="alone")


def train(rank: int, stage: int, directory: str) -> None:
    """Train an adapter on two ranks, and compare each version with what PEFT makes of the gathered model."""
    section = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    section["zero_optimization"] |= {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    model = adapt(make_base(), target_modules=["q_proj", "v_proj", "embed_tokens"])
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=section | optimizer)
    stores = {form: DirectoryStore(f"{directory}/{form}") for form in ("alone", "merged")}
    publishers = [Publisher(engine, store, adapters=form) for form, store in stores.items()]  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(rank)
    sizes = []
    for _ in range(3):
        tokens = torch.randint(0, 32, (2, 8), generator=generator)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        sizes.append([publisher.publish() for publisher in publishers])
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            whole = adapt(make_base(dtype=torch.bfloat16), target_modules=["q_proj", "v_proj", "embed_tokens"])
            whole.to(torch.bfloat16).load_state_dict(engine.module.state_dict())
        if rank == 0:
            whole.save_pretrained(f"{directory}/saved", save_embedding_layers=False)
            saved = load_file(f"{directory}/saved/adapter_model.safetensors")
            assert_same(receive(stores["alone"]), saved)
            assert_same(receive(stores["merged"]), merged_weights(whole, torch.bfloat16))
        dist.barrier()
    for alone, merged in sizes:
        assert alone.full_bytes + alone.change_bytes < merged.full_bytes + merged.change_bytes
        assert alone.version == merged.version


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_ranks_publish_adapters(stage: int, tmp_path: Path) -> None:
    run_forks(2, train, stage, str(tmp_path))


def overflow(rank: int, stage: int, directory: str) -> str:
    section = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": stage}}
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}}
    model = adapt(make_base())
    with torch.no_grad():
        model.base_model.model.model.embed_tokens.weight[0] = 1e6
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=section | optimizer)
    publisher = Publisher(engine, DirectoryStore(directory), dtype="fp16", adapters="merged")
    with pytest.raises(RolloutError) as raised:
        publisher.publish()
    return str(raised.value)


def test_a_value_that_one_rank_cannot_publish_ends_the_call_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_forks(2, overflow, 3, str(tmp_path))
    assert first == second
    assert 'rank 0: RolloutError: parameter "model.embed_tokens.weight" has values above 65,504' in first


class Exports:
    """A store with versions of an adapter, and a directory for them."""

    def __init__(self, path: Path) -> None:
        self.store, self.directory = DirectoryStore(path / "store"), path / "adapters"
        self.model = adapt(make_base())
        self.publisher = Publisher(self.model, self.store, adapters="alone")

    def publish(self) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter += 0.01 * ("lora_" in name)
        self.publisher.publish()


def test_old_directories_are_removed(tmp_path: Path) -> None:
    exports = Exports(tmp_path)
    exporter = AdapterExporter(exports.store, exports.directory, keep=2)
    assert exporter.update() == []
    for version in range(1, 5):
        exports.publish()
        assert exporter.update(version) == [version]
        assert exporter.update() == []
    assert sorted(one.name for one in exports.directory.glob("adapter*")) == ["adapter_v000003", "adapter_v000004"]
    exports.publish()
    assert AdapterExporter(exports.store, exports.directory, keep=2).update() == [5]


def test_a_directory_of_another_store_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    exports = Exports(tmp_path)
    exports.publish()
    AdapterExporter(exports.store, exports.directory).update()
    other = Exports(tmp_path / "other")
    other.model.base_model.model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.data += 1
    other.publish()
    exporter = AdapterExporter(other.store, exports.directory)
    with pytest.raises(RolloutError, match="adapter_v000001 is of another store"):
        exporter.update(1)
    file = exports.directory / "adapter_v000001" / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(RolloutError, match="adapter_v000001 is damaged"):
        exporter.update(1)


def test_weights_are_no_adapter(tmp_path: Path) -> None:
    Publisher(make_base(), DirectoryStore(tmp_path / "store")).publish()
    with pytest.raises(RolloutError, match='version 1 has weights, but no adapter: publish with "adapters": "alone"'):
        AdapterExporter(DirectoryStore(tmp_path / "store"), tmp_path / "adapters").update()


@pytest.mark.parametrize(
    "change",
    [
        {"auto_mapping": {"parent_library": "os"}},
        {"peft_type": "OTHER"},
        {"r": 0},
        {"bias": "all"},
        {"target_modules": 3},
    ],
)
def test_settings_of_a_hostile_manifest_are_refused(change: dict[str, Any], tmp_path: Path) -> None:
    exports = Exports(tmp_path)
    exports.publish()
    [file] = (tmp_path / "store").glob("*manifest")
    manifest = json.loads(file.read_text())
    manifest["adapter"] |= change
    file.write_text(json.dumps(manifest))
    with pytest.raises(RolloutError, match="the manifest of version 1 is malformed"):
        read_manifest(exports.store, 1)
