"""Damaged and hostile files of runs: `report` and `doctor` read them correctly, or end with one plain line."""

import io
import json
import os
import random
import re
import resource
import time
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from deepspeed_compress.errors import CompressError
from deepspeed_compress.monitor import Journal
from deepspeed_compress.tools import report, run_directory
from deepspeed_compress.tools.doctor.case import Case, read_run
from deepspeed_compress.tools.doctor.command import diagnose, print_text
from deepspeed_compress.tools.outputs.report import printable
from tests.support.mutations import damage, damaged_line
from tests.support.runs import trainer_run
from tests.support.synthetic_runs import HEALTHY, config

ROUNDS, SEEDS = 40, 50
"""Rounds per seed and number of seeds, or 2,000 rounds per kind of file. All seeds but the first are slow."""
STEPS = 20
"""More steps than the rules of the doctor need."""
FILES = (
    "compression.jsonl",
    "events.jsonl",
    "metrics.jsonl",
    "summary.json",
    "ds_config.json",
    "trainer_state.json",
    "train_results.json",
    "rollout.jsonl",
)


def write_run(directory: Path) -> None:
    """Write a short run that has every kind of file."""
    journal = Journal(str(directory), "a", 0)
    for step in range(1, STEPS + 1):
        journal.add("compression.jsonl", {"step": step, **HEALTHY})
        journal.add("metrics.jsonl", {"step": step, "train_loss": 3.0, "step_time_s": 0.25})
        journal.add("rollout.jsonl", {"step": step, "rollout_bytes": 9, "rollout_full_bytes": 99, "rollout_lag": 7.0})
    event = {"step": 3, "kind": "anomaly", "reason": "why", "evidence": {"norm": 1.0}, "before": "a", "after": "b"}
    journal.add("events.jsonl", event)
    (directory / "ds_config.json").write_text(json.dumps(config(rollout={"directory": "/shared"})))
    summary = {"eval_loss": 3.0, "tokens_per_s": 10.0, "run": "a", "parameters": 10}
    (directory / "summary.json").write_text(json.dumps(summary))
    trainer_run(directory)
    (directory / "train_results.json").write_text(json.dumps({"train_loss": 3.1, "train_runtime": 6.0}))


def mutations(text: bytes, seed: int) -> Iterator[bytes]:
    """Yield changed versions of a file."""
    rng = random.Random(seed)
    damaged = (damage, damaged_line if text.startswith(b"{") else damage, replaced_column)
    while True:
        yield rng.choice(damaged)(text, rng)


def replaced_column(text: bytes, rng: random.Random) -> bytes:
    """Replace all numbers of one key, as if the program had written them so."""
    keys = re.findall(rb'"(\w+)": -?[0-9]', text)
    key = rng.choice(keys)
    return re.sub(rb'("%s": )-?[0-9.e+]+' % key, rb"\g<1>" + rng.choice((b"0", b"-1", b"1e100", b"null")), text)


def read_both(directory: Path) -> str:
    """Run report and doctor on `directory`, and return what they print, or the error of the one that fails."""
    printed = io.StringIO()
    with redirect_stdout(printed), redirect_stderr(printed):
        for read in (read_report, read_doctor):
            try:
                read(directory)
            except CompressError as error:
                printed.write(f"{error}\n")
    return printed.getvalue()


def read_report(directory: Path) -> None:
    runs = report.load_runs(directory, None)
    report.page(runs).encode("utf-8", "replace")
    report.print_figures(runs)


def read_doctor(directory: Path) -> None:
    print_text(diagnose(Case(read_run(directory))))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, SEEDS))])
@pytest.mark.parametrize("name", FILES)
def test_a_changed_file_is_read_or_refused_by_name(name: str, seed: int, tmp_path: Path) -> None:
    """There are no other exceptions, and no control characters."""
    write_run(tmp_path)
    file = tmp_path / name
    whole, refused, before = file.read_bytes(), 0, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for changed, _ in zip(mutations(whole, SEEDS * FILES.index(name) + seed), range(ROUNDS), strict=False):
        file.write_bytes(changed)
        printed = read_both(tmp_path)
        assert all(line.isprintable() for line in printed.split("\n")), (changed, printed)
        refused += name in printed
    assert refused, "no change was refused"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500 * 1024


MISTAKES: dict[str, tuple[str, str, str]] = {
    "a string in place of a number": ("compression.jsonl", '{"step": 9, "bytes_sent": "many"}', "bytes_sent"),
    "an unknown part": ("compression.jsonl", '{"step": 9, "run": "x"}', "'run' is 'x'"),
    "no step": ("events.jsonl", '{"kind": "anomaly"}', "'step'"),
    "an event without a kind": ("events.jsonl", '{"step": 1}', "'kind'"),
    "nested deeply": ("metrics.jsonl", "[" * 30_000, "nested too deeply"),
    "a huge number": ("metrics.jsonl", '{"step": 9, "train_loss": 1e300}', "train_loss"),
    "an escape sequence": ("events.jsonl", '{"step": 1, "kind": "\\u001b]0;x\\u0007", "island": "\\u001b"}', "island"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_reported_with_file_and_line(case: str, tmp_path: Path) -> None:
    name, line, words = MISTAKES[case]
    write_run(tmp_path)
    lines = (tmp_path / name).read_text().splitlines()
    (tmp_path / name).write_text("\n".join([lines[0], line, *lines[1:]]) + "\n")
    for read in (lambda: report.load_runs(tmp_path, None), lambda: read_run(tmp_path)):
        with pytest.raises(CompressError) as raised:
            read()
        text = str(raised.value)
        assert text.startswith(f"{tmp_path / name}:2: ")
        assert words in text
        assert text.isprintable()


def test_directories_and_pipes_in_place_of_files_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").mkdir()
    assert "metrics.jsonl: cannot be read (is not a regular file)" in read_both(tmp_path)
    (tmp_path / "metrics.jsonl").rmdir()
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert "metrics.jsonl: cannot be read (is not a regular file)" in read_both(tmp_path)


def test_names_with_control_characters_are_escaped(tmp_path: Path) -> None:
    place = tmp_path / "run\x1b[2J[red]$x$"
    place.mkdir()
    write_run(place)
    with open(place / "events.jsonl", "a") as file:
        file.write(json.dumps({"step": 4, "kind": "\x1b[31m", "reason": "\ud800"}) + "\n")
    printed = read_both(place)
    assert "\x1b" not in printed
    assert "[red]" in printed
    assert report.page(report.load_runs(place, None))


def test_printable_escapes_control_characters_and_surrogates() -> None:
    assert printable("plain \N{LATIN SMALL LETTER E WITH ACUTE}") == "plain \N{LATIN SMALL LETTER E WITH ACUTE}"
    assert printable("a\x1b[0m\n\ud800") == "a\\x1b[0m\\n\\ud800"


def test_a_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    monkeypatch.setattr(run_directory, "LARGEST_TEXT", 100_000)
    for name in FILES:
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content + b" " * 100_000)
        assert f"{name}: has more than 100,000 bytes" in read_both(tmp_path)
        (tmp_path / name).write_bytes(content)


@pytest.mark.slow
def test_a_long_run_takes_seconds(tmp_path: Path) -> None:
    line, steps = json.dumps({**HEALTHY, "run": {"id": "a", "started": "2026-01-01T00:00:00", "since": 0}}), 100_000
    with open(tmp_path / "compression.jsonl", "w") as file:
        file.writelines(f'{{"step": {step}, {line[1:]}\n' for step in range(1, steps + 1))
    before = time.process_time()
    printed = read_both(tmp_path)
    assert time.process_time() - before < 60
    assert f"{steps:,} measured steps" in " ".join(printed.split())
