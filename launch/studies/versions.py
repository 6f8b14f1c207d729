"""Run the tests that compare with DeepSpeed, resume and train with Trainer, in an environment for each set of versions.

    python -m launch.studies.versions --output-dir runs/versions
    python -m launch.studies.versions --output-dir runs/versions --only 0.19.6 newest

Each environment is made from the package index, and deleted afterwards. Finished runs are not repeated. A row that
cannot be installed, or takes longer than `--minutes`, is left out, and the others go on. The row "newest" has the
newest release of everything, so it shows whether a new release still has the methods that this package replaces.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

__all__ = ["PARTS", "VERSIONS", "Outcome", "read_outcomes", "run", "table"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("deepspeed", "torch", "transformers", "accelerate")
VERSIONS: Mapping[str, tuple[str, ...]] = {
    "0.18.3": ("==0.18.3", "==2.7.1", "==4.51.3", "==1.6.0"),
    "0.18.4": ("==0.18.4", "==2.7.1", "==4.51.3", "==1.6.0"),
    "0.18.5": ("==0.18.5", "==2.7.1", "==4.51.3", "==1.6.0"),
    "0.19.0": ("==0.19.0", "==2.7.1", "==4.51.3", "==1.6.0"),
    "0.19.2": ("==0.19.2", "==2.9.1", "==4.57.6", "==1.10.1"),
    "0.19.3": ("==0.19.3", "==2.13.0", "==4.57.6", "==1.10.1"),
    "0.19.5": ("==0.19.5", "==2.13.0", "==4.53.3", "==1.6.0"),
    "0.19.6": ("==0.19.6", "==2.13.0", "==5.0.0", "==1.10.1"),
    "0.19.7": ("==0.19.7", "==2.13.0", "==5.23.0", "==1.15.0"),
    "0.19.8": ("==0.19.8", "==2.13.0", "==5.23.0", "==1.15.0"),
    "0.19.8-2.14": ("==0.19.8", "==2.14.1", "==5.24.0", "==1.15.0"),
    "0.19.8-2.15": ("==0.19.8", "==2.15.0", "==5.24.0", "==1.15.0"),
    "0.19.8-old": ("==0.19.8", "==2.7.1", "==4.51.3", "==1.6.0"),
    "newest": ("", "", "", ""),
}
"""Version specifiers of `PACKAGES`, by name of the row."""
CORE = ("hjson", "pydantic>=2.10", "pyyaml", "rich", "safetensors", "packaging", "numpy")
"""Packages that this one needs. It is itself found by PYTHONPATH, because pip would refuse versions that it does not
ask for."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema", "ninja")
_CHECKPOINT = "tests/checkpointing/deepspeed/test_checkpoint.py::"
_CONTRACT = "tests/backends/contract/test_contract.py::"
_DEEPSPEED = "tests/backends/deepspeed/"
PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "as DeepSpeed": {
        _CONTRACT + "test_method_none_is_the_engine_bit_for_bit": (
            "zero stage 0 1 0.0",
            "zero stage 1 1 0.5",
            "zero stage 2 2 0.0",
            "zero stage 3 2 0.5",
        ),
        _DEEPSPEED + "test_equal_to_deepspeed.py::test_uncompressed_exchange": (
            "1-default",
            "1-reduce_scatter",
            "2-default",
            "3-default",
        ),
        _DEEPSPEED + "test_equal_to_deepspeed.py::test_uncompressed_exchange_in_a_pipeline": ("1",),
    },
    "4 bits": {
        _DEEPSPEED + "test_compressed_training.py::test_replicas_agree_and_learn": (
            "2-share",
            "3-share",
        ),
        _DEEPSPEED + "test_compressed_training.py::test_bf16": ("0",),
        _DEEPSPEED + "test_compressed_training.py::test_optimizer_offload": ("2",),
        _DEEPSPEED + "test_compressed_training.py::test_pipeline": ("0-int8",),
    },
    "weights": {
        _DEEPSPEED + "test_weights.py::test_uncompressed_is_deepspeed_to_the_bit": (
            "raw-zero_2",
            "raw-bf16",
            "dense-bf16_optimizer",
        ),
        _DEEPSPEED + "test_weights_3.py::test_uncompressed_messages_give_the_results_of_deepspeed": (
            "bf16-gathered again",
            "fp32-kept",
        ),
    },
    "resume": {
        _CHECKPOINT + "test_resuming_is_bit_identical_to_going_on": ("2-share",),
    },
    "ownership": {
        _DEEPSPEED + "test_ownership.py::test_training_is_deepspeeds_to_the_bit": ("1-fp32", "2-bf16"),
    },
    "programs": {_DEEPSPEED + "test_random_programs.py::test_random_programs": ("1",)},
    "Trainer": {
        "tests/integrations/test_trainer.py::test_none_is_bit_identical_and_compression_trains": (
            "1-plain",
            "2-accumulation",
            "3-plain",
        ),
    },
    "DDP": {_CONTRACT + "test_a_resumed_run_equals_an_uninterrupted_one": ("ddp int4", "ddp random")},
}
"""Cases of test functions, by column."""


@dataclass(frozen=True)
class Outcome:
    """Numbers of tests that passed, failed, were skipped, and were refused because DeepSpeed is too old."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    refused: int = 0

    def __add__(self, other: "Outcome") -> "Outcome":
        return Outcome(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.refused + other.refused,
        )

    def __str__(self) -> str:
        counts = {"failed": self.failed, "refused": self.refused, "skipped": self.skipped}
        return ", ".join([str(self.passed), *(f"{count} {name}" for name, count in counts.items() if count)])


def main() -> None:
    """Run what is missing, and print the table."""
    options = parse_options()
    for row in options.only:
        if not _report(options.output_dir, row).exists():
            run(row, options)
    print("\n".join(table(options.output_dir, options.only)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test the package with several versions of what it builds on.")
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for environments and test reports")
    add("--only", nargs="+", choices=VERSIONS, default=list(VERSIONS), metavar="ROW", help="default: all rows")
    add("--keep", action="store_true", help="do not delete environments")
    add(
        "--minutes", type=float, default=20, metavar="N", help="time limit of a row, with its installation; default: 20"
    )
    return parser.parse_args()


def run(row: str, options: argparse.Namespace) -> None:
    """Make the environment of `row`, run the tests in it, and delete it. Tell of a failure, and leave the row out."""
    environment = options.output_dir.absolute() / row
    deadline = time.monotonic() + 60 * options.minutes
    try:
        python = make_environment(environment, VERSIONS[row], deadline)
        _say(f"{row}: testing")
        report = f"--junitxml={_report(options.output_dir, row)}"
        command = [python, "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", report]
        _call([*command, *_columns()], deadline, cwd=ROOT, env=_variables(environment))
    except subprocess.TimeoutExpired:
        _say(f"{row}: not finished within {options.minutes:g} minutes")
    except subprocess.CalledProcessError as error:
        _say(f"{row}: {' '.join(error.cmd[:4])} ... failed with {error.returncode}")
    finally:
        if not options.keep:
            shutil.rmtree(environment, ignore_errors=True)


def make_environment(directory: Path, versions: Sequence[str], deadline: float) -> str:
    """Install `versions` of `PACKAGES` into a virtual environment, unless it exists, and return its Python.

    Raises:
        CalledProcessError: an installation failed.
        TimeoutExpired: the time of `time.monotonic` passed `deadline`.
    """
    python = str(directory / "bin/python")
    if not (directory / "complete").exists():
        _say(f"{directory.name}: installing")
        commands = [
            [sys.executable, "-m", "venv", "--clear", str(directory)],
            # First alone, because packages that are built, such as DeepSpeed, import torch.
            [*_pip(python), PACKAGES[1] + versions[1]],
            [*_pip(python), *(name + version for name, version in zip(PACKAGES, versions, strict=True)), *CORE, *TOOLS],
        ]
        for command in commands:
            code = _call(command, deadline)
            if code:
                raise subprocess.CalledProcessError(code, command)
        (directory / "complete").touch()
    return python


def _pip(python: str) -> list[str]:
    return [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]


def _call(command: Sequence[str], deadline: float, **options: Any) -> int:
    """Run `command`, and return its exit code. At `deadline`, end it with all of its processes.

    Raises:
        TimeoutExpired: it was ended.
    """
    with subprocess.Popen(command, start_new_session=True, **options) as process:
        try:
            return process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            # Ranks that hang would keep the machine busy during the next row.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _variables(environment: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "TORCH_EXTENSIONS_DIR": str(environment / "torch_extensions"),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }


def _report(directory: Path, row: str) -> Path:
    return directory.absolute() / f"{row}.xml"


def read_outcomes(report: Path) -> Mapping[str, Outcome]:
    """Return the numbers in a JUnit report of pytest, by column; none if there is no report."""
    found: dict[str, Outcome] = {}
    columns = {test.replace(".py::", ".").replace("/", "."): column for test, column in _columns().items()}
    for case in ElementTree.parse(report).iter("testcase") if report.exists() else ():
        column = columns.get(f"{case.attrib['classname']}.{case.attrib['name']}")
        if column is not None:
            found[column] = found.get(column, Outcome()) + _outcome(case)
    return found


def _columns() -> Mapping[str, str]:
    """Return the column of each test, by its identity in pytest."""
    return {
        f"{function}[{case}]": column
        for column, functions in PARTS.items()
        for function, cases in functions.items()
        for case in cases
    }


def _outcome(case: ElementTree.Element) -> Outcome:
    problems = [*case.iter("failure"), *case.iter("error")]
    if any(
        "UnsupportedError" in (problem.text or "") and "deepspeed>=" in (problem.text or "") for problem in problems
    ):
        return Outcome(refused=1)
    if problems:
        return Outcome(failed=1)
    return Outcome(skipped=1) if case.find("skipped") is not None else Outcome(passed=1)


def table(directory: Path, only: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table with a row for each set of versions."""
    yield "| " + " | ".join((*PACKAGES, *PARTS)) + " |"
    yield "|---" * (len(PACKAGES) + len(PARTS)) + "|"
    for row in only:
        outcomes = read_outcomes(_report(directory, row))
        versions = [version.removeprefix("==") or "newest" for version in VERSIONS[row]]
        yield "| " + " | ".join((*versions, *(str(outcomes.get(part, "not run")) for part in PARTS))) + " |"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
