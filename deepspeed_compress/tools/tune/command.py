"""The command `ds-compress tune`."""

import argparse
import functools
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from deepspeed_compress.backends.deepspeed.builds import clear_locks, print_locks
from deepspeed_compress.config import SECTION, parse_section, read_ds_config
from deepspeed_compress.config.problems import value_at
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.safe_files import hold, write_json, write_text
from deepspeed_compress.tools.bench.hosts import signals_as_exceptions
from deepspeed_compress.tools.tables import new_console
from deepspeed_compress.tools.tune.halving import make_rungs
from deepspeed_compress.tools.tune.search import Budget, Display, Outcome, search
from deepspeed_compress.tools.tune.space import Candidate, Excluded, find_candidates, load_space
from deepspeed_compress.tools.tune.summary import (
    Objective,
    Summary,
    as_json,
    as_table,
    conclusion,
    summarise,
)
from deepspeed_compress.tools.tune.trials import Trials, with_config

IDENTITY, OPTIMAL = "tuning.json", "ds_config_optimal.json"


def run(options: argparse.Namespace) -> int:
    """Tune, and return the exit code: 0, or 1 if uncompressed training fails.

    Raises:
        ConfigError: The files or the command are wrong. Raised before any trial starts.
    """
    options.arguments = options.arguments[1:]  # drop the "--" of the command line
    print_locks(options.clear_locks)
    console = new_console()
    ds_config = read_ds_config(options.config)
    if SECTION in ds_config:
        parse_section(ds_config)
    patches = None if options.space is None else load_space(options.space, ds_config)
    candidates, left_out = find_candidates(ds_config, patches)
    _check(options, ds_config, candidates, left_out)
    _claim(options.output, {"command": [options.launcher, *options.arguments], "ds_config": ds_config})
    held = hold(options.output)
    if held is None:
        raise ConfigError(f"--output {options.output}: trials are running there now (allowed: one command at a time)")
    with held:
        return _tune(options, ds_config, candidates, left_out, console)


def _tune(
    options: argparse.Namespace,
    ds_config: Mapping[str, Any],
    candidates: Sequence[Candidate],
    left_out: Sequence[Excluded],
    console: Console,
) -> int:
    _announce(console, candidates, left_out)
    outcome = _search(options, ds_config, candidates, console)
    summary = summarise(outcome, candidates, left_out, Objective(options.target_loss_gap, options.metric))
    _write(summary, ds_config, options, console)
    return 0 if outcome.failure is None else 1


def _check(
    options: argparse.Namespace,
    ds_config: Mapping[str, Any],
    candidates: Sequence[Candidate],
    left_out: Sequence[Excluded],
) -> None:
    """Check what would otherwise fail only after the first trial: the command, and that there is a candidate."""
    from deepspeed_compress.integrations.launch import launch_command

    if options.metric == "step_time" and value_at(ds_config, (SECTION, "communication", "max_rate")) is not None:
        raise ConfigError(
            f"/{SECTION}/communication/max_rate: uncompressed trials have no such limit, so step times cannot be "
            "compared (allowed: null). Remove the key and limit the link itself with tc, or pass --metric bytes"
        )
    launch_command(options.launcher, with_config(options.arguments, options.config, options.config.resolve()))
    if len(candidates) == 1:
        reasons = "".join(f"\n  - {left.name}: {left.reason}" for left in left_out)
        raise ConfigError(f"{options.config}: no candidate fits this file.{reasons}")


def _claim(output: Path, identity: Mapping[str, Any]) -> None:
    """Start tuning in `output`, or continue there.

    Raises:
        ConfigError: `output` holds the trials of another command or file, or something else.
    """
    file = output / IDENTITY
    if not file.is_file():
        if output.is_dir() and any(output.iterdir()):
            raise ConfigError(f"--output {output}: holds something else (allowed: a new directory); choose another one")
        output.mkdir(parents=True, exist_ok=True)
        write_json(file, identity, private=True)
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    other = [key for key in identity if before.get(key) != json.loads(json.dumps(identity[key]))]
    if other:
        what = " and ".join({"command": "command", "ds_config": "content of --config"}[key] for key in other)
        raise ConfigError(
            f"--output {output}: holds trials of another {what} (allowed: the same one, to continue); choose another "
            "directory, or remove this one"
        )


def _announce(console: Console, candidates: Sequence[Candidate], left_out: Sequence[Excluded]) -> None:
    lines = [f"{len(candidates) - 1} candidates: {', '.join(one.name for one in candidates[1:])}"]
    lines += [f"left out: {left.name}: {left.reason}" for left in left_out]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _search(
    options: argparse.Namespace, ds_config: Mapping[str, Any], candidates: Sequence[Candidate], console: Console
) -> Outcome:
    rungs = make_rungs(options.steps, options.rungs, options.target_loss_gap)
    budget = Budget(options.time_budget, trial=options.trial_timeout or math.inf)
    look = functools.partial(clear_locks, options.clear_locks)
    trials = Trials(ds_config, options.config, options.launcher, options.arguments, options.output)
    # The running trial is in a session of its own, so it must be ended by this process.
    with signals_as_exceptions():
        display = Display(console, budget, look)
        return search(candidates, rungs, trials, options.metric, budget, display)


def _write(summary: Summary, ds_config: Mapping[str, Any], options: argparse.Namespace, console: Console) -> None:
    output: Path = options.output
    optimal = output / OPTIMAL
    arguments = with_config(options.arguments, options.config, optimal)
    launcher = [] if options.launcher == "deepspeed" else ["--launcher", options.launcher]
    words = ["ds-compress", "run", *launcher, *arguments]
    command = shlex.join(words)
    write_json(output / "summary.json", as_json(summary))
    console.print(as_table(summary))
    lines = conclusion(summary)
    if summary.row is not None:
        write_json(optimal, {**ds_config, SECTION: summary.chosen.section}, private=True)
        write_text(output / "cmd_optimal.txt", command + "\n", private=True)
        lines += [f"{optimal}: your configuration with the best section. Train with it:", command]
    failure = summary.outcome.failure
    if failure is not None:
        lines += [f"  {line}" for line in failure.tail] + [f"uncompressed training failed: {failure.error}"]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
