"""Hostile files for the linter lead to findings or a plain error, and never send control characters to a terminal."""

import argparse
import json
import random
import re
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from deepspeed_compress.cli import report_failure
from deepspeed_compress.errors import CompressError
from deepspeed_compress.tools.lint import command
from deepspeed_compress.tools.lint.options import add_lint_arguments
from deepspeed_compress.tools.outputs.machine import FORMATS
from tests.support.mutations import damage

ROOT = Path(__file__).parents[2]
MEGABYTES = 2**10  # of ru_maxrss, which counts kilobytes
ACCELERATE = b"""compute_environment: LOCAL_MACHINE
deepspeed_config:
  deepspeed_config_file: other.json
  gradient_accumulation_steps: 4
  offload_optimizer_device: nvme
  zero3_init_flag: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
"""
MODEL = b'{"hidden_size": 64, "num_attention_heads": 4, "text_config": {"hidden_size": 8}, "vocab_size": 64}'
PIECES = (
    *(b"\x00", b"\xff", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[2J", b"\x1b]0;title\x07", b"\r", b"\n", b"\\ud800"),
    *(part.encode() for part in ("{", "}", "[", "]", ",", ":", '"', "'''", "/*", "#", "&a ", "*a", "? ", "- ", "\\")),
    *(b"{" * 500, b"[" * 5000, b"9" * 5000, b"-1e999", b"NaN", b"null", b"auto", b"true"),
    b"!!python/object:os.system ",
)


def kinds() -> dict[str, list[bytes]]:
    """Return real contents of each kind of file that the linter reads, by the name of the file."""
    configs = [path.read_bytes() for path in sorted((ROOT / "configs").rglob("*.json"))]
    return {
        "ds_config.json": configs,
        "ds_config.yaml": [b"train_batch_size: 8\nzero_optimization:\n  stage: 2\nfp16: {enabled: true}\n"],
        "accelerate.yaml": [ACCELERATE, *(path.read_bytes() for path in sorted((ROOT / "configs").rglob("*.yaml")))],
        "config.json": [MODEL],
    }


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lint(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    # The parser is built only once, because building it takes as long as linting.
    parser = argparse.ArgumentParser()
    add_lint_arguments(parser)

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = command.run(parser.parse_args(arguments))
        except (CompressError, OSError) as error:
            code = report_failure(error, command.FAILED)
        written = capsys.readouterr()
        return code, written.out, written.err

    return run


def runs(count: int, seed: int) -> Iterator[tuple[str, bytes, list[str]]]:
    """Yield the name and content of a mutated file, and the arguments to lint it with."""
    rng, real = random.Random(seed), kinds()
    pieces = [*PIECES, *(content[len(content) // 2 :] for contents in real.values() for content in contents)]
    given = {"config.json": ["whole.json", "--model", "config.json"]}
    for number in range(count):
        name = rng.choice(("ds_config.json", *real))
        content = rng.choice(real[name])
        for _ in range(rng.randint(1, 4)):
            content = damage(content, rng, pieces)
        options = ([], ["--framework", "hf"], ["--framework", "lightning"], ["--fix"])[number % 4]
        output = ["--output-format", list(FORMATS)[number % len(FORMATS)]]
        yield name, content, [*given.get(name, [name]), *options, *output]


@pytest.mark.parametrize("seed", [20, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(21, 26))])
def test_mutated_files_lead_to_findings_or_a_plain_error(lint: Run, tmp_path: Path, seed: int) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    codes = set()
    for name in ("whole.json", "other.json"):
        (tmp_path / name).write_text('{"train_batch_size": 8}')
    for name, content, arguments in runs(400, seed):
        path = tmp_path / name
        path.write_bytes(content)
        code, _, err = lint(*arguments)
        assert "internal error" not in err, (content, err)
        assert "Traceback" not in err
        assert code in (0, 1) or err.startswith("ds-compress: error: "), (content, err)
        codes.add(code)
        path.unlink()
    assert codes == {0, 1, 2}
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * MEGABYTES


CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
KEY = "\x1b[31mk\x9b\x7f\u202e"


@pytest.mark.parametrize("output", FORMATS)
@pytest.mark.parametrize("text", [json.dumps({KEY: 1, "fp16": {KEY: KEY}}), '{"a": "\x1b]0;x\x07", "\x1bk": \x1b\x00}'])
def test_outputs_have_no_control_characters(lint: Run, tmp_path: Path, output: str, text: str) -> None:
    name = "ds_config\x1b[2J.json"
    (tmp_path / name).write_text(text)
    _, out, err = lint(name, "--output-format", output)
    assert not CONTROL.search(out + err)


@pytest.mark.parametrize("arguments", [["\x1b[2J.json"], ["--select", "\x1b[2J"]])
def test_errors_have_no_control_characters(lint: Run, arguments: list[str]) -> None:
    code, out, err = lint(*arguments)
    assert code == 2
    assert not CONTROL.search(out + err)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{\n"a": 1,\n"b": "\xff"}', "ds_config.json:3:7: DSC001 syntax-error: not UTF-8 text (byte 16)"),
        ('{"a": 1}'.encode("utf-16"), "ds_config.json:1:1: DSC001 syntax-error: not UTF-8 text (byte 0), but UTF-16"),
        (b'{\n"a": "\x00"}', "ds_config.json:2:7: DSC001"),
        (b'{"a": 1,\n"b": "\xed\xa0\x80"}', "ds_config.json:2:7: DSC001 syntax-error: not UTF-8 text (byte 15)"),
        (b'{\n"\\ud800": 1}', 'ds_config.json:2:1: DSC100 unknown-key: "\N{REPLACEMENT CHARACTER}"'),
    ],
)
def test_a_wrong_encoding_is_reported_with_its_line(lint: Run, tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "ds_config.json").write_bytes(content)
    code, out, _ = lint("ds_config.json")
    assert code == 1
    assert expected in out
