"""The command line: which arguments belong to `tune`, and how their values are parsed."""

import argparse
from pathlib import Path

import pytest

from deepspeed_compress import cli
from deepspeed_compress.tools.arguments import duration, share


def parsed(*arguments: str) -> argparse.Namespace:
    [tune] = [command for command in cli.COMMANDS if command.name == "tune"]
    return cli._parser(tune).parse_args(cli._separated(["tune", *arguments], tune))


def test_arguments_after_the_script_are_passed_on() -> None:
    rest = ["--num_gpus", "2", "train.py", "--config", "other.json", "--steps", "9", "--help", "--output=x"]
    options = parsed("--config", "ds.json", "--time-budget=90min", "--target-loss-gap", "1%", *rest)
    assert options.arguments == ["--", *rest]
    assert (options.config, options.time_budget, options.target_loss_gap) == (Path("ds.json"), 5400, 0.01)
    assert (options.steps, options.output, options.launcher) == (30, Path("tuning_results"), "deepspeed")


@pytest.mark.parametrize("text", ["0", "0%", "100%", "1", "x", "-1%", "nan", ""])
def test_wrong_shares(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a number between 0 and"):
        share(text)


def test_durations() -> None:
    assert [duration(text) for text in ("90s", "2 h", "30min")] == [90, 7200, 1800]
    with pytest.raises(argparse.ArgumentTypeError, match='"2" is not a time'):
        duration("2")


def test_a_script_may_come_at_once() -> None:
    assert parsed("--config", "ds.json", "train.py", "-h").arguments == ["--", "train.py", "-h"]


@pytest.mark.parametrize("given", [["-h"], ["--config", "ds.json", "--help"]])
def test_help_before_the_script_is_ours(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed(*given)
    assert stop.value.code == 0
    assert "--target-loss-gap" in capsys.readouterr().out


@pytest.mark.parametrize(("text", "value"), [("0.5%", 0.005), ("0.005", 0.005), ("2 %", 0.02), (".5%", 0.005)])
def test_shares(text: str, value: float) -> None:
    assert share(text) == pytest.approx(value)


@pytest.mark.parametrize("given", [["--steps", "9"], ["--rungs", "0"], ["--metric", "loss"], ["--launcher", "slurm"]])
def test_wrong_values(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parsed("--config", "ds.json", *given, "train.py")
    assert stop.value.code == 2
    assert given[0] in capsys.readouterr().err
