"""The rank program of `bench step`: all contenders, on two ranks with a toy model."""

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench import systems
from deepspeed_compress.tools.bench.gauges import Peak, join
from deepspeed_compress.tools.bench.options import PEERS
from deepspeed_compress.tools.bench.step_rank import measure_group
from deepspeed_compress.tools.bench.workload import Group, Workload, group_contenders
from tests.support.forks import run_forks

TOY = {"model_type": "gpt2", "vocab_size": 128, "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
NATIVE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
}
STEPS: dict[str | None, int] = {None: 2}


def group(
    directory: Path,
    section: dict[str, Any],
    peers: tuple[str, ...],
    extra: Mapping[str, Any] = MappingProxyType({}),
    shape: Mapping[str, Any] = MappingProxyType(TOY),
) -> Group:
    model, config = directory / "toy.json", directory / "zero1.json"
    model.write_text(json.dumps(dict(shape)))
    config.write_text(json.dumps({**NATIVE, **extra, "deepspeed_compress": section}))
    sizes = {"micro_batch": None, "seq_len": 16, "seed": 0}
    [found] = group_contenders([str(config)], str(model), peers, sizes, ranks=2)
    return found


def measured(rank: int, found: Group) -> tuple[list[dict[str, Any]], list[str]]:
    join()
    rows: list[dict[str, Any]] = []
    progress: list[str] = []
    measure_group(found, STEPS, rows.append, progress.append)
    dist.destroy_process_group()
    return rows, progress


@pytest.mark.slow
def test_all_contenders_are_measured(tmp_path: Path) -> None:
    section = {"parallelism": {"zero_stage": 1}, "gradients": {"bits": 4}, "schedule": {"warmup_steps": 100}}
    found = group(tmp_path, section, PEERS)
    (rows, progress), _ = run_forks(2, measured, found)
    names = ["deepspeed", "zero1", *PEERS[1:]]
    assert [row["contender"]["name"] for row in rows] == names
    assert progress == ["compute only", *names]
    for row in rows:
        assert row["ranks"] == 2
        assert 0 < row["step_s"]["min"] <= row["step_s"]["median"] <= row["step_s"]["max"]
        assert len(row["peak_bytes"]) == 2
        assert min(row["peak_bytes"]) >= 0
    ours = rows[names.index("zero1")]
    sizes = ours["traffic"][0]
    # DeepSpeed sends twice as many elements, in fp32. This package sends 4 bits, and a scale for 256 elements.
    assert sizes["bytes_uncompressed"] / sizes["bytes_sent"] == pytest.approx(2 * 32 / 4.125, rel=0.05)
    assert sizes["predicted"] == sizes["bytes_sent"] + sizes["bytes_weights"]
    assert sizes["predicted_uncompressed"] == sizes["bytes_uncompressed"] + sizes["bytes_weights"]
    assert all(size > 0 for size in ours["residual_bytes"])
    assert set(ours["split_ms"]) == {"compute", "compress", "communicate", "decompress"}
    assert rows[0]["split_ms"] is None
    assert rows[0]["residual_bytes"] == [None, None]


def test_stages_of_a_pipeline_are_measured(tmp_path: Path) -> None:
    section = {"parallelism": {"pipeline": 2}, "gradients": {"method": "none"}}
    (rows, _), _ = run_forks(2, measured, group(tmp_path, section, ("deepspeed", "ddp")))
    assert [row["contender"]["name"] for row in rows] == ["deepspeed", "zero1", "ddp"]
    assert all(rank["bytes_pipeline"] > 0 for rank in rows[1]["traffic"])


LLAMA = {
    "model_type": "llama",
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_adapters_alone_are_trained_and_sent(tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="it comes with the dev extra")
    file = tmp_path / "zero2.json"
    section = {"parallelism": {"zero_stage": 2}, "gradients": {"bits": 4}}
    file.write_text(json.dumps({**NATIVE, "deepspeed_compress": section}))
    (tmp_path / "toy.json").write_text(json.dumps(TOY))
    sizes = {"micro_batch": None, "seq_len": 16, "seed": 0, "lora_rank": 4}
    [found] = group_contenders([str(file)], str(tmp_path / "toy.json"), ("deepspeed", "ddp"), sizes, ranks=2)
    (rows, _), _ = run_forks(2, measured, found)
    assert [row["contender"]["name"] for row in rows] == ["deepspeed", "zero2", "ddp"]
    # Matrices of a layer: 32 x 96, 32 x 32, 32 x 128 and 128 x 32. Both micro-batches send, in fp32.
    trained = 4 * 2 * (32 + 96 + 32 + 32 + 32 + 128 + 128 + 32)
    assert rows[1]["traffic"][0]["bytes_uncompressed"] == 2 * 4 * trained


def test_adapters_of_divided_layers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "tensor.json").write_text(json.dumps({**NATIVE, "deepspeed_compress": {"parallelism": {"tensor": 2}}}))
    sizes = {"micro_batch": None, "seq_len": 16, "seed": 0, "lora_rank": 4}
    with pytest.raises(ConfigError, match="--lora-rank: adapters need whole layers"):
        group_contenders([str(tmp_path / "tensor.json")], "toy.json", (), sizes, ranks=4)


@pytest.mark.slow
def test_parts_of_sequences_are_measured(tmp_path: Path) -> None:
    section = {"gradients": {"method": "none"}, "activations": {"sequence": {"bits": 8}}}
    found = group(tmp_path, section, ("deepspeed",), {"sequence_parallel_size": 2}, LLAMA)
    (rows, _), _ = run_forks(2, measured, found)
    assert [row["contender"]["name"] for row in rows] == ["deepspeed", "zero1"]
    for rank in rows[1]["traffic"]:
        assert rank["bytes_sequence"] > 0
        saved = rank["predicted_uncompressed"] - rank["predicted"]
        assert (
            saved == rank["bytes_sequence_saved"] == pytest.approx(rank["bytes_sequence"] * (32 / 8.25 - 1), rel=1e-2)
        )


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is known only on Linux")
def test_peak_counts_new_memory_and_can_be_reset() -> None:
    kept = torch.ones(10_000_000)
    peak = Peak()
    block = torch.ones(25_000_000)
    held = peak.bytes()
    del block
    peak.begin()
    after = peak.bytes()
    assert kept.numel() == 10_000_000
    assert held is not None
    assert after is not None
    assert 95e6 < held < 130e6
    assert after < 20e6


def test_attention_is_restored_if_no_engine_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def attention(model: nn.Module, workload: Workload) -> Iterator[None]:
        events.append("replaced")
        try:
            yield
        finally:
            events.append("restored")

    def initialize(**_: Any) -> None:
        raise RuntimeError("no device")

    events: list[str] = []
    monkeypatch.setattr(systems, "attention_on_ulysses", attention)
    monkeypatch.setattr(deepspeed, "initialize", initialize)
    found = group(tmp_path, {"gradients": {"method": "none"}}, ("deepspeed",))
    with pytest.raises(RuntimeError, match="no device"):
        systems.make(replace(found.workload, sequence=2), found.contenders[0])
    assert events == ["replaced", "restored"]
