"""`bench kernels` with few elements: all operations, the table and the file."""

import json
import re
from pathlib import Path

import pytest
import torch

from deepspeed_compress.cli import main
from deepspeed_compress.compression.kernels import implementations, reference
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.tools.bench.kernels import OPERATIONS, bytes_moved, measure
from tests.support.processes import run_python

CPU = torch.device("cpu")
NUMEL = 3 * 4096 + 5


def test_every_operation_is_compared_with_a_copy() -> None:
    threads = torch.get_num_threads()
    rows = measure(NUMEL, CPU, 3)
    copy, *others = rows
    assert (copy["operation"], copy["of_copy"]) == ("copy", 1.0)
    in_use = next(iter(implementations(CPU)))
    assert [(row["operation"], row["implementation"]) for row in others] == [(name, in_use) for name in OPERATIONS]
    for row in rows:
        times = row["seconds"]
        assert 0 < times["min"] <= times["median"] <= times["max"]
        assert row["gb_per_s"] == pytest.approx(4e-9 * NUMEL / times["min"])
        # Both are relative to the same copy, which moves eight bytes an element.
        bytes_an_element = row["bytes_moved"] / NUMEL
        assert row["moved_of_copy"] == pytest.approx(row["of_copy"] * bytes_an_element / 8)
    assert copy["bytes_moved"] == 8 * NUMEL
    assert torch.get_num_threads() == threads


EVEN = 1 << 14
SCALES = 4 * EVEN // 256


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("quantize int8", 5 * EVEN + SCALES),
        ("quantize int4", 4.5 * EVEN + SCALES),
        ("quantize int4, bf16 memory", 8.5 * EVEN + SCALES),
        ("decode-accumulate int4", 8.5 * EVEN + SCALES),
        ("decode-accumulate sign", 8.125 * EVEN + SCALES),
        ("block top-k 1 % of 4096", 4 * EVEN + 8 * 41 * EVEN / 4096),
    ],
)
def test_every_byte_is_counted_once_and_accumulators_twice(name: str, moved: float) -> None:
    assert bytes_moved(name, reference, torch.randn(EVEN)) == moved


def test_torch_and_rich_are_all_that_is_loaded() -> None:
    """A machine with a GPU may have nothing else."""
    program = (
        "import sys, deepspeed_compress.cli, deepspeed_compress.tools.bench.options, "
        "deepspeed_compress.tools.bench.kernels; print(*sys.modules)"
    )
    done = run_python("-c", program, check=True)
    assert not {"deepspeed", "pydantic", "hjson", "transformers", "yaml"} & set(done.stdout.split())


def test_bench_kernels_prints_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "kernels.json"
    arguments = ["--numel", "8192", "--repeats", "1", "--only", "sign", "--json", str(file)]
    assert main(["bench", "kernels", *arguments]) == 0
    out = capsys.readouterr().out
    assert re.search(r"8,192 fp32 elements on one core of .* with \S+", out)
    assert "decode-accumulate sign" in out
    document = json.loads(file.read_text())
    assert len(document["rows"]) == 1 + 3
    assert document["environment"]["torch"] == torch.__version__


def test_invalid_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"--only int3: matches none of quantize int8, .*; write a part of one"):
        measure(NUMEL, CPU, 1, re.compile("int3"))
    with pytest.raises(ConfigError, match="--numel 100: is too small; write at least 4096"):
        measure(100, CPU, 1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_reported() -> None:
    with pytest.raises(UnsupportedError, match="--device cuda: torch finds no GPU"):
        measure(NUMEL, torch.device("cuda"), 1)
