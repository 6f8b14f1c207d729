"""`bench step`: rows of its file, ratios, tables, and whole runs on two emulated hosts."""

import argparse
import json
import os
import subprocess
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from deepspeed_compress.cli import main
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench.step import (
    FORMS,
    compared,
    step_table,
    steps_at,
)
from deepspeed_compress.tools.bench.workload import DEEPSPEED, OURS, Contender, Group, Workload
from tests.support.hosts import measures_links, needs_hosts
from tests.support.processes import run_python

ROOT = Path(__file__).parents[3]
WORK = Workload(
    model="gpt.json",
    tensor=1,
    pipeline=1,
    partition="balanced",
    recompute=False,
    precision="fp32",
    micro_batch=2,
    accumulation=1,
    clipping=1.0,
    seq_len=16,
    seed=0,
)
PLAIN: dict[str, Any] = {"zero_optimization": {"stage": 1}}
GROUP = Group(
    WORK,
    (
        Contender("deepspeed", DEEPSPEED, PLAIN),
        Contender("zero1_int8", OURS, PLAIN | {SECTION: {}}),
        Contender("ddp", "ddp"),
    ),
)
PACKET = 66


def row(contender: int, rate: str | None, seconds: float, payload: float = 1000.0) -> dict[str, Any]:
    """Return a row of 2 ranks that have sent `payload` bytes in one packet, where 1,000 bytes were predicted."""
    ours = GROUP.contenders[contender].kind == OURS
    counted = {"predicted": 1000.0, "predicted_uncompressed": 4000.0} if ours else {}
    sent = {"interface": payload + PACKET, "packets": 1.0, "segments": 2.0} if rate else {}
    found = asdict(GROUP)
    times = {"median": seconds, "min": 0.9 * seconds, "max": 1.1 * seconds}
    return {
        "workload": found["workload"],
        "contender": found["contenders"][contender],
        "ranks": 2,
        "rate": rate,
        "steps": 3,
        "compute_only_s": {"median": 0.1, "min": 0.1, "max": 0.1},
        "compute_only_peak_bytes": [1e6, 1e6],
        "step_s": times,
        "split_ms": {"compute": 1.0, "compress": 2.0, "communicate": 3.0, "decompress": 4.0} if ours else None,
        "traffic": [counted | sent] * 2,
        "peak_bytes": [2e6, None],
        "residual_bytes": [500_000, 500_000] if ours else [None, None],
    }


def run_rows(rate: str | None = "1gbit") -> list[dict[str, Any]]:
    return [row(0, rate, 0.4, 4004.0), row(1, rate, 0.2), row(2, rate, 0.3)]


def by_name(rows: list[dict[str, Any]], rate: str | None = "1gbit") -> dict[str, dict[str, Any]]:
    return {found["contender"]["name"]: found for found in rows if found["rate"] == rate}


def test_rows_have_ratios_and_bytes() -> None:
    found = by_name(compared(run_rows()))
    assert [found[name]["of_compute_only"] for name in found] == pytest.approx([4.0, 2.0, 3.0])
    assert [found[name]["speedup"] for name in found] == [1.0, pytest.approx(2.0), None]
    assert found["zero1_int8"]["bytes"] == {
        "interface": 1066.0,
        "headers": 66.0,
        "headers_on_wire": 132.0,
        "payload": 1000.0,
        "predicted": 1000.0,
        "difference_percent": 0.0,
    }
    assert found["deepspeed"]["bytes"]["difference_percent"] == pytest.approx(0.1)
    assert "predicted" not in found["ddp"]["bytes"]


@pytest.mark.parametrize("section", [{"weights": {"method": "sign"}}, {"islands": {"size": 1}}])
def test_bytes_of_deepspeed_are_predicted_only_by_comparable_rows(section: dict[str, Any]) -> None:
    """Rows with compressed weights or with islands send other things than DeepSpeed."""
    rows = run_rows()
    rows[1]["contender"]["ds_config"][SECTION] = section
    found = by_name(compared(rows))
    assert found["zero1_int8"]["speedup"] == pytest.approx(2.0)
    assert "predicted" not in found["deepspeed"]["bytes"]


def test_fast_links_get_more_steps() -> None:
    rates = ("1gbit", "499mbit", None)
    assert steps_at(argparse.Namespace(steps=None), rates) == {"1gbit": 7, "499mbit": 3, None: 7}
    assert steps_at(argparse.Namespace(steps=[2]), rates) == dict.fromkeys(rates, 2)
    with pytest.raises(ConfigError, match="--steps"):
        steps_at(argparse.Namespace(steps=[2, 3]), rates)


@pytest.mark.parametrize("rate", ["1gbit", None])
def test_tables_have_all_rows_and_compute_only(rate: str | None) -> None:
    rows = compared(run_rows(rate))
    console = Console(width=150)
    with console.capture() as capture:
        for form in FORMS:
            console.print(step_table(rows, form))
    lines = capture.get().splitlines()
    assert sum("compute-only" in line for line in lines) == 2
    ours = [line.split() for line in lines if "zero1_int8" in line]
    start = [rate or "-", "1", "zero1_int8"]
    assert ours[0] == [*start, "0.200", "0.180", "0.220", "2.00", "2.00", "1.0", "2.0", "3.0", "4.0"]
    sizes = ["0.001", "0.000", "0.001", "0.001", "+0.00"] if rate else ["-", "-", "-", "0.001", "-"]
    assert ours[1] == [*start, *sizes, "2.0", "0.5"]


@pytest.fixture
def torchrun(port: str) -> tuple[str, ...]:
    """Arguments of Python that start two processes with torchrun."""
    return "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port


def bench(
    output: Path, *arguments: str, launcher: tuple[str, ...] = (), model: str = "configs/models/gpt_2m.json"
) -> subprocess.CompletedProcess[str]:
    command = [*launcher, "-m", "deepspeed_compress.cli", "bench", "step", "--output", output, *arguments]
    size = ["--model", model, "--micro-batch", "1", "--seq-len", "32", "--steps", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"}
    return run_python(*command, *size, env=environment, cwd=ROOT)


@measures_links
@pytest.mark.slow
def test_bytes_on_the_interface_match_the_statistics(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    peers = ("--peers", "deepspeed", "ddp", "ddp-powersgd1", "fsdp2")
    arguments = ("--config", "configs/zero2_int4.json", *peers, "--emulate", "2,200mbit")
    first = bench(output, *arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = by_name(json.loads(output.read_text())["rows"], "200mbit")
    assert list(rows) == ["deepspeed", "zero2_int4", "ddp", "ddp-powersgd1", "fsdp2"]
    for name in ("deepspeed", "zero2_int4"):
        assert abs(rows[name]["bytes"]["difference_percent"]) < 3
    sent = {name: found["bytes"]["payload"] for name, found in rows.items()}
    assert sent["zero2_int4"] < 0.5 * sent["deepspeed"]
    assert sent["ddp-powersgd1"] < 0.05 * sent["ddp"]
    split = rows["zero2_int4"]["split_ms"]
    assert min(split.values()) > 0
    assert sum(split.values()) == pytest.approx(1e3 * rows["zero2_int4"]["step_s"]["median"], rel=0.3)
    again = bench(output, *arguments)
    assert f"{output}: exists, and a file holds one run" in again.stderr


@needs_hosts
@pytest.mark.slow
def test_a_failing_configuration_is_reported_and_the_next_is_measured(tmp_path: Path) -> None:
    wrong, good, output = (tmp_path / f"{name}.json" for name in ("wrong", "good", "bench"))
    common = {"train_micro_batch_size_per_gpu": 3, SECTION: {}}
    adamw = {"type": "AdamW", "params": {"torch_adam": True}}
    zero = {"stage": 1, "zenflow": {"topk_ratio": 0.1}}
    wrong.write_text(json.dumps(common | {"optimizer": adamw, "zero_optimization": zero}))
    good.write_text(json.dumps(common | {"optimizer": adamw, "gradient_clipping": 0.5}))
    ended = bench(output, "--config", str(wrong), str(good), "--peers", "--emulate", "2,1gbit")
    assert ended.returncode == 1
    assert "zenflow" in ended.stderr
    assert list(by_name(json.loads(output.read_text())["rows"])) == ["good"]


@pytest.mark.slow
def test_the_processes_of_a_launcher_are_measured(tmp_path: Path, torchrun: tuple[str, ...]) -> None:
    output = tmp_path / "bench.json"
    first = bench(output, "--config", "configs/zero2_int4.json", launcher=torchrun)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = by_name(json.loads(output.read_text())["rows"], None)
    assert list(rows) == ["deepspeed", "zero2_int4"]
    assert rows["zero2_int4"]["bytes"].keys() == {"predicted"}
    two_layouts = ("configs/zero2_int4.json", "configs/pipeline2_zero1_int4.json")
    second = bench(tmp_path / "second.json", "--config", *two_layouts, launcher=torchrun)
    assert second.returncode != 0
    assert "the files have different layouts" in second.stderr


TOY = {"model_type": "gpt2", "vocab_size": 128, "n_positions": 32, "n_embd": 32, "n_layer": 2, "n_head": 2}


@pytest.mark.slow
def test_one_rank_and_its_images_are_measured(tmp_path: Path) -> None:
    output, model = tmp_path / "bench.json", tmp_path / "toy.json"
    model.write_text(json.dumps(TOY))
    done = bench(output, "--config", "configs/zero2_int4.json", "--mirror", "4", model=str(model))
    assert done.returncode == 0, done.stdout + done.stderr
    rows = by_name(json.loads(output.read_text())["rows"], None)
    assert list(rows) == ["deepspeed", "zero2_int4"]
    assert {(one["ranks"], one["mirror"]) for one in rows.values()} == {(4, True)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("zero2_int4.json", "--peers", "ddp", "fsdp2"), "--mirror: --peers ddp fsdp2 cannot be mirrored"),
        (("pipeline2_zero1_int4.json",), "--mirror: all ranks hold the same layers"),
    ],
)
def test_settings_that_a_mirror_lacks_are_refused(
    arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, *others = arguments
    output = str(tmp_path / "bench.json")
    command = ["bench", "step", "--config", str(ROOT / "configs" / config), *others, "--output", output]
    assert main([*command, "--mirror", "4"]) == 1
    assert message in capsys.readouterr().err
