"""Versions in the layout of SGLang's /pull_weights, and what is refused of them."""

import filecmp
import json
import os
import re
import shutil
import zlib
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import zstandard
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deepspeed_compress import safe_files
from deepspeed_compress.errors import RolloutError, UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Publisher
from deepspeed_compress.rollout.checkpoint_export import CheckpointExporter
from deepspeed_compress.rollout.hf_delta import Encoding, find_directories, read_version

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


def write_index(directory: Path, version: int, files: dict[str, str], metadata: dict[str, str] | None = None) -> Path:
    """Write the index of a version, and return the directory of the version."""
    place = directory / f"weight_v{version:06d}"
    place.mkdir()
    index = {"metadata": metadata or {}, "weight_map": files}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return place


@pytest.mark.parametrize(
    ("family", "options", "shard", "encoding", "checksum"),
    [
        ("Qwen3", {"tie_word_embeddings": True}, "1GB", "xor", "xxh3-128"),
        ("Qwen3Moe", EXPERTS, "1GB", "overwrite", "xxh3-128"),
        ("Qwen3Moe", EXPERTS, "6KB", "xor", "adler32"),
    ],
    ids=["tied", "packed", "sharded"],
)
def test_versions_are_what_save_pretrained_writes(
    family: str, options: dict[str, Any], shard: str, encoding: Encoding, checksum: Any, tmp_path: Path
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
        if version != 2:  # An exporter that was restarted after version 1 has missed version 2.
            exporter = CheckpointExporter(store, directory, base, encoding, checksum)
            assert exporter.update() == ([2, 3] if version == 3 else [version])
    for version in range(1, 6):
        place, expected = directory / f"weight_v{version:06d}", tmp_path / f"expected{version}"
        assert_equal(read_version(directory, version), tensors(expected))
        files = [file.name for file in expected.iterdir() if not file.name.endswith("index.json")]
        if version in (1, 4):
            assert filecmp.cmpfiles(expected, place, files, shallow=False)[0] == files
        else:
            assert sorted(file.name for file in place.iterdir()) == [
                "model-00000-of-00001.safetensors",
                "model.safetensors.index.json",
            ]


class Stream:
    """A model of two tensors, and the versions of its store. `published` has the values of the newest one."""

    def __init__(self, path: Path, encoding: Encoding = "xor", versions: int = 3) -> None:
        self.base, self.directory, self.store = path / "base", path / "versions", DirectoryStore(path / "store")
        self.model = nn.Linear(8, 4, dtype=torch.bfloat16)
        nn.init.ones_(self.model.bias)
        self.base.mkdir()
        save_file({**self.model.state_dict(), "unpublished": torch.ones(2)}, self.base / "model.safetensors")
        self.publisher = Publisher(self.model, self.store, full_every=4, keep_full=1)
        self.exporter = CheckpointExporter(self.store, self.directory, self.base, encoding, "adler32")
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


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_a_delta_has_the_layout_of_slime(encoding: Encoding, tmp_path: Path) -> None:
    stream = Stream(tmp_path, encoding)
    file = "model-00000-of-00001.safetensors"
    assert json.loads(stream.file(3, "model.safetensors.index.json").read_text()) == {
        "metadata": {
            "version": "000003",
            "base_version": "000002",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": "adler32",
        },
        "weight_map": {"weight": file},
    }
    old, new = (read_version(stream.directory, version)["weight"].view(torch.uint8).numpy() for version in (2, 3))
    with safe_open(stream.file(3, file), "np") as opened:
        payload, checksums = opened.get_tensor("weight"), opened.metadata()
    assert checksums == {"weight": f"{zlib.adler32(new.tobytes()):08x}"}
    assert payload.dtype == np.uint8
    change = zstandard.ZstdDecompressor().decompress(payload.tobytes())
    positions = np.flatnonzero(old != new).astype("<u4")
    written = np.uint32(len(positions)).tobytes() + positions.tobytes() + new.flatten()[positions].tobytes()
    assert change == (written if encoding == "overwrite" else (old ^ new).tobytes())


def test_versions_are_deleted_with_those_of_the_store_and_missed_ones_are_followed_by_a_full_one(
    tmp_path: Path,
) -> None:
    stream = Stream(tmp_path, versions=6)
    assert find_directories(stream.directory) == [5, 6]
    assert_equal(read_version(stream.directory), {**tensors(stream.base), **stream.published})
    for _ in range(6):
        stream.publisher.publish()
    assert stream.exporter.update() == [12]
    assert find_directories(stream.directory) == [12]
    assert read_version(stream.directory)["weight"].equal(stream.model.weight)


def test_another_store_and_another_exporter_are_refused(tmp_path: Path) -> None:
    stream, store = Stream(tmp_path), DirectoryStore(tmp_path / "other")
    Publisher(stream.model, store).publish()
    other = CheckpointExporter(store, stream.directory, stream.base)
    with pytest.raises(RolloutError, match="has version 3, but the store ends at 1: use the directory with one store"):
        other.update()
    stream.publish(1)
    with pytest.raises(RolloutError, match="another process has written version 4"):
        other.update()


def test_a_version_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Stream(tmp_path, versions=2)
    stream.publisher.publish()
    with monkeypatch.context() as patch:
        patch.setattr(safe_files, "sync_directory", Mock(side_effect=OSError("the disk is full")))
        with pytest.raises(OSError, match="the disk is full"):
            stream.exporter.update()
    assert stream.exporter.update() == [3]
    assert read_version(stream.directory)["weight"].equal(stream.model.weight)


def find_problem(directory: Path, expected: dict[str, Tensor]) -> str:
    """Return why the newest version is refused; an empty text if it is as expected."""
    try:
        assert_equal(read_version(directory), expected)
    except RolloutError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("ending", [".safetensors", ".json"])
def test_a_changed_byte_and_a_truncated_file_are_refused_by_name(
    ending: str, version: int, encoding: Encoding, tmp_path: Path
) -> None:
    stream = Stream(tmp_path, encoding, versions=2)
    expected, problems = read_version(stream.directory), list[str]()
    (file,) = stream.file(version, "").glob(f"*{ending}")
    data = file.read_bytes()
    for place in range(0, len(data), 5):
        for content in (data[:place], data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]):
            file.write_bytes(content)
            problems.append(find_problem(stream.directory, expected))
    # Some bytes mean nothing, such as spaces between the keys of an index.
    found = [problem for problem in problems if problem]
    assert len(found) > 0.8 * len(problems)
    assert all(file.parent.name in problem for problem in found)


@pytest.mark.parametrize("file", ["/etc/passwd", "../base/model.safetensors", "sub/model.safetensors", "config.json"])
def test_an_index_cannot_name_files_elsewhere(file: str, tmp_path: Path) -> None:
    write_index(tmp_path, 1, {"weight": file})
    with pytest.raises(RolloutError, match=rf"index.json is damaged(.|\n)*{re.escape(file)}"):
        read_version(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_refused_at_once(name: str, tmp_path: Path) -> None:
    write_index(tmp_path, 1, {"weight": "model.safetensors"})
    file = tmp_path / "weight_v000001" / name
    file.unlink(missing_ok=True)
    os.mkfifo(file)
    with pytest.raises(RolloutError, match=f"{name} is damaged"):
        read_version(tmp_path)


@pytest.mark.parametrize(("encoding", "size"), [("xor", 1), ("xor", 1 << 30), ("overwrite", 1 << 30)])
def test_a_change_cannot_be_larger_than_its_tensor(encoding: str, size: int, tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(16)}, tmp_path / "model.safetensors")
    metadata = {"version": "000001", "base_version": "000000", "delta_encoding": encoding, "checksum_format": "adler32"}
    place = write_index(tmp_path, 1, {"weight": "model.safetensors"}, metadata)
    payload = zstandard.ZstdCompressor().compress(bytes(size))
    save_file({"weight": torch.tensor(list(payload), dtype=torch.uint8)}, place / "model.safetensors", {"weight": "0"})
    with pytest.raises(RolloutError, match=f"the change of a tensor of 64 bytes has {size} bytes"):
        read_version(tmp_path, base=tmp_path)


def test_a_missing_version_and_a_missing_base_are_refused_by_name(tmp_path: Path) -> None:
    stream = Stream(tmp_path)
    shutil.rmtree(stream.file(2, ""))
    with pytest.raises(RolloutError, match=r"version 3 cannot be read: .*weight_v000002 is missing"):
        read_version(stream.directory)
    with pytest.raises(RolloutError, match="pass base"):
        read_version(stream.directory, 0)


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
    assert read_version(directory)["lm_head.weight"].equal(embedding)


def test_a_quantized_checkpoint_is_refused(tmp_path: Path) -> None:
    settings = {"model_type": "qwen3", "quantization_config": {"quant_method": "fp8"}}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(UnsupportedError, match="is quantized"):
        CheckpointExporter(DirectoryStore(tmp_path / "store"), tmp_path / "versions", tmp_path)
