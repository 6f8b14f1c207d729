"""Run the tests that compare with DeepSpeed, resume and train with Trainer, in an environment for each set of versions.

    python -m launch.studies.versions --output-dir runs/versions
    python -m launch.studies.versions --output-dir runs/versions --only 0.19.6 newest

Each environment is made from the package index, and deleted afterwards. Finished runs are not repeated. The row
"newest" has the newest release of everything, so it shows whether a new release still has the methods that this package
replaces.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from xml.etree import ElementTree

__all__ = ["PARTS", "VERSIONS", "Outcome", "read_outcome", "table"]

ROOT = Path(__file__).parents[2]
PACKAGES = ("deepspeed", "torch", "transformers", "accelerate")
VERSIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "0.19.6": ("==0.19.6", "==2.13.0", "==5.0.0", "==1.10.1"),
        "0.19.7": ("==0.19.7", "==2.13.0", "==5.23.0", "==1.15.0"),
        "0.19.8": ("==0.19.8", "==2.13.0", "==5.23.0", "==1.15.0"),
        "newest": ("", "", "", ""),
    }
)
"""Version specifiers of `PACKAGES`, by name of the row."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "jsonschema", "ninja")
_DEEPSPEED = "tests/backends/deepspeed/"
PARTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "as DeepSpeed": (_DEEPSPEED + "test_equal_to_deepspeed.py",),
        "4 bits": (_DEEPSPEED + "test_compressed_training.py",),
        "weights": (_DEEPSPEED + "test_weights.py", _DEEPSPEED + "test_weights_3.py"),
        "resume": ("tests/checkpointing/deepspeed/test_checkpoint.py",),
        "ownership": (_DEEPSPEED + "test_ownership.py",),
        "programs": (_DEEPSPEED + "test_programs.py",),
        "Trainer": ("tests/integrations/test_trainer.py",),
    }
)
"""Test files, by column."""


@dataclass(frozen=True)
class Outcome:
    """Numbers of tests that passed, failed and were skipped in one cell."""

    passed: int
    failed: int
    skipped: int

    def __str__(self) -> str:
        total = self.passed + self.failed
        return f"{self.passed} of {total}" + (f", {self.skipped} skipped" if self.skipped else "")


def main() -> None:
    """Run what is missing, and print the table."""
    options = parse_options()
    for row in options.only:
        missing = [part for part in options.parts if not _report(options.output_dir, row, part).exists()]
        if missing:
            run(row, missing, options)
    print("\n".join(table(options.output_dir, options.only)))


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Test the package with several versions of what it builds on.")
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for environments and test reports")
    add("--only", nargs="+", choices=VERSIONS, default=list(VERSIONS), metavar="ROW", help="default: all rows")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="default: all parts")
    add("--keep", action="store_true", help="do not delete environments")
    return parser.parse_args()


def run(row: str, parts: Sequence[str], options: argparse.Namespace) -> None:
    """Make the environment of `row`, run the tests of `parts`, and delete it."""
    environment = options.output_dir.absolute() / row
    python = make_environment(environment, VERSIONS[row])
    for part in parts:
        _say(f"{row}: {part}")
        report = _report(options.output_dir, row, part)
        command = [python, "-m", "pytest", "-q", "-n", "auto", "-p", "no:cacheprovider", f"--junitxml={report}"]
        subprocess.run([*command, *PARTS[part]], cwd=ROOT, env=_variables(environment), check=False)
    if not options.keep:
        shutil.rmtree(environment)


def make_environment(directory: Path, versions: Sequence[str]) -> str:
    """Install `versions` of `PACKAGES` into a virtual environment, unless it exists, and return its Python."""
    python = str(directory / "bin/python")
    if not (directory / "complete").exists():
        _say(f"{directory.name}: installing")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        wanted = [name + version for name, version in zip(PACKAGES, versions, strict=True)]
        install = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*install, wanted[1]], check=True)
        # The package itself is found by PYTHONPATH, because pip would refuse versions that it does not ask for.
        core = ("hjson", "pydantic>=2.10", "pyyaml", "rich", "safetensors", "packaging", "numpy")
        subprocess.run([*install, *wanted, *core, *TOOLS], check=True)
        (directory / "complete").touch()
    return python


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


def _report(directory: Path, row: str, part: str) -> Path:
    return directory.absolute() / f"{row}-{part.replace(' ', '-')}.xml"


def read_outcome(report: Path) -> Outcome | None:
    """Return the numbers in a JUnit report of pytest; None if there is no report."""
    if not report.exists():
        return None
    [suite] = ElementTree.parse(report).getroot().iter("testsuite")
    tests, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    failed = int(suite.attrib["failures"]) + int(suite.attrib["errors"])
    return Outcome(tests - failed - skipped, failed, skipped)


def table(directory: Path, only: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table with a row for each set of versions."""
    yield "| " + " | ".join((*PACKAGES, *PARTS)) + " |"
    yield "|---" * (len(PACKAGES) + len(PARTS)) + "|"
    for row in only:
        outcomes = [read_outcome(_report(directory, row, part)) for part in PARTS]
        versions = [version.removeprefix("==") or "newest" for version in VERSIONS[row]]
        yield "| " + " | ".join((*versions, *("not run" if one is None else str(one) for one in outcomes))) + " |"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
