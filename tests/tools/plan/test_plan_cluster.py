import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.search import Job, Plan, search
from deepspeed_compress.tools import plan_cluster
from deepspeed_compress.tools.plan_job import read_batch, read_count

LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32}
LLAMA |= {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32000}


@pytest.fixture(scope="module")
def plans() -> dict[str, Plan]:
    """Plans of the jobs that were searched."""
    return {}


@pytest.fixture(autouse=True)
def _search_once(plans: dict[str, Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    def once(job: Job) -> Plan:
        if repr(job) not in plans:
            plans[repr(job)] = search(job)
        return plans[repr(job)]

    monkeypatch.setattr(plan_cluster, "search", once)


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    return str(file)


def plan(model: str, *more: str) -> int:
    given = ["--model", model, "--gpus", "16xA100", "--network", "10gbit", "--batch", "256", "--seq", "2048"]
    return main(["plan", "cluster", *given, *more])


def test_choices_come_in_the_order_in_which_one_would_try_them(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model) == 0
    alike, _, below = capsys.readouterr().out.partition("exchange every 30 steps")
    names = [
        "uncompressed",
        "the same, 8 bits",
        "the same, 4 bits",
        "inside nodes",
        "inside nodes, 4 bits",
        " islands,",
    ]
    places = [alike.index(name) for name in names]
    assert places == sorted(places)
    assert "+2 to 7 %" in below
    assert "Below the line, training itself changes." in below
    assert "more than a tenth faster" not in below
    assert "Outside of the calibration" in below
    assert "steps of deepspeed (fitted: those of megatron)" in below


def test_a_node_alone_is_told_that_nothing_helps(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--gpus", "8xA100") == 0
    out = capsys.readouterr().out
    assert "Nothing that trains as now is more than a tenth faster." in out
    assert "inside nodes" not in out
    assert "islands" not in out


def test_what_runs_now_is_read_from_its_file(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "now.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}')
    assert plan(model, "--config", str(file), "--explain", "1") == 0
    assert capsys.readouterr().out.startswith("zero3-d16-b2x8")
    section = {"gradients": {"bits": 8}, "parallelism": {"zero_stage": 2, "shard_within": "node"}}
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", SECTION: section}))
    assert plan(model, "--config", str(file), "--explain", "1") == 0
    assert "zero2-d16-node8-" in capsys.readouterr().out.partition("-g8:")[0]


@pytest.mark.parametrize(
    ("ds_config", "message"),
    [
        ({"train_micro_batch_size_per_gpu": 3}, "has no layout of 16 GPUs with 256 sequences per step"),
        ({SECTION: {"gradients": {"method": "topk"}}}, 'gradients by "topk" are not predicted'),
        ({SECTION: {"gradients": {"bits": 2}}}, 'gradients by "blockwise" are not predicted'),
        ({SECTION: {"islands": {"by_host": True}}}, "islands are not predicted as what runs now"),
    ],
)
def test_files_that_are_not_predicted_are_refused(
    ds_config: dict[str, object], message: str, model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "now.json"
    file.write_text(json.dumps(ds_config))
    assert plan(model, "--config", str(file)) == 1
    assert message in capsys.readouterr().err


def test_batch_and_length_are_those_of_the_configuration_and_the_model(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "now.json"
    given = ["plan", "cluster", "--model", model, "--gpus", "2x8xA100", "--network", "10gbit", "--config", str(file)]
    micro = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    for ds_config, sequences in (({"train_batch_size": 64}, 64), (micro, 128), ({"train_batch_size": "auto"}, None)):
        file.write_text(json.dumps(ds_config))
        assert main(given) == (sequences is None)
        captured = capsys.readouterr()
        title = f"on 16 A100-80 in 2 nodes of 8, 10 Gbit/s per node\n{sequences} sequences of 2048 tokens per step"
        found = "\n".join(line.rstrip() for line in captured.out.splitlines())
        assert title in found if sequences else "--batch: is missing" in captured.err


def test_a_better_batch_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model) == 0
    assert "more tokens would be trained per second" not in capsys.readouterr().out
    assert plan(model, "--batch", "1008") == 0
    assert "With 1024 sequences per step, " in capsys.readouterr().out


def test_the_limiting_kind_of_gpus_is_named(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--gpus", "8xA100+8xL4") == 0
    out = capsys.readouterr().out
    assert "on 8 A100-80 + 8 L4 in 2 nodes of 8" in out
    assert re.search(
        r"^L4 limits computing: it takes [\d.]+ times as long as A100-80. L4 limits memory to 24 GB", out, re.M
    )
    assert re.search(r"for each GPU: [\d.]+ on L4, [\d.]+ on A100-80. Row 1 is then at most [\d.]+ times as fast", out)
    assert re.search(r"The fastest choice on 8 A100-80 alone is [\d.]+ times as fast as on all", out)


def test_a_mean_length_shows_what_packing_gains(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--mean-length", "512") == 0
    out = capsys.readouterr().out
    assert "256 sequences of 2048 tokens (512 of them in documents) per step" in out
    assert re.search(r"^75% of the tokens are padding. .* train 4[.\d]* times as many tokens per second", out, re.M)


def test_a_layout_is_explained(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--explain", "2") == 0
    out = capsys.readouterr().out
    assert "matrix products" in out
    assert "Memory: " in out
    name = out.split(":")[0].strip()
    assert plan(model, "--explain", name) == 0
    assert capsys.readouterr().out == out
    assert plan(model, "--explain", "999") == 1
    assert "--explain: 999 is not in the table" in capsys.readouterr().err


def test_the_files_of_the_best_pass_the_linter(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--output", f"{tmp_path}/plan") == 0
    assert main(["lint", f"{tmp_path}/plan/ds_config.json", "--world-size", "16"]) == 0
    script = tmp_path / "plan" / "launch.sh"
    assert f"launch/torchrun.sh {tmp_path}/plan/ds_config.json" in script.read_text()
    assert os.access(script, os.X_OK)
    environment = {name: value for name, value in os.environ.items() if name not in ("NODE_RANK", "MASTER_ADDR")}
    for given, missing in (({}, "NODE_RANK"), ({"NODE_RANK": "0"}, "MASTER_ADDR")):
        done = subprocess.run([script], env=environment | given, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert f"{missing}: is not set; on every node, write NODE_RANK=N MASTER_ADDR=ADDRESS {script}" in done.stderr
    assert plan(model, "--output", f"{tmp_path}/plan", "--choose", "2") == 0
    assert json.loads((tmp_path / "plan" / "ds_config.json").read_text())[SECTION]["gradients"]["bits"] == 8
    assert plan(model, "--choose", "2") == 1
    assert "--choose: is for the files of a row" in capsys.readouterr().err
    assert plan(model, "--output", f"{tmp_path}/plan", "--software", "megatron") == 1
    assert "--output: Megatron" in capsys.readouterr().err


def test_a_model_that_fits_nowhere_is_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(model).write_text(json.dumps(LLAMA | {"num_hidden_layers": 2000, "hidden_size": 8192}))
    assert plan(model) == 1
    captured = capsys.readouterr()
    assert "Refused: " in captured.out
    assert "does not fit into memory" in captured.out
    assert "no layout of" in captured.err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--batch", "3"), "--batch: deepspeed has no layout"),
        (("--hostfile", "hostfile"), "--hostfile: says how many GPUs there are"),
        (("--gpus", "2x8xA100", "--gpus-per-node", "4"), "--gpus-per-node: --gpus 2x8xA100 says it, too"),
        (("--gpus", "8xA100+8xL4", "--measure", "measured.json"), "--gpus: several kinds of GPUs are not measured"),
        (("--mean-length", "4096"), "--mean-length: 4096 tokens are more than the 2048 of --seq"),
        (("--seq", "8192"), "--seq: 8192 tokens are more than the 4096 positions"),
        (("--batch", "9" * 400), "--batch: "),
        (("--tokens", "9" * 400), "--tokens: "),
        (("--model", "nowhere.json"), "nowhere.json"),
        (("--model", "7B", "--output", "plan"), "--output: launch/train_gpt.py needs a config.json"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(
    more: tuple[str, ...], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path(model).write_text(json.dumps(LLAMA | {"max_position_embeddings": 4096, "num_hidden_layers": 1}))
    assert plan(model, *more) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_batches_are_sequences_or_tokens() -> None:
    assert (read_batch("1024", 4096), read_batch("4M-tokens", 4096), read_batch("512k-tokens", 2048)) == (
        1024,
        1024,
        256,
    )
    assert read_count("300B") == 300e9


@pytest.mark.parametrize("text", ["0", "many", "4M", "1.2.3M-tokens", "1-tokens"])
def test_a_wrong_batch_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--batch"):
        read_batch(text, 4096)


def test_a_single_sequence_is_counted(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(model, "--gpus", "1xA100", "--batch", "1") == 0
    assert "1 sequence of 2048 tokens per step" in capsys.readouterr().out
    assert plan(model, "--batch", "1") == 1
    assert "with 1 sequence per step" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "0", "B", "1.2.3B"])
def test_a_wrong_number_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--tokens"):
        read_count(text)
