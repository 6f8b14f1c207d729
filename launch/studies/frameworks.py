#!/usr/bin/env python3
"""Fine-tune with LLaMA-Factory, ms-swift, TRL and axolotl by their own commands, without and with this package.

Each framework has an environment of its own, which is made from the package index unless it exists. It trains a toy
Llama (2 layers of 64) for 4 steps on two ranks, LoRA and all parameters, with ZeRO 2 and 3, in four variants: its own
command; the same command behind `ds-compress run`, with method none and with 4 bits; and 4 bits, resumed from step 2.

The table says, for each: whether the run trains; the ratio of bytes that the logs report; whether losses and saved
weights of method none are those of the plain run to the bit; how far the last loss of 4 bits is from the plain one;
whether the resumed run ends with the bits of the uninterrupted one; whether transformers and PEFT load what was saved;
and whether the merged adapter gives the same logits. A cell that could not run shows the last error.

axolotl needs CUDA. It is started here, but stops before it trains.

Finished runs are kept and not repeated.

examples, from the root of the repository:
  python -m launch.studies.frameworks --output-dir runs/frameworks
  python -m launch.studies.frameworks --output-dir runs/frameworks --only TRL --stages 2 --tunings lora
"""

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed_compress.errors import DataError
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.tables import print_table
from launch.studies.framework_jobs import FRAMEWORKS, SAVE_EVERY, SECTIONS, STEPS, Command, Job, Paths
from launch.studies.harness import CPU, ROOT, new_parser, read_result, run_study, tracked

TORCH, DEEPSPEED = "torch==2.13.0", "deepspeed==0.19.8"
_GRACE = 30.0
"""Seconds that a command has to end after SIGTERM."""
COLUMNS = ("framework", "trains", "ratio", "none", "4 bits", "resume", "load", "merge")
_STUB = "torchaudio"
"""Package that some frameworks import, and that fails to load if its torch is another one. It is replaced by a stub."""
_UNLOADABLE = "torchvision"
"""Package that frameworks install and do without. That of the package index needs CUDA, and fails to load without."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, print the table, and return the exit status."""
    return run_study(study, parse_options(argv))


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for runs and results")
    what = "directory of the environments, one for each framework (default: OUTPUT_DIR/environments)"
    add("--environments", type=Path, metavar="DIR", help=what)
    add("--only", nargs="+", choices=FRAMEWORKS, default=list(FRAMEWORKS), metavar="NAME", help="(default: all)")
    add("--stages", type=int, nargs="+", choices=(2, 3), default=[2, 3], help="ZeRO stages (default: 2 3)")
    add("--tunings", nargs="+", choices=("lora", "full"), default=["lora", "full"], help="(default: both)")
    add("--minutes", type=float, default=10, metavar="N", help="time limit of a run (default: %(default)g)")
    options = parser.parse_args(argv)
    options.output_dir = options.output_dir.absolute()
    options.environments = (options.environments or options.output_dir / "environments").absolute()
    return options


def study(options: argparse.Namespace) -> bool:
    """Make the environments, train the missing runs, and print the table. Return True if all runs have trained."""
    environments = {name: Environment.of(name, options.environments) for name in options.only}
    for environment in tracked(list(environments.values())):
        environment.make()
    jobs = [
        Job(name, tuning, stage, variant)
        for name in options.only
        for stage in options.stages
        for tuning in options.tunings
        for variant in SECTIONS
    ]
    runs = {job: Run(job, environments[job.framework], options) for job in jobs}
    outcomes = {job: runs[job].outcome() for job in tracked(jobs)}
    report(outcomes, options.output_dir)
    return all(outcome.problem == "" for outcome in outcomes.values())


@dataclass(frozen=True)
class Environment:
    """Virtual environment of a framework."""

    directory: Path
    package: str

    @classmethod
    def of(cls, framework: str, directory: Path) -> "Environment":
        """Return the environment of a framework, whose directory has the name of its package."""
        package = FRAMEWORKS[framework].package
        return cls(directory / re.split(r"\W", package.replace("-", "_"))[0], package)

    @property
    def python(self) -> str:
        return str(self.directory / "bin" / "python")

    def make(self) -> None:
        """Install torch, the framework, DeepSpeed and this package, unless that is done."""
        if (self.directory / "complete").exists():
            return
        Console(stderr=True).print(f"installing {self.package}")
        pip = [self.python, "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        # DeepSpeed is built, and imports torch for that. Frameworks would replace torch by another version.
        commands = (
            [sys.executable, "-m", "venv", "--clear", str(self.directory)],
            [*pip, TORCH, "setuptools", "wheel", "ninja"],
            [*pip, TORCH, self.package],
            [*pip, "--no-build-isolation", TORCH, DEEPSPEED],
            [*pip, "--editable", str(ROOT)],
            [*pip[:-1], "uninstall", "--yes", _UNLOADABLE],
        )
        for command in commands:
            subprocess.run(command, check=True)
        self._stub()
        (self.directory / "complete").touch()

    def _stub(self) -> None:
        """Replace a package that cannot be imported by an empty one."""
        code = f"import importlib.util as u; s = u.find_spec({_STUB!r}); print(s.origin if s else '')"
        log = self.directory / "stub.txt"
        status, origin = self.call(Command([self.python, "-c", code], {}), log)
        if status == 0 and origin.strip() and self.call(Command([self.python, "-c", f"import {_STUB}"], {}), log)[0]:
            package = Path(origin.strip()).parent
            shutil.rmtree(package)
            package.mkdir()
            (package / "__init__.py").write_text("__version__ = '0'\n")

    def call(self, command: Command, log: Path, seconds: float = 600) -> tuple[int, str]:
        """Run a command of the environment in the directory of `log`, and end all of its processes after `seconds`.

        Returns:
            Its exit code, and what it has written to `log`.
        """
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        environment = {
            **os.environ,
            **CPU,
            "PATH": f"{self.directory / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "TORCH_EXTENSIONS_DIR": str(self.directory / "torch_extensions"),
            "MASTER_PORT": port,
            **command.environment,
        }
        with (
            log.open("wb") as output,
            subprocess.Popen(
                command.words, cwd=log.parent, env=environment, stdout=output, stderr=output, start_new_session=True
            ) as process,
        ):
            try:
                process.wait(seconds)
            except subprocess.TimeoutExpired:
                output.write(b"\nTimeoutError: the time limit of a run has passed\n")
            finally:
                _end(process)
        return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a command with all of its processes. Launchers get time to end their ranks, which have their own sessions."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE)


@dataclass(frozen=True)
class Outcome:
    """Result of a run.

    Attributes:
        losses: loss of each step.
        ratio: bytes of DeepSpeed divided by bytes sent; None without compression.
        change: largest difference of logits between what was saved and the model before training; None if it does not
            load, or in another variant than "4 bits".
        merged: largest difference of logits between the merged and the unmerged adapter; None if it was not merged.
        problem: last error; "" if the run has trained.
    """

    losses: tuple[float, ...] = ()
    ratio: float | None = None
    change: float | None = None
    merged: float | None = None
    seconds: float = 0.0
    problem: str = ""


class Run:
    """Run of a job, and its files."""

    def __init__(self, job: Job, environment: Environment, options: argparse.Namespace) -> None:
        self.job, self.environment, self.seconds = job, environment, 60 * options.minutes
        self.paths = Paths(options.output_dir / "toys" / job.framework, options.output_dir / job.name)

    def outcome(self) -> Outcome:
        """Train unless that is done, and return the result."""
        file = self.paths.run / "result.json"
        known = read_result(file, "job", self.job)
        if known is None:
            outcome = self._train()
            write_json(file, {"job": asdict(self.job), "outcome": asdict(outcome)})
            known = json.loads(file.read_text(encoding="utf-8"))
        return Outcome(**{**known["outcome"], "losses": tuple(known["outcome"]["losses"])})

    def _train(self) -> Outcome:
        self._prepare()
        command = FRAMEWORKS[self.job.framework].train(self.job, self.paths)
        if SECTIONS[self.job.variant] is not None:
            command = Command(("ds-compress", "run", *command.words), command.environment)
        begin = time.monotonic()
        code, log = self._call(command, "log.txt")
        seconds = time.monotonic() - begin
        if code or not self.saved.is_dir():
            return Outcome(seconds=seconds, problem=last_error(log))
        history = read_history(self.saved)
        ratios = [entry["compression_ratio"] for entry in history if "compression_ratio" in entry]
        losses = tuple(entry["loss"] for entry in history if "loss" in entry)
        checked = self._check()
        ratio = ratios[-1] if ratios else None
        return Outcome(losses, ratio, checked.get("change"), checked.get("merged"), seconds)

    @property
    def saved(self) -> Path:
        """Checkpoint of the last step."""
        return self.paths.output / f"checkpoint-{STEPS}"

    def _prepare(self) -> None:
        """Make an empty directory with the toy next to it, and the checkpoint from which the run resumes."""
        shutil.rmtree(self.paths.run, ignore_errors=True)
        self.paths.run.mkdir(parents=True)
        if not (self.paths.toy / "model" / "model.safetensors").is_file():
            self._toy("make", str(self.paths.toy), "make.txt")
        if self.job.variant == "resumed":
            name = f"checkpoint-{SAVE_EVERY}"
            uninterrupted = self.paths.run.with_name(replace(self.job, variant="4 bits").name)
            if (uninterrupted / "output" / name).is_dir():
                shutil.copytree(uninterrupted / "output" / name, self.paths.output / name)

    def _check(self) -> Mapping[str, float]:
        """Load what a compressed run has saved, and merge its adapter."""
        if self.job.variant != "4 bits":
            return {}
        base, saved, merged = self.paths.model, self.saved, self.paths.run / "merged"
        merge = FRAMEWORKS[self.job.framework].merge
        if self.job.tuning == "lora" and merge is None:
            self._toy("merge", base, str(saved), str(merged), "merge.txt")
        elif self.job.tuning == "lora" and merge is not None:
            self._call(merge(self.paths, saved, merged), "merge.txt")
        code, log = self._toy("check", base, str(saved), *([str(merged)] if merged.is_dir() else []), "check.txt")
        found: dict[str, float] = {} if code else json.loads(log.strip().splitlines()[-1])
        return found

    def _toy(self, *arguments: str) -> tuple[int, str]:
        *given, log = arguments
        return self._call(Command([self.environment.python, "-m", "launch.studies.framework_toy", *given], {}), log)

    def _call(self, command: Command, log: str) -> tuple[int, str]:
        return self.environment.call(command, self.paths.run / log, self.seconds)


def read_history(checkpoint: Path) -> list[dict[str, Any]]:
    """Return the logs in a checkpoint of Trainer.

    Raises:
        DataError: It has none.
    """
    try:
        history: list[dict[str, Any]] = json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{checkpoint}: no logs of Trainer ({error})") from error
    return history


def last_error(log: str) -> str:
    """Return the last line of a log that names an error."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line or "error:" in line]
    causes = [line for line in lines if "ChildFailedError" not in line and "CalledProcessError" not in line]
    return (causes or lines or ["no error in the log"])[-1][:160]


def report(outcomes: Mapping[Job, Outcome], directory: Path) -> None:
    """Print the table, and write it with the results of all runs."""
    cases = dict.fromkeys((job.framework, job.tuning, job.stage) for job in outcomes)
    rows = [tuple(cells(case, outcomes, directory)) for case in cases]
    print_table("two ranks, 4 steps of a toy Llama", COLUMNS, rows, ("framework",))
    write_json(
        directory / "frameworks.json",
        {
            "rows": [dict(zip(COLUMNS, row, strict=True)) for row in rows],
            "runs": {job.name: asdict(outcome) for job, outcome in outcomes.items()},
        },
    )


def cells(case: tuple[str, Any, int], outcomes: Mapping[Job, Outcome], directory: Path) -> Iterator[str]:
    """Yield the cells of a row."""
    framework, tuning, stage = case
    plain, none, four, resumed = (outcomes[Job(framework, tuning, stage, variant)] for variant in SECTIONS)
    saved = {
        variant: directory / Job(framework, tuning, stage, variant).name / "output" / f"checkpoint-{STEPS}"
        for variant in SECTIONS
    }
    yield f"{framework} {FRAMEWORKS[framework].package.partition('==')[2]}, {tuning}, ZeRO {stage}"
    yield plain.problem or "yes"
    yield four.problem or ("no" if four.ratio is None else f"{four.ratio:.1f}")
    yield none.problem or equal(plain, none, saved["plain"], saved["none"])
    yield "not run" if plain.problem or four.problem else f"{four.losses[-1] / plain.losses[-1] - 1:+.1e}"
    yield resumed.problem or equal(four, resumed, saved["4 bits"], saved["resumed"])
    yield "no" if four.change is None else "yes"
    yield "-" if tuning == "full" else merges(four)


def merges(outcome: Outcome) -> str:
    """Return how far the logits of the merged model are from those of its adapter."""
    return "no" if outcome.merged is None else f"{outcome.merged:.0e}"


def equal(first: Outcome, second: Outcome, saved: Path, other: Path) -> str:
    """Return whether two runs have the same losses and have saved the same tensors, to the bit."""
    if first.problem:
        return "not run"
    if first.losses != second.losses:
        return "other losses"
    return "equal" if same_tensors(saved, other) else "other weights"


def same_tensors(first: Path, second: Path) -> bool:
    """Return True if the safetensors files of two directories hold the same tensors."""
    from safetensors.torch import load_file

    names = [sorted(file.name for file in directory.glob("*.safetensors")) for directory in (first, second)]
    if names[0] != names[1] or not names[0]:
        return False
    pairs = ((load_file(first / name), load_file(second / name)) for name in names[0])
    return all(a.keys() == b.keys() and all(a[key].equal(b[key]) for key in a) for a, b in pairs)


if __name__ == "__main__":
    sys.exit(main())
