"""Run the parts one after the other and report what they found."""

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress import __version__
from deepspeed_compress.errors import CompressError
from deepspeed_compress.tools.files import write_json
from deepspeed_compress.tools.gpu_check.findings import Finding, Task, document
from deepspeed_compress.tools.gpu_check.options import parse
from deepspeed_compress.tools.gpu_check.parts import PARTS, Part, limits, run_part
from deepspeed_compress.tools.gpu_check.wheels import install_wheels

__all__ = ["main"]

_ENVIRONMENT: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        # Building an extension fails, as on machines without a compiler.
        "cuda": {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": "4", "CXX": "no-compiler"},
        "cpu": {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",
        },
    }
)
"""Environment of the processes of parts, by device."""
_NEEDED = ("torch", "triton", "rich")
_PACKAGES = ("torch", "triton", "deepspeed", "transformers", "pydantic")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if nothing failed, else 1. Usage errors end the program with 2."""
    options = parse({part.name: part.summary for part in PARTS}, arguments)
    try:
        with tempfile.TemporaryDirectory() as directory:
            return _run(options, Path(directory))
    except CompressError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 1


def _run(options: argparse.Namespace, packages: Path) -> int:
    if options.wheels is not None:
        install_wheels(options.wheels, packages)
    # Both this process and the processes of parts must see the packages.
    sys.path.insert(0, str(packages))
    _check(options.device)
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **_ENVIRONMENT[options.device]}
    chosen = [part for part in PARTS if part.name in options.parts]
    return _report(options, _run_parts(chosen, options, environment))


def _check(device: str) -> None:
    """Check that the parts can run and their findings can be shown.

    Raises:
        CompressError: A package or the GPU is missing.
    """
    if absent := [name for name in _NEEDED if find_spec(name) is None]:
        raise CompressError(f"this needs {', '.join(absent)}; install it, or put wheels into a directory: --wheels DIR")
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise CompressError("torch finds no GPU here; write --device cpu for the same program at toy sizes")


def _run_parts(chosen: Sequence[Part], options: argparse.Namespace, environment: Mapping[str, str]) -> list[Finding]:
    begin, until, found = time.monotonic(), limits(chosen, options.minutes), []
    output = options.output.absolute().parent
    output.mkdir(parents=True, exist_ok=True)
    for part in chosen:
        print(f"{part.name}: {part.summary} ...", flush=True)
        seconds = until[part.name] - (time.monotonic() - begin)
        found += run_part(part, Task(options.device, seconds, output), environment)
        # Written after each part, so that the file exists even if the machine crashes later.
        write_json(options.output, document(found, _machine(options.device)))
    return found


def _report(options: argparse.Namespace, found: Sequence[Finding]) -> int:
    from deepspeed_compress.tools.gpu_check.table import print_table  # rich may be among the wheels

    machine = _machine(options.device)
    print_table(f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}", found)
    print(f"written to {options.output}")
    return int(any(finding.verdict == "fail" for finding in found))


def _machine(device: str) -> dict[str, Any]:
    versions = {name: _version(name) for name in _PACKAGES}
    here = {"python": platform.python_version(), "deepspeed_compress": __version__}
    return {"device": _device_name(device), **here, **versions}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return "cpu"
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"
