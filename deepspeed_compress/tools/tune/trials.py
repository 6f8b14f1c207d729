"""Trials as processes: the user's script under its launcher, in a directory of its own."""

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from deepspeed_compress.tools.tune import files
from deepspeed_compress.tools.tune.arguments import for_trial
from deepspeed_compress.tools.tune.files import Task
from deepspeed_compress.tools.tune.halving import Result, Rung
from deepspeed_compress.tools.tune.space import Candidate
from deepspeed_compress.training.records import write_json

__all__ = ["Trials"]

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
        return files.finished_before(directory, self._config_of(candidate, rung))

    def run(self, candidate: Candidate, rung: Rung, seconds: float, progress: Callable[[int], None]) -> Result:
        """Run one trial for `seconds` at most; `progress` gets the steps that are done. Raises ConfigError for a
        command that the launcher does not take."""
        from deepspeed_compress.integrations.launch import launch_command

        directory = self.directory(candidate, rung)
        given = for_trial(self.arguments, self.config, directory / files.CONFIG, directory)
        command = launch_command(self.launcher, given, RUNNER)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        write_json(directory / files.CONFIG, self._config_of(candidate, rung))
        (directory / "cmd.txt").write_text(shlex.join(command) + "\n", encoding="utf-8")
        begin = time.monotonic()
        code = _wait(command, directory, begin + seconds, progress)
        result = _result(candidate.name, directory, code, time.monotonic() - begin)
        files.save_result(directory, result)
        return result

    def _config_of(self, candidate: Candidate, rung: Rung) -> dict[str, Any]:
        task = Task(rung.steps, str(self.directory(candidate, rung)))
        # As it will be read: tuples of the section are lists in a file.
        found: dict[str, Any] = json.loads(json.dumps(files.trial_config(self.ds_config, candidate, task)))
        return found


def _wait(command: Sequence[str], directory: Path, deadline: float, progress: Callable[[int], None]) -> int | None:
    """The exit code; None when time was up."""
    with (directory / files.LOG).open("wb") as log:
        # A session of its own, so that everything that the launcher starts can be ended with it.
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    return None
                progress(files.steps_done(directory))
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
    if (directory / files.LINES).is_file():
        return Result(name, "finished", seconds=seconds, **files.figures(directory))
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
    text = (directory / files.LOG).read_text(encoding="utf-8", errors="replace")
    return [line.rstrip() for line in _COLOUR.sub("", text).splitlines() if line.strip()]
