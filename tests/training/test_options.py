from pathlib import Path

import pytest

from deepspeed_compress.training.options import parse_options

REQUIRED = ["--deepspeed_config", "ds.json", "--data", "a.txt", "b", "--output-dir", "out"]


def test_defaults_follow_the_output_directory() -> None:
    options = parse_options(REQUIRED)
    assert options.data == (Path("a.txt"), Path("b"))
    assert options.tokenizer == Path("out/tokenizer")
    assert options.cache_dir == Path("out/tokenizer/tokens")


def test_the_launcher_may_pass_the_local_rank() -> None:
    assert parse_options(["--local_rank=3", "--deepspeed", *REQUIRED]).local_rank == 3


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["--steps", "-1"], "'-1' is not an integer from 0 up"),
        (["--log-every", "0"], "from 1 up"),
        (["--seq-len", "many"], "from 2 up"),
        (["--held-out", "1"], "'1' is not a number between 0 and 1"),
        (["--vocab-size", "256"], "from 257 up"),
    ],
)
def test_values_out_of_range_are_refused(extra: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse_options([*REQUIRED, *extra])
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(["--help"])
    text = capsys.readouterr().out
    assert "--resume" in text
    assert "--export runs/pipeline/model" in text
    assert "deepspeed --num_gpus 2 launch/train_gpt.py" in text
