import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.tools.arguments import rate
from deepspeed_compress.tools.plan import Interval, intervals
from deepspeed_compress.tools.plan_islands import fitting, plans

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


def test_what_islands_keep_for_themselves_is_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    model, file = tmp_path / "config.json", tmp_path / "ds.json"
    model.write_text(json.dumps({"model_type": "llama", **sizes, **heads}))

    def planned(own: list[str], size: str = str(model)) -> tuple[int, str]:
        file.write_text(json.dumps({"deepspeed_compress": {"islands": {"size": 2, "own": own}}}))
        code = main(["plan", "islands", str(file), "--model", size, "--hosts", "2", "--bandwidth", "1mbit"])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    # Two layers of 32 x (32 + 16 + 16 + 32) in attention, 3 x 32 x 48 after it and two norms; a norm, embedding, head.
    layers = 2 * (32 * 96 + 3 * 32 * 48 + 64)
    assert f"{layers + 32 + 2 * 64 * 32:,} parameters" in planned([])[1]
    assert f"{layers + 32 + 64 * 32:,} parameters" in planned(["lm_head"])[1]
    with pytest.warns(CompressWarning, match="own/1: 'heads' matches none of the 21 parameters"):
        assert f"{layers + 32:,} parameters" in planned(["lm_head|embed", "heads"])[1]
    for own, size, text in (
        (["."], str(model), "names all 21 parameters"),
        (["lm_head"], "124M", "--model 124M does not tell"),
    ):
        code, output = planned(own, size)
        assert code == 1
        assert f"/deepspeed_compress/islands/own: {own}" in output
        assert text in output


@pytest.mark.parametrize(("text", "bits"), [("100mbit", 1e8), ("10 Gbit/s", 1e10), ("1e6", 1e6)])
def test_rates(text: str, bits: float) -> None:
    assert rate(text) == bits


@pytest.mark.parametrize("text", ["", "fast", "-1mbit", "0"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        rate(text)
