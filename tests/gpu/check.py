"""The GPU check: runs the tests marked `gpu`, one process per file, and prints one table.

`bash launch/gpu_check.sh` runs it as `python -m tests.gpu.check`. Parts that the output file already has, from the
same code and machine, are not run again.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deepspeed_compress.errors import CompressError
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.arguments import positive_number
from deepspeed_compress.tools.bench.jobs import new_document
from tests.gpu.findings import Finding, document, print_table, read_findings
from tests.gpu.wheels import install_wheels

ROOT = Path(__file__).parents[2]
_ENVIRONMENT: Mapping[str, Mapping[str, str]] = {
    # Building an extension fails, as on machines without a compiler.
    "cuda": {"OMP_NUM_THREADS": "4", "CXX": "no-compiler"},
    "cpu": {"OMP_NUM_THREADS": "1"},
}
"""Environment of the processes of parts, by device."""
_NEEDED = ("torch", "triton", "rich", "pytest")
_CODE = (".py", ".cpp", ".h")
_KERNELS = ("deepspeed_compress/compression/kernels", "tests/gpu")
_UNFINISHED = "the part itself"
"""Finding of a part that crashed or did not end."""
_SHOWN = 600
"""Characters to show of the end of a part's output after a crash."""
_EXAMPLES = """examples:
  bash launch/gpu_check.sh
  bash launch/gpu_check.sh --parts kernels,kernel_speed --minutes 3
  bash launch/gpu_check.sh --wheels wheels --output gpu_check.json
  bash launch/gpu_check.sh                       # once more: parts that did not end, or whose code has changed
  bash launch/gpu_check.sh --device cpu          # the same tests at toy sizes, without a GPU

exit status: 0 nothing failed (a goal may be missed), 1 something failed, 2 wrong usage"""


@dataclass(frozen=True)
class Part:
    """Part of the check: a file of tests, in a process of its own, because it may crash or hang.

    `seconds` is its share of the time, relative to the other parts, and `sources` are the directories that it tests.
    """

    name: str
    summary: str
    seconds: float
    directory: Path = Path(__file__).parent
    sources: tuple[str, ...] = ("deepspeed_compress", "tests/gpu")

    @property
    def code(self) -> str:
        """Hash of the sources."""
        files = sorted(file for source in self.sources for file in (ROOT / source).rglob("*") if file.suffix in _CODE)
        found = hashlib.sha256()
        for file in files:
            found.update(f"{file.relative_to(ROOT)}\n".encode() + file.read_bytes())
        return found.hexdigest()


PARTS = (
    Part("kernels", "every kernel against plain torch, bit for bit", 140, sources=_KERNELS),
    Part("kernel_speed", "time of every kernel against copying the same bytes", 30, sources=_KERNELS),
    Part("synchronisation", "what waits for the GPU, or allocates, in an exchange", 40),
    Part("sanitizer", "kernels under compute-sanitizer", 45, sources=_KERNELS),
    Part("steps", "training of every ZeRO stage, whatever the order of streams", 85),
    Part("features", "short trainings of two ranks, one for each feature", 60),
    Part("step_time", "GPT-2: step time without a network limit, of 2 to 512 ranks", 130),
    Part("network_time", "GPT-2: step time at 10, 25 and 100 Gbit/s of a computed network", 90),
    Part("loss", "GPT-2: loss with and without compression", 80),
)
"""Parts, most valuable first."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Return 0 if nothing failed, else 1. Usage errors end the program with 2."""
    options = parse(arguments)
    try:
        with tempfile.TemporaryDirectory() as directory:
            return _run(options, Path(directory))
    except CompressError as error:
        print(f"gpu_check: error: {error}", file=sys.stderr)
        return 1


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    about = "Find out what holds on the GPU of this machine: one table, and one JSON file with every figure."
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="gpu_check", description=about, formatter_class=form)
    parser.epilog = "\n".join(["parts:", *(f"  {one.name:17}{one.summary}" for one in PARTS), "", _EXAMPLES])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    chosen = "some of the parts, by commas (default: all)"
    parser.add_argument("--parts", type=_parts, default=PARTS, help=chosen)
    minutes = "for all parts; each has its share (default: 8)"
    parser.add_argument("--minutes", type=positive_number, default=8.0, metavar="N", help=minutes)
    wheels = "install the .whl files of DIR, without their dependencies and without network, for this run alone"
    parser.add_argument("--wheels", type=Path, metavar="DIR", help=wheels)
    again = "run parts again that the output file has from the same code on the same machine"
    parser.add_argument("--again", action="store_true", help=again)
    parser.add_argument(
        "--output", type=Path, default=Path("gpu_check.json"), metavar="FILE", help="(default: %(default)s)"
    )
    return parser.parse_args(arguments)


def _parts(text: str) -> tuple[Part, ...]:
    """Return the named parts in the order of `PARTS`."""
    given, known = text.split(","), [part.name for part in PARTS]
    if unknown := [name for name in given if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such part; write some of {','.join(known)}")
    return tuple(part for part in PARTS if part.name in given)


def _run(options: argparse.Namespace, packages: Path) -> int:
    if options.wheels is not None:
        install_wheels(options.wheels, packages)
    # Both this process and the processes of parts must see the packages.
    sys.path.insert(0, str(packages))
    _check(options.device)
    found = _run_parts(options, str(packages))
    machine = _machine(options.device)
    print_table(f"{machine['device']}, torch {machine['torch']}, Triton {machine['triton']}", found)
    print(f"written to {options.output}")
    return int(any(finding.verdict == "fail" for finding in found))


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


def _run_parts(options: argparse.Namespace, packages: str) -> list[Finding]:
    machine = _machine(options.device)
    repeated = {part.name for part in options.parts} if options.again else set()
    kept = [one for one in read_finished(options.output, machine) if one.part not in repeated]
    finished = {finding.part for finding in kept}
    parts = [part for part in options.parts if part.name not in finished]
    for part in options.parts:
        if part not in parts:
            print(f"{part.name}: already in {options.output}", flush=True)
    begin, until, found = time.time(), limits(parts, options.minutes), kept
    path = os.pathsep.join(filter(None, (packages, str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **_ENVIRONMENT[options.device]}
    options.output.absolute().parent.mkdir(parents=True, exist_ok=True)
    for part in parts:
        print(f"{part.name}: {part.summary} ...", flush=True)
        device = ("--gpu-device", options.device)
        found += run_part(part, begin + until[part.name], device, environment)
        # Written after each part, so that the file exists even if the machine crashes later.
        write_json(options.output, document(found, machine, {one.name: one.code for one in PARTS}))
    return found


def read_finished(output: Path, machine: Mapping[str, Any]) -> list[Finding]:
    """Return the findings in `output` of parts that ended, from the code that is here, on the same machine."""
    if not output.is_file():
        return []
    written = json.loads(output.read_text(encoding="utf-8"))
    if written["environment"] != machine:
        return []
    found = [Finding(**one) for one in written["findings"]]
    unfinished = {one.part for one in found if one.what == _UNFINISHED}
    same = {part.name for part in PARTS if written["code"].get(part.name) == part.code}
    return [one for one in found if one.part in same - unfinished]


def limits(parts: Sequence[Part], minutes: float) -> Mapping[str, float]:
    """Return the seconds after the start by which each part must have ended. Unused time goes to the next parts."""
    whole, passed, found = sum(part.seconds for part in PARTS), 0.0, {}
    for part in parts:
        passed += part.seconds / whole * 60 * minutes
        found[part.name] = passed
    return MappingProxyType(found)


def run_part(
    part: Part, until: float, options: Sequence[str] = (), environment: Mapping[str, str] = MappingProxyType({})
) -> list[Finding]:
    """Return the findings of `part`. If it crashes or is not done `until` then, the last finding reports that."""
    begin, directory = time.time(), part.directory
    with tempfile.TemporaryDirectory() as scratch:
        lines = Path(scratch) / "findings.jsonl"
        # Warnings of torch and of other packages on an unknown machine are not what is tested.
        pytest = ("pytest", "-q", "--tb", "short", "-W", "default", "-p", "no:cacheprovider", "-m", "gpu")
        plugin = ("-c", str(ROOT / "pyproject.toml"), "-p", "tests.gpu.plugin", "--gpu-findings", str(lines))
        command = [*pytest, *plugin, "--gpu-until", str(until), *options, str(directory / f"test_{part.name}.py")]
        trouble = _run_command([sys.executable, "-m", *command], until - begin, environment)
        found = [replace(finding, part=part.name) for finding in read_findings(lines)]
    if trouble.startswith("ended with status 1:") and any(one.verdict == "fail" for one in found):
        trouble = ""
    trouble = trouble or ("" if found else "it found nothing")
    ended = Finding(_UNFINISHED, "fail", f"{time.time() - begin:.0f} s", why=trouble, part=part.name)
    return [*found, ended] if trouble else found


def _run_command(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> str:
    """Run a command with all processes that it starts. Return what went wrong, with the end of its output, or ""."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
        trouble = _wait(process, seconds)
        output.seek(0)
        shown = output.read()[-_SHOWN:].strip()
    return f"{trouble}: {shown}" if trouble else ""


def _wait(process: "subprocess.Popen[bytes]", seconds: float) -> str:
    """Return what went wrong, or "", and end the process with all processes that it started."""
    try:
        code = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        return f"ended at its limit of {seconds:.0f} s"
    finally:
        _end(process)
    return "" if code == 0 else f"crashed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _machine(device: str) -> dict[str, Any]:
    return {"device": _device_name(device), **new_document()["environment"]}


def _device_name(device: str) -> str:
    import torch

    if device == "cpu":
        return "cpu"
    count = torch.cuda.device_count()
    return f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU"


if __name__ == "__main__":
    raise SystemExit(main())
