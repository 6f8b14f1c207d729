import argparse
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import CompressWarning, ConfigError
from deepspeed_compress.tools.arguments import rate
from deepspeed_compress.tools.plan import Interval, intervals
from deepspeed_compress.tools.plan_islands import CANDIDATES, fitting, plans

SECTION: dict[str, Any] = {
    "gradients": {"method": "topk", "density": 0.01, "values": {"bits": 4}},
    "schedule": {
        "warmup_steps": 100,
        "ramp": {"steps": 400},
        "phases": [{"until": 0.2, "gradients": {"density": 0.05}}, {"until": 0.8}, {"gradients": {"density": 0.02}}],
    },
}


def test_stretches_cover_training_without_gaps() -> None:
    found = intervals({"bf16": {"enabled": True}, "deepspeed_compress": SECTION | {}}, 10000)
    assert found[0] == Interval(0, 99, "none", 16.0)
    assert found[-1].settings == "topk density=0.02 values=blockwise bits=4"
    assert (found[-1].first, found[-1].last) == (8000, 9999)
    assert all(before.last == after.first - 1 for before, after in itertools.pairwise(found))
    assert all(before.bits > after.bits for before, after in itertools.pairwise(found[:18]))


def test_an_endless_schedule_has_no_last_step() -> None:
    assert intervals({"deepspeed_compress": {}}, None) == [Interval(0, None, "blockwise bits=8", 8.125)]


def test_sizes_that_depend_on_shapes_are_not_told() -> None:
    [interval] = intervals({"deepspeed_compress": {"gradients": {"method": "powersgd"}}}, 5)
    assert (interval.last, interval.bits) == (4, None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "ds.json", tmp_path / "plan.png"
    file.write_text(json.dumps({"deepspeed_compress": SECTION}))
    assert main(["plan", "schedule", str(file)]) == 1
    assert "--steps" in capsys.readouterr().err
    assert main(["plan", "schedule", str(file), "--steps", "10000", "--output", str(picture)]) == 0
    assert "topk density=0.02" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["plan", "schedule", str(file), "--steps", "10000", "--output", f"{tmp_path}/plan.xyz"]) == 1
    assert "plan.xyz: no picture (allowed: " in capsys.readouterr().err


@pytest.mark.parametrize(("half", "bits"), [({"bfloat16": {"enabled": True}}, 16), ({"bf16": "auto"}, 32), ({}, 32)])
def test_bits_of_what_is_not_compressed(half: dict[str, Any], bits: float) -> None:
    """DeepSpeed has two names for bf16; what is no object is for the linter to tell."""
    [interval] = intervals({**half, "deepspeed_compress": {"gradients": {"method": "none"}}}, 5)
    assert interval.bits == bits


def islands(**settings: Any) -> Islands:
    return Islands(size=1, exchange={"method": "none"}, **settings)


def test_an_exchange_is_spread_over_its_steps() -> None:
    """Two islands of a million parameters in fp32 send 4 MB an exchange, each way: 0.32 s at 100 Mbit/s."""
    found = {plan.sync_every: plan for plan in plans(islands(), 2, 1_000_000, 1e8, 1.0)}
    assert found[1].exchange_seconds == pytest.approx(0.32)
    assert found[10].bytes_a_step == pytest.approx(400_000)
    assert found[10].step_ratio == pytest.approx(1.032)
    assert fitting(list(found.values())) == found[10]


def test_what_is_delayed_is_hidden_as_far_as_the_link_carries_it() -> None:
    slow, late = (plans(islands(delay=delay, sync_every=20), 2, 1_000_000, 1e7, 1.0) for delay in (0, 5))
    assert [plan.step_ratio for plan in late if plan.sync_every >= 10] == [1.0] * 8
    assert next(plan.step_ratio for plan in late if plan.sync_every == 1) == pytest.approx(4.2)
    assert all(one.step_ratio <= other.step_ratio for one, other in zip(late, slow, strict=True))


def test_asynchronous_islands_wait_for_nothing_and_the_server_carries_all() -> None:
    """4 MB out and 4 MB back are 0.64 s at 100 Mbit/s; of four islands the server gets 16 MB in 1.28 s."""
    elastic = {"rendezvous": "head:1", "parameter_server": {}}
    settings = Islands.model_validate({"exchange": {"method": "none"}, "elastic": elastic})
    two, four = ({plan.sync_every: plan for plan in plans(settings, count, 1_000_000, 1e8, 0.1)} for count in (2, 4))
    assert two[10].bytes_a_step == pytest.approx(400_000)
    assert two[10].exchange_seconds == pytest.approx(0.64)
    assert (two[10].step_ratio, four[20].step_ratio) == (1.0, 1.0)
    assert four[10].step_ratio == pytest.approx(1.28)


def test_the_command_for_islands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    arguments = ["plan", "islands", str(file), "--model", "124M", "--hosts", "4", "--bandwidth", "100mbit"]
    file.write_text(json.dumps({"deepspeed_compress": {"islands": {"by_host": True, "sync_every": 10}}}))
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "124,000,000 parameters, 100 Mbit/s" in output
    assert "<- written" in output
    file.write_text(json.dumps({"deepspeed_compress": {}}))
    assert main(arguments) == 1
    assert "/deepspeed_compress/islands is missing" in capsys.readouterr().err


def planned(file: Path, islands: Any, *options: str, **rest: Any) -> int:
    """The exit code; a later one of two equal options counts."""
    section = {"islands": islands, **rest.pop("section", {})}
    file.write_text(json.dumps({"deepspeed_compress": section, **rest}))
    usual = ["--model", "1M", "--hosts", "2", "--bandwidth", "100mbit"]
    return main(["plan", "islands", str(file), *usual, *options])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--hosts", "1"), "argument --hosts: '1' is not an integer from 2 up: one island alone exchanges nothing"),
        (("--bandwidth", "1e400"), "'1e400' is no rate"),
        (("--bandwidth=-5mbit",), "'-5mbit' is no rate"),
        (("--step", "0"), "'0' is not a positive number"),
    ],
)
def test_what_makes_no_plan_is_wrong_usage(
    options: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        planned(tmp_path / "ds.json", {"size": 1}, *options)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("0", "--model 0: no parameters, so nothing is exchanged (allowed: a number from 1 up"),
        ("0.0001k", "--model 0.0001k: no parameters"),
        ("1.2.3M", "--model 1.2.3M: cannot be read"),
    ],
)
def test_models_without_parameters(model: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path / "ds.json", {"size": 1}, "--model", model) == 1
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sync_every", "row"), [(7, "7 .*<- written"), ("30 s", '60 .*<- "30 s"'), ("0.1 s", '1 .*<- "0.1 s"')]
)
def test_the_written_interval_is_planned(
    sync_every: int | str, row: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = {"size": 1} if isinstance(sync_every, int) else {"elastic": {"rendezvous": "head:29400"}}
    assert planned(tmp_path / "ds.json", {**kind, "sync_every": sync_every}, "--step", "0.5") == 0
    assert re.search(row, capsys.readouterr().out)


def test_intervals_that_would_be_refused_are_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`sync_every` 1 would cost nothing here."""
    for settings, first in (({"fragments": 4}, 5), ({"fragments": 2, "delay": 9}, 10)):
        assert planned(tmp_path / "ds.json", {"size": 1, **settings}, "--bandwidth", "9e15") == 0
        output = capsys.readouterr().out
        assert f"sync_every {first} costs" in output
        rows = re.findall(r"^│ +([0-9]+) │", output, re.MULTILINE)
        assert [int(row) for row in rows] == [one for one in CANDIDATES if one >= first]


def test_a_capped_link_carries_what_the_cap_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"communication": {"max_rate": "10 Mbit/s"}}
    assert planned(tmp_path / "ds.json", {"size": 1, "exchange": {"method": "none"}}, section=section) == 0
    output = capsys.readouterr().out
    assert "10 Mbit/s (communication.max_rate)" in output
    assert re.search(r"│ +1 │ +4 │ +3.2 │", output)


def test_islands_that_the_written_batch_does_not_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """64 samples, 8 on each rank at once, are of 8 ranks: one island of 8, two of 4."""
    batch = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
    assert planned(tmp_path / "ds.json", {"size": 8}, **batch) == 1
    assert "/deepspeed_compress/islands/size: 8, of a batch that is written for 8 ranks" in capsys.readouterr().err
    assert planned(tmp_path / "ds.json", {"size": 4}, **batch) == 0


def test_second_moments_take_four_bytes_of_each_block() -> None:
    found = (plans(islands(second_moments={"block_size": size}), 2, 1_000_000, 1e8, 1.0)[0] for size in (1, 128))
    assert [plan.bytes_a_step for plan in found] == pytest.approx([8e6, 4e6 * (1 + 1 / 128)])


def test_what_islands_keep_for_themselves_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model, file = tmp_path / "config.json", tmp_path / "ds.json"
    model.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))

    def of_model(own: list[str], size: str = str(model)) -> tuple[int, str]:
        file.write_text(json.dumps({"deepspeed_compress": {"islands": {"size": 2, "own": own}}}))
        code = main(["plan", "islands", str(file), "--model", size, "--hosts", "2", "--bandwidth", "1mbit"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    # Two layers of 32 x (32 + 16 + 16 + 32) in attention, 3 x 32 x 48 after it and two norms; a norm, embedding, head.
    layers = 2 * (32 * 96 + 3 * 32 * 48 + 64)
    assert f"{layers + 32 + 2 * 64 * 32:,} parameters" in of_model([])[1]
    assert f"{layers + 32 + 64 * 32:,} parameters" in of_model(["lm_head"])[1]
    with pytest.warns(CompressWarning, match="own/1: 'heads' matches none of the 21 parameters"):
        assert f"{layers + 32:,} parameters" in of_model(["lm_head|embed", "heads"])[1]
    for own, size, text in (
        (["."], str(model), "names all 21 parameters"),
        (["lm_head"], "124M", "--model 124M does not tell"),
    ):
        code, output = of_model(own, size)
        assert code == 1
        assert f"/deepspeed_compress/islands/own: {own}" in output
        assert text in output


@pytest.mark.parametrize(("text", "bits"), [("100mbit", 1e8), ("10 Gbit/s", 1e10), ("1e6", 1e6)])
def test_rates(text: str, bits: float) -> None:
    assert rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "-1mbit", "0", "1e400"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        rate(text)


def test_a_plan_says_where_nothing_was_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"deepspeed_compress": {"islands": {"by_host": True, "sync_every": 10}}}))
    usual = ["plan", "islands", str(file)]
    assert main([*usual, "--model", "10M", "--hosts", "4", "--bandwidth", "100mbit"]) == 0
    assert "not measured" not in capsys.readouterr().out
    assert main([*usual, "--model", "7B", "--hosts", "8", "--bandwidth", "100gbit"]) == 0
    output = capsys.readouterr().out.replace("\n", " ")
    assert "not measured: 7G parameters (measured: 2.2M to 10.5M); 8 islands (measured: 2 to 4); 100G bit/s" in output
    assert main([*usual, "--model", "10M", "--hosts", "2", "--bandwidth", "10mbit", "--step", "1"]) == 0
    assert "not measured: 100 steps (measured: 1 to 30)" in capsys.readouterr().out


@pytest.mark.parametrize("hosts", [1, 0, -1])
def test_one_island_alone_has_no_plan(hosts: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=f"--hosts {hosts}: one island alone exchanges nothing"):
        plans(islands(), hosts, 1_000_000, 1e8, 1.0)
