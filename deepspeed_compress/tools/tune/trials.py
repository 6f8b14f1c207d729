"""A trial: its configuration file, command line, processes and result."""

import json
import math
import re
import shlex
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import write_json, write_text
from deepspeed_compress.tools.bench.hosts import end_groups
from deepspeed_compress.tools.run_directory import read_lines
from deepspeed_compress.tools.tune.space import Candidate

TRIAL = "deepspeed_compress_trial"
"""Key next to the section, in the files of trials only, that holds the `Task`.

DeepSpeed keeps unknown top-level keys. Launchers pass files to other machines more reliably than environment variables.
"""
CONFIG, COMMAND, LOG, LINES, RESULT = "ds_config.json", "cmd.txt", "stdout.log", "trial.jsonl", "result.json"
MONITOR, EXPERIMENTS = "statistics", "exps"
MEASURED_EVERY = 5
"""Optimizer steps between statistics, large enough that collecting them does not affect the median step time."""
LAST_PART, LEAST = 4, 5
"""The loss is the mean over the last 1/`LAST_PART` of the steps, but over at least `LEAST` steps."""
FIRST_PART = 5
"""The first 1/`FIRST_PART` of the steps, at least three, is warm-up and not measured."""
_LOGGERS = ("tensorboard", "wandb", "comet", "csv_monitor")
"""Loggers of DeepSpeed. They are disabled, because a trial is not one of the user's runs."""
_LATER = ("guard", "adaptive", "auto")
"""Keys of the section that change settings during a run. A trial must measure the settings it is for."""


@dataclass(frozen=True)
class Rung:
    """Trials of equal length.

    Attributes:
        number: Number of the rung, from 1.
        steps: Optimizer steps of each trial.
        gap: Largest allowed loss gap to the baseline, as a fraction.
        slack: Fraction by which the metric may be above the baseline's.
    """

    number: int
    steps: int
    gap: float
    slack: float


@dataclass(frozen=True)
class Result:
    """Result of a trial. Figures are NaN if it did not finish.

    Attributes:
        name: Name of the candidate.
        status: Whether the trial finished, failed, or was stopped because time was up.
        loss: Mean loss over the last part of the steps.
        step_ms: Median milliseconds per step.
        bytes: Mean bytes of all kinds that one rank sends per step.
        seconds: Duration of the whole trial.
        error: Reason for a failure.
        tail: Last lines of the log.
    """

    name: str
    status: Literal["finished", "failed", "stopped"]
    loss: float = math.nan
    step_ms: float = math.nan
    bytes: float = math.nan
    seconds: float = 0.0
    error: str = ""
    tail: tuple[str, ...] = ()

    @property
    def finished(self) -> bool:
        return self.status == "finished"


@dataclass(frozen=True)
class Task:
    """Task of the processes of a trial: make `steps` optimizer steps and write the figures to `directory`."""

    steps: int
    directory: str


def trial_config(ds_config: Mapping[str, Any], candidate: Candidate, task: Task) -> dict[str, Any]:
    """Return the configuration of a trial: `ds_config` with the candidate's section, adapted to a short schedule.

    Ramps and phases are removed, and the warm-up is limited to a fifth of the steps.
    """
    section = {key: value for key, value in candidate.section.items() if key not in _LATER}
    most = task.steps // FIRST_PART
    section["gradients"] = _shortened(candidate.section.get("gradients", {}), "density_warmup_steps", most)
    warmup = _shortened(candidate.section.get("schedule", {}), "warmup_steps", most).get("warmup_steps", 0)
    section["schedule"] = {"warmup_steps": warmup}
    section["monitor"] = {"every": MEASURED_EVERY, "path": str(Path(task.directory) / MONITOR)}
    silent = {key: {**ds_config[key], "enabled": False} for key in _LOGGERS if isinstance(ds_config.get(key), dict)}
    return {**ds_config, **silent, SECTION: section, TRIAL: asdict(task)}


def _shortened(settings: Mapping[str, Any], key: str, most: int) -> dict[str, Any]:
    return {**settings, key: min(settings[key], most)} if key in settings else dict(settings)


def figures(directory: Path) -> dict[str, Any]:
    """Return the fields of `Result` that the recorded lines of a trial provide. A loss of null was not finite."""
    lines = read_lines(directory / LINES)
    losses = [math.nan if line["loss"] is None else line["loss"] for line in lines]
    late = lines[max(3, len(lines) // FIRST_PART) :]
    return {
        "loss": statistics.fmean(losses[-max(LEAST, len(lines) // LAST_PART) :]),
        "step_ms": statistics.median(line["step_ms"] for line in late),
        "bytes": statistics.fmean(line["bytes"] for line in late if line["bytes"] is not None),
    }


def finished_before(directory: Path, ds_config: Mapping[str, Any], command: str) -> Result | None:
    """Return the result of a finished trial with the same configuration and command, or None."""
    try:
        same = json.loads((directory / CONFIG).read_text(encoding="utf-8")) == ds_config
        same = same and (directory / COMMAND).read_text(encoding="utf-8") == command
        fields = json.loads((directory / RESULT).read_text(encoding="utf-8"))
        result = Result(**{**fields, "tail": tuple(fields["tail"])})
    except (OSError, ValueError, LookupError, TypeError):
        # The files are missing, damaged, or those of another version.
        return None
    return result if same and result.finished else None


PLACEHOLDER = "{trial}"
"""Placeholder for the directory of the trial in any argument."""
OUTPUTS = ("--output_dir", "--output-dir", "--save_dir", "--save-dir")
"""Options that tell scripts where to write. A trial must neither change a run nor continue from it."""


def with_config(arguments: Sequence[str], config: Path, replacement: Path) -> list[str]:
    """Return `arguments` with `replacement` in place of each one that names the file `config`.

    The file may be an argument of its own or follow "--option=".

    Raises:
        ConfigError: No argument names the file.
    """
    named = [place for place, _, value in _values(arguments) if value and Path(value).resolve() == config.resolve()]
    if not named:
        problem = "no argument of the command names this file, from which a script must take it"
        raise ConfigError(f"--config {config}: {problem}; write SCRIPT --deepspeed {config}, for example")
    return _with_values(arguments, named, str(replacement))


def for_trial(arguments: Sequence[str], config: Path, ds_config: Path, directory: Path) -> list[str]:
    """Return the `arguments` of a trial, which reads `ds_config` in place of `config` and writes below `directory`.

    Raises:
        ConfigError: No argument names `config`.
    """
    placed = [argument.replace(PLACEHOLDER, str(directory)) for argument in arguments]
    outputs = [place for place, option, _ in _values(placed) if option in OUTPUTS]
    return with_config(_with_values(placed, outputs, str(directory / "output")), config, ds_config)


def _values(arguments: Sequence[str]) -> Iterator[tuple[int, str, str]]:
    """Yield (index of the argument, option, value) of each value. The option is "" for positional values."""
    before = ""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if not argument.startswith("-"):
            yield place, before, argument
        elif equals:
            yield place, option, value
        before = argument if argument.startswith("-") and not equals else ""


def _with_values(arguments: Sequence[str], places: Iterable[int], value: str) -> list[str]:
    """Return `arguments` with `value` as the value at each of `places`."""
    changed = list(arguments)
    for place in places:
        option = changed[place].partition("=")[0] if changed[place].startswith("-") else ""
        changed[place] = f"{option}={value}" if option else value
    return changed


RUNNER = "deepspeed_compress.tools.tune.rank"
POLL = 0.2
PATIENCE = 30.0
"""Seconds between asking the processes to end and killing them."""
TAIL = 20
"""Number of log lines to keep."""
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b")
_RANK = re.compile(r"^\[rank\d+\]: ?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Trials:
    """Runner of trials.

    Attributes:
        ds_config: Content of `config`.
        config: The user's configuration file.
        launcher: Name of the launcher.
        arguments: Arguments of the launcher.
        output: Directory. Trials are stored below its subdirectory `exps`.
    """

    ds_config: Mapping[str, Any]
    config: Path
    launcher: str
    arguments: Sequence[str]
    output: Path

    def directory(self, candidate: Candidate, rung: Rung) -> Path:
        return self.output.resolve() / EXPERIMENTS / f"{candidate.name}-{rung.steps}steps"

    def find(self, candidate: Candidate, rung: Rung) -> Result | None:
        """Return the result of this trial if it has finished, in this call or an earlier one, else None."""
        command = shlex.join(self._command(candidate, rung)) + "\n"
        return finished_before(self.directory(candidate, rung), self._config_of(candidate, rung), command)

    def run(self, candidate: Candidate, rung: Rung, seconds: float) -> Result:
        """Run one trial for at most `seconds`.

        Raises:
            ConfigError: The launcher does not accept the command.
        """
        directory, command = self.directory(candidate, rung), self._command(candidate, rung)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_json(directory / CONFIG, self._config_of(candidate, rung), private=True)
        write_text(directory / COMMAND, shlex.join(command) + "\n", private=True)
        begin = time.monotonic()
        code = _wait(command, directory, begin + seconds)
        result = _result(candidate.name, directory, code, time.monotonic() - begin)
        write_json(directory / RESULT, asdict(result))
        return result

    def _command(self, candidate: Candidate, rung: Rung) -> list[str]:
        from deepspeed_compress.integrations.launch import launch_command

        directory = self.directory(candidate, rung)
        given = for_trial(self.arguments, self.config, directory / CONFIG, directory)
        return launch_command(self.launcher, given, RUNNER)

    def _config_of(self, candidate: Candidate, rung: Rung) -> Any:
        task = Task(rung.steps, str(self.directory(candidate, rung)))
        # Compare and pass it as it will be read: tuples of the section become lists in a file.
        return json.loads(json.dumps(trial_config(self.ds_config, candidate, task)))


def _wait(command: Sequence[str], directory: Path, deadline: float) -> int | None:
    """Wait for `command` and return its exit code, or None if time was up."""
    with (directory / LOG).open("wb") as log:
        # The process leads its own session, so that everything the launcher starts can be ended with it.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return None
                time.sleep(POLL)
            return process.returncode
        finally:
            # The launcher ends its own processes. The remaining ones are killed.
            end_groups([process], PATIENCE)


def _result(name: str, directory: Path, code: int | None, seconds: float) -> Result:
    """Return the result of a trial from its files.

    The figures are written once all ranks have made all steps. How the script exits after that is not held against the
    candidate.
    """
    if (directory / LINES).is_file():
        return Result(name, "finished", seconds=seconds, **figures(directory))
    tail = tuple(_lines(directory)[-TAIL:])
    if code is None:
        return Result(name, "stopped", seconds=seconds, error="time was up", tail=tail)
    return Result(name, "failed", seconds=seconds, error=_cause(directory, code), tail=tail)


def _cause(directory: Path, code: int) -> str:
    """Return the last error in the log with the list of problems after it. Lines added by launchers are skipped."""
    lines = [_RANK.sub("", line) for line in _lines(directory)]
    errors = [place for place, line in enumerate(lines) if _ERROR.match(line)]
    if not errors:
        return f"exit code {code}, and no figures"
    problems = takewhile(lambda line: line.lstrip().startswith("- "), lines[errors[-1] + 1 :])
    # Ranks that write at the same time report the same problems.
    return " ".join([lines[errors[-1]], *dict.fromkeys(line.strip() for line in problems)])


def _lines(directory: Path) -> list[str]:
    text = (directory / LOG).read_text(encoding="utf-8", errors="replace")
    return [line.rstrip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
