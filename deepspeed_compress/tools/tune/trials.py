"""A trial: its file, its command line, its processes, and the result that it leaves."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.files import write_json, write_text
from deepspeed_compress.tools.line_files import read_lines
from deepspeed_compress.tools.run_directory import read_statistics
from deepspeed_compress.tools.tune.halving import Result, Rung
from deepspeed_compress.tools.tune.space import Candidate

__all__ = [
    "CONFIG",
    "LINES",
    "LOG",
    "PLACEHOLDER",
    "TRIAL",
    "Task",
    "Trials",
    "excludes_momentum",
    "figures",
    "finished_before",
    "for_trial",
    "save_result",
    "steps_done",
    "trial_config",
    "with_config",
]

TRIAL = "deepspeed_compress_trial"
"""Key beside the section, in the file of a trial alone: its `Task`. DeepSpeed keeps top-level keys that it does not
know. Launchers pass files to other machines more surely than environment variables."""
CONFIG, LOG, LINES, RESULT, MONITOR = "ds_config.json", "stdout.log", "trial.jsonl", "result.json", "statistics"
MEASURED_EVERY = 5
"""Optimizer steps between statistics, so that taking them does not show in the median time of a step."""
LAST_PART, LEAST = 4, 5
"""The loss counts over the last fourth of the steps, and over five at least."""
FIRST_PART = 5
"""The first fifth of the steps is for warming up, and not measured; three at least."""
_LOGGERS = ("tensorboard", "wandb", "comet", "csv_monitor")
"""Loggers of DeepSpeed: a trial is none of the user's runs."""
_LATER = ("guard", "adaptive")
"""Keys of the section that change settings in mid-run: a trial is to show the settings it is for."""


@dataclass(frozen=True)
class Task:
    """What the processes of a trial are to do: `steps` optimizer steps, and leave the figures in `directory`."""

    steps: int
    directory: str

    @property
    def lines(self) -> Path:
        return Path(self.directory) / LINES


def trial_config(ds_config: Mapping[str, Any], candidate: Candidate, task: Task) -> dict[str, Any]:
    """The file of a trial: `ds_config` with the candidate's section, its schedule fit to so few steps.

    There is no ramp, and there are no phases; warm-up is shortened to a fifth of the steps.
    """
    section = {key: value for key, value in candidate.section.items() if key not in _LATER}
    most = task.steps // FIRST_PART
    section["gradients"] = _shortened(candidate.section.get("gradients", {}), "density_warmup_steps", most)
    warmup = _shortened(candidate.section.get("schedule", {}), "warmup_steps", most).get("warmup_steps", 0)
    section["schedule"] = {"warmup_steps": warmup}
    section["monitor"] = {"every": MEASURED_EVERY, "path": str(Path(task.directory) / MONITOR)}
    if candidate.config.gradients.method != "none":
        section["monitor"]["cosine_every"] = 2 * MEASURED_EVERY
    silent = {key: {**ds_config[key], "enabled": False} for key in _LOGGERS if isinstance(ds_config.get(key), dict)}
    return {**ds_config, **silent, SECTION: section, TRIAL: asdict(task)}


def _shortened(settings: Mapping[str, Any], key: str, most: int) -> dict[str, Any]:
    return {**settings, key: min(settings[key], most)} if key in settings else dict(settings)


def steps_done(directory: Path) -> int:
    """How far a running trial is, to the last measured step."""
    lines = read_statistics(directory / MONITOR)
    return int(lines[-1]["step"]) if lines else 0


def figures(directory: Path) -> dict[str, Any]:
    """Fields of `Result` that the lines of a trial tell."""
    lines = read_lines(directory / LINES)
    late = lines[max(3, len(lines) // FIRST_PART) :]
    cosines = [line["cosine"] for line in late if line["cosine"] is not None]
    return {
        "loss": statistics.fmean(line["loss"] for line in lines[-max(LEAST, len(lines) // LAST_PART) :]),
        "step_ms": statistics.median(line["step_ms"] for line in late),
        "bytes": statistics.fmean(line["bytes"] for line in late if line["bytes"] is not None),
        "cosine": statistics.fmean(cosines) if cosines else None,
    }


def save_result(directory: Path, result: Result) -> None:
    """Write it down, whole or not at all: that makes the trial one that need not be repeated."""
    write_json(directory / RESULT, asdict(result))


def finished_before(directory: Path, ds_config: Mapping[str, Any]) -> Result | None:
    """The result of a trial of the same file that has finished, if there is one."""
    try:
        same = json.loads((directory / CONFIG).read_text(encoding="utf-8")) == ds_config
        fields = json.loads((directory / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    result = Result(**{**fields, "tail": tuple(fields["tail"])})
    return result if same and result.finished else None


PLACEHOLDER = "{trial}"
"""Stands for the directory of the trial in any argument."""
OUTPUTS = ("--output_dir", "--output-dir", "--save_dir", "--save-dir")
"""Options by which scripts are told where to write: a trial must neither touch a run nor go on from it."""
FIRST_MOMENT = ("--adam_beta1", "--adam-beta1")


def with_config(arguments: Sequence[str], config: Path, replacement: Path) -> list[str]:
    """`arguments` with every one that names the file `config`, alone or after "--option=", naming `replacement`.

    Raises ConfigError when there is none.
    """
    named: list[str] = []

    def replaced(option: str, value: str) -> str:
        if not _names(value, config):
            return value
        named.append(value)
        return str(replacement)

    changed = _each_value(arguments, replaced)
    if not named:
        raise ConfigError(
            f"--config {config}: no argument of the command names this file, so trials cannot have files of their own "
            f"(allowed: any option). Write it where the script or the launcher reads it, such as SCRIPT --deepspeed "
            f"{config}; if the path stands inside the script, let the script take it from an argument."
        )
    return changed


def for_trial(arguments: Sequence[str], config: Path, ds_config: Path, directory: Path) -> list[str]:
    """`arguments` of a trial: it reads `ds_config` for `config`, and writes below `directory`. Raises ConfigError."""
    placed = [argument.replace(PLACEHOLDER, str(directory)) for argument in arguments]
    output = str(directory / "output")
    moved = _each_value(placed, lambda option, value: output if option in OUTPUTS else value)
    return with_config(moved, config, ds_config)


def excludes_momentum(arguments: Sequence[str]) -> bool:
    """Whether `arguments` tell Trainer's Adam to have no first moment."""
    given: list[str] = []

    def note(option: str, value: str) -> str:
        given.extend([value] * (option in FIRST_MOMENT))
        return value

    _each_value(arguments, note)
    return bool(given) and re.fullmatch(r"0+\.?0*|\.0+", given[-1]) is not None


def _each_value(arguments: Sequence[str], change: Callable[[str, str], str]) -> list[str]:
    """`arguments` with `change(option, value)` for each value; `option` is "" for what stands behind none."""
    changed: list[str] = []
    before = ""
    for argument in arguments:
        option, equals, value = argument.partition("=")
        if argument.startswith("-"):
            changed.append(f"{option}={change(option, value)}" if equals else argument)
        else:
            changed.append(change(before, argument))
        before = argument if argument.startswith("-") and not equals else ""
    return changed


def _names(value: str, config: Path) -> bool:
    return bool(value) and Path(value).resolve() == config.resolve()


RUNNER = "deepspeed_compress.tools.tune.rank"
POLL = 0.2
PATIENCE = 30.0
"""Seconds between asking the processes to end and ending them."""
TAIL = 20
"""Lines of a log that are kept."""
_ERROR = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b")
_RANK = re.compile(r"^\[rank\d+\]: ?")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Trials:
    """Runs trials of `ds_config`, the content of `config`, with `arguments` of `launcher`, below `output`/exps."""

    ds_config: Mapping[str, Any]
    config: Path
    launcher: str
    arguments: Sequence[str]
    output: Path

    def directory(self, candidate: Candidate, rung: Rung) -> Path:
        return self.output.resolve() / "exps" / f"{candidate.name}-{rung.steps}steps"

    def find(self, candidate: Candidate, rung: Rung) -> Result | None:
        """The result of such a trial that has finished, now or in an earlier call of the program."""
        directory = self.directory(candidate, rung)
        return finished_before(directory, self._config_of(candidate, rung))

    def run(self, candidate: Candidate, rung: Rung, seconds: float, progress: Callable[[int], None]) -> Result:
        """Run one trial for `seconds` at most; `progress` gets the steps that are done. Raises ConfigError for a
        command that the launcher does not take."""
        from deepspeed_compress.integrations.launch import launch_command

        directory = self.directory(candidate, rung)
        given = for_trial(self.arguments, self.config, directory / CONFIG, directory)
        command = launch_command(self.launcher, given, RUNNER)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_json(directory / CONFIG, self._config_of(candidate, rung), private=True)
        write_text(directory / "cmd.txt", shlex.join(command) + "\n", private=True)
        begin = time.monotonic()
        code = _wait(command, directory, begin + seconds, progress)
        result = _result(candidate.name, directory, code, time.monotonic() - begin)
        save_result(directory, result)
        return result

    def _config_of(self, candidate: Candidate, rung: Rung) -> dict[str, Any]:
        task = Task(rung.steps, str(self.directory(candidate, rung)))
        # As it will be read: tuples of the section are lists in a file.
        found: dict[str, Any] = json.loads(json.dumps(trial_config(self.ds_config, candidate, task)))
        return found


def _wait(command: Sequence[str], directory: Path, deadline: float, progress: Callable[[int], None]) -> int | None:
    """The exit code; None when time was up."""
    with (directory / LOG).open("wb") as log:
        # A session of its own, so that everything that the launcher starts can be ended with it.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return None
                progress(steps_done(directory))
                time.sleep(POLL)
            return process.returncode
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, which ends what it has started, and then what is left."""
    if process.poll() is None:
        _signal(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    _signal(process, signal.SIGKILL)
    process.wait()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _result(name: str, directory: Path, code: int | None, seconds: float) -> Result:
    """The figures are written when all ranks have made all steps; how the script ends then is not the candidate's."""
    if (directory / LINES).is_file():
        return Result(name, "finished", seconds=seconds, **figures(directory))
    tail = tuple(_lines(directory)[-TAIL:])
    if code is None:
        return Result(name, "stopped", seconds=seconds, error="time was up", tail=tail)
    return Result(name, "failed", seconds=seconds, error=_cause(directory, code), tail=tail)


def _cause(directory: Path, code: int) -> str:
    """The last error in the log, with the list of problems behind it; launchers add lines of their own."""
    lines = [_RANK.sub("", line) for line in _lines(directory)]
    errors = [place for place, line in enumerate(lines) if _ERROR.match(line)]
    if not errors:
        return f"exit code {code}, and no figures"
    problems = takewhile(lambda line: line.lstrip().startswith("- "), lines[errors[-1] + 1 :])
    # Ranks that write at once write the same problems.
    return " ".join([lines[errors[-1]], *dict.fromkeys(line.strip() for line in problems)])


def _lines(directory: Path) -> list[str]:
    text = (directory / LOG).read_text(encoding="utf-8", errors="replace")
    return [line.rstrip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
