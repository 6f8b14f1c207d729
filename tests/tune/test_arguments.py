"""The command line of a trial."""

from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.tune.arguments import excludes_momentum, for_trial, with_config

TRIAL = Path("/results/exps/int4")
FILE = TRIAL / "ds_config.json"


@pytest.mark.parametrize(
    "option",
    ["--deepspeed ds.json", "--deepspeed_config ds.json", "--config=ds.json", "--deepspeed_config_file=./ds.json"],
)
def test_the_file_is_replaced_whatever_names_it(option: str) -> None:
    given = ["--num_gpus", "2", "train.py", *option.split(), "--lr", "1"]
    expected = option.replace("./ds.json", "ds.json").replace("ds.json", str(FILE))
    assert with_config(given, Path("ds.json"), FILE) == ["--num_gpus", "2", "train.py", *expected.split(), "--lr", "1"]


def test_it_may_be_the_launchers(tmp_path: Path) -> None:
    config = tmp_path / "ds.json"
    given = ["--use_deepspeed", "--deepspeed_config_file", str(config), "train.py", "--deepspeed", "another.json"]
    assert with_config(given, config, FILE) == [*given[:2], str(FILE), *given[3:]]


def test_every_mention_is_replaced() -> None:
    given = ["train.py", "--deepspeed", "ds.json", "--copy=ds.json", "ds.json"]
    assert with_config(given, Path("ds.json"), FILE) == [
        "train.py",
        "--deepspeed",
        str(FILE),
        f"--copy={FILE}",
        str(FILE),
    ]


def test_a_path_that_stands_there_already_is_a_mention(tmp_path: Path) -> None:
    """The command is checked with the file in its own place."""
    given = ["train.py", "--deepspeed", str(tmp_path / "ds.json")]
    assert with_config(given, tmp_path / "ds.json", tmp_path / "ds.json") == given


def test_no_mention_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"--config ds.json: no argument .* SCRIPT --deepspeed ds.json"):
        with_config(["train.py", "--lr", "1", "eyJhIjogMX0=", "x" * 5000], Path("ds.json"), FILE)


@pytest.mark.parametrize("name", ["--output_dir", "--output-dir"])
def test_a_trial_writes_in_a_place_of_its_own(name: str) -> None:
    given = ["train.py", "--deepspeed", "ds.json", name, "runs/mine", "--overwrite", f"{name}=runs/mine"]
    assert for_trial(given, Path("ds.json"), FILE, TRIAL) == [
        "train.py",
        "--deepspeed",
        str(FILE),
        name,
        f"{TRIAL}/output",
        "--overwrite",
        f"{name}={TRIAL}/output",
    ]


def test_the_placeholder_is_the_directory() -> None:
    given = ["train.py", "ds.json", "--logs={trial}/logs", "{trial}"]
    assert for_trial(given, Path("ds.json"), FILE, TRIAL) == [
        "train.py",
        str(FILE),
        f"--logs={TRIAL}/logs",
        str(TRIAL),
    ]


@pytest.mark.parametrize(
    ("given", "excludes"),
    [
        ("--adam_beta1 0", True),
        ("--adam_beta1=0.0 --x 1", True),
        ("--adam-beta1 .0", True),
        ("--adam_beta1 0 --adam_beta1 0.5", False),
        ("--adam_beta1 0.9", False),
        ("--adam_beta2 0", False),
        ("", False),
    ],
)
def test_a_command_may_exclude_momentum(given: str, excludes: bool) -> None:
    assert excludes_momentum(["train.py", *given.split()]) is excludes
