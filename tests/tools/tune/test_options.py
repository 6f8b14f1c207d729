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
