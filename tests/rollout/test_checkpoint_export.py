"""Versions in the layout of SGLang's /pull_weights, and what is refused of them."""

import filecmp
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import xxhash
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepspeed_compress import safe_files
from deepspeed_compress.errors import RolloutError, UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Publisher
from deepspeed_compress.rollout.checkpoint_export import CheckpointExporter, find_directories

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 8, "num_experts_per_tok": 2}


def train(model: nn.Module) -> None:
    """Change a few values of each parameter."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.view(-1)[::7] += 0.25


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    return {name: value for file in checkpoint.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value)


def read_version(directory: Path, version: int) -> dict[str, Tensor]:
    """Return the tensors of a version as SGLang reads them, whose checksums are verified."""
    place = directory / f"weight_v{version:06d}"
    index = json.loads((place / "model.safetensors.index.json").read_text())
    metadata = index["metadata"]
    if "delta_encoding" not in metadata:
        found, checksums = tensors(place), metadata["checksums"]
        assert {file.name for file in place.glob("*.safetensors")} == {*index["weight_map"].values()}
    else:
        found, checksums = read_version(directory, version - 1), dict[str, str]()
        for file in {*index["weight_map"].values()}:
            with safe_open(place / file, "pt") as opened:
                checksums |= opened.metadata()
            for name, payload in load_file(place / file).items():
                change = zstandard.ZstdDecompressor().decompress(payload.numpy().tobytes())
                found[name].view(-1).view(torch.uint8).bitwise_xor_(
                    torch.frombuffer(bytearray(change), dtype=torch.uint8)
                )
    assert checksums == {name: xxhash.xxh3_128_hexdigest(bits(found[name])) for name in checksums}
    return found


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    ("family", "options", "shard"),
    [("Qwen3", {"tie_word_embeddings": True}, "1GB"), ("Qwen3Moe", EXPERTS, "1GB"), ("Qwen3Moe", EXPERTS, "6KB")],
    ids=["tied", "packed", "sharded"],
)
def test_versions_are_what_save_pretrained_writes(
    family: str, options: dict[str, Any], shard: str, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = getattr(transformers, f"{family}Config")(**SIZES, **heads, **options)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    base, directory, store = tmp_path / "base", tmp_path / "versions", DirectoryStore(tmp_path / "store")
    model.save_pretrained(base, max_shard_size=shard)
    publisher = Publisher(model, store)
    for version in range(1, 6):
        publisher.publish(full=version == 4)
        model.save_pretrained(tmp_path / f"expected{version}", max_shard_size=shard)
        train(model)
        if version in (1, 3):  # An exporter that was restarted after version 1 has missed version 2.
            exporter = CheckpointExporter(store, directory, base)
        if version != 2:
            assert exporter.update() == ([2, 3] if version == 3 else [version])
    for version in range(1, 6):
        place, expected = directory / f"weight_v{version:06d}", tmp_path / f"expected{version}"
        assert_equal(read_version(directory, version), tensors(expected))
        files = [file.name for file in expected.iterdir() if not file.name.endswith("index.json")]
        if version in (1, 2, 4):
            assert filecmp.cmpfiles(expected, place, files, shallow=False)[0] == files
        else:
            assert sorted(file.name for file in place.iterdir()) == [
                "model-00000-of-00001.safetensors",
                "model.safetensors.index.json",
            ]


class Stream:
    """A model of two tensors, and the versions of its store. `published` has the values of the newest one."""

    def __init__(self, path: Path, versions: int = 3) -> None:
        self.base, self.directory, self.store = path / "base", path / "versions", DirectoryStore(path / "store")
        self.model = nn.Linear(8, 4, dtype=torch.bfloat16)
        nn.init.ones_(self.model.bias)
        self.base.mkdir()
        save_file({**self.model.state_dict(), "unpublished": torch.ones(2)}, self.base / "model.safetensors")
        self.publisher = Publisher(self.model, self.store, full_every=4, keep_full=1)
        self.exporter = CheckpointExporter(self.store, self.directory, self.base)
        self.publish(versions)

    def publish(self, versions: int) -> None:
        for _ in range(versions):
            self.publisher.publish()
            self.exporter.update()
            self.published = {name: value.clone() for name, value in self.model.state_dict().items()}
            with torch.no_grad():
                self.model.weight.view(-1)[::7] += 0.25

    def file(self, version: int, name: str) -> Path:
        return self.directory / f"weight_v{version:06d}" / name


def test_a_delta_has_the_layout_of_slime(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    file = "model-00000-of-00001.safetensors"
    assert json.loads(stream.file(3, "model.safetensors.index.json").read_text()) == {
        "metadata": {
            "version": "000003",
            "base_version": "000002",
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "xxh3-128",
        },
        "weight_map": {"weight": file},
    }
    old, new = (bits(read_version(stream.directory, version)["weight"]) for version in (2, 3))
    with safe_open(stream.file(3, file), "np") as opened:
        payload, checksums = opened.get_tensor("weight"), opened.metadata()
    assert checksums == {"weight": xxhash.xxh3_128_hexdigest(new)}
    assert payload.dtype == np.uint8
    change = zstandard.ZstdDecompressor().decompress(payload.tobytes())
    assert change == bytes(one ^ other for one, other in zip(old, new, strict=True))


def test_versions_are_deleted_with_those_of_the_store_and_missed_ones_are_followed_by_a_full_one(
    tmp_path: Path,
) -> None:
    stream = Stream(tmp_path, versions=6)
    assert find_directories(stream.directory) == [5, 6]
    assert_equal(read_version(stream.directory, 6), {**tensors(stream.base), **stream.published})
    for _ in range(6):
        stream.publisher.publish()
    assert stream.exporter.update() == [12]
    assert find_directories(stream.directory) == [12]
    assert read_version(stream.directory, 12)["weight"].equal(stream.model.weight)


def test_another_store_is_refused(tmp_path: Path) -> None:
    stream, store = Stream(tmp_path), DirectoryStore(tmp_path / "other")
    Publisher(stream.model, store).publish()
    other = CheckpointExporter(store, stream.directory, stream.base)
    with pytest.raises(RolloutError, match="has version 3, but the store ends at 1: use the directory with one store"):
        other.update()


def test_two_exporters_write_what_each_can(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    other = CheckpointExporter(stream.store, stream.directory, stream.base)
    stream.publisher.publish()
    assert (other.update(), stream.exporter.update()) == ([4], [])
    stream.publish(2)
    assert_equal(read_version(stream.directory, 6), {**tensors(stream.base), **stream.published})


def test_a_version_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(tmp_path, versions=2)
    stream.publisher.publish()
    with monkeypatch.context() as patch:
        patch.setattr(safe_files, "sync_directory", Mock(side_effect=OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            stream.exporter.update()
    assert stream.exporter.update() == [3]
    assert read_version(stream.directory, 3)["weight"].equal(stream.model.weight)


def test_a_tied_weight_that_the_checkpoint_repeats_is_repeated(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(**SIZES, tie_word_embeddings=True, num_attention_heads=2, num_key_value_heads=2)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    embedding = model.model.embed_tokens.weight.detach()
    save_file({**tensors(tmp_path), "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    store, directory = DirectoryStore(tmp_path / "store"), tmp_path / "versions"
    train(model)
    Publisher(model, store).publish()
    CheckpointExporter(store, directory, tmp_path).update()
    assert read_version(directory, 1)["lm_head.weight"].equal(embedding)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    settings = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match="is quantized"):
        CheckpointExporter(DirectoryStore(tmp_path / "store"), tmp_path / "versions", tmp_path)
