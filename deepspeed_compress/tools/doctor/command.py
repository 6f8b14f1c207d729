"""Command `ds-compress doctor`."""

import argparse
import json
import sys
from pathlib import Path

from deepspeed_compress.config.secrets import MASK
from deepspeed_compress.diagnostics import Diagnostic
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.doctor.case import Case
from deepspeed_compress.tools.doctor.diagnose import Diagnosis, diagnose, patched
from deepspeed_compress.tools.doctor.outputs import as_json, print_text
from deepspeed_compress.tools.doctor.run import read_baseline, read_run

HEALTHY, FOUND = 0, 1


def run(options: argparse.Namespace) -> int:
    """Diagnose a run and return the exit code: 0 if it is healthy, 1 with findings."""
    if options.apply is not None and options.apply.exists():
        raise ConfigError(f"--apply {options.apply}: exists already; write the name of a new file")
    baseline = read_baseline(options.baseline) if options.baseline is not None else None
    diagnosis = diagnose(Case(read_run(options.run_dir, options.config), baseline))
    if options.json:
        print(as_json(diagnosis), end="")
    else:
        print_text(diagnosis)
    if options.apply is not None:
        _apply(diagnosis, options.apply)
    return FOUND if diagnosis.diagnostics else HEALTHY


def _apply(diagnosis: Diagnosis, file: Path) -> None:
    """Write the patched configuration to `file` and report on stderr which findings it covers."""
    if diagnosis.diagnostics and diagnosis.case.run.config is None:
        raise ConfigError(f"--apply {file}: the run has no ds_config.json to change; pass it with --config FILE")
    config, taken, left = patched(diagnosis)
    if not taken:
        print(f"{file}: not written, because no setting remedies these findings", file=sys.stderr)
        return
    with file.open("x", encoding="utf-8") as stream:
        stream.write(json.dumps(config, indent=2) + "\n")
    print(f"{file}: written with changes for {_names(taken)}", file=sys.stderr)
    if MASK in json.dumps(config):
        print(f'{file}: replace "{MASK}" by your secrets, or pass the file that has them as --config', file=sys.stderr)
    if left:
        print(f"left out, because they change the same settings: {_names(left)}", file=sys.stderr)


def _names(found: tuple[Diagnostic, ...]) -> str:
    return ", ".join(one.name for one in found)
