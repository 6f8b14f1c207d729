"""Selection of slow tests whose sources changed since all tests passed, and of the processor whose rounding is used."""

import ast
import os
import platform
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ALL_PASSED = "tests/all_passed"
"""File with the hash of the last commit at which all tests passed. `tests/run.sh --all` writes it."""
MOST_SECONDS = 400
"""Seconds of a core that slow tests may take in a run of CI, which has 25 minutes on two cores for everything."""
PROCESSORS: Mapping[str, Mapping[str, str]] = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "DS_COMPRESS_MARCH": "x86-64-v3"},
    "default": {"ATEN_CPU_CAPABILITY": "default"},
}
"""Environment under which torch and our kernels compute as on another processor, whose rounding differs."""


@dataclass(frozen=True)
class SlowTest:
    """A slow test: its id, what it depends on, and its estimated duration in seconds of a core.

    `sources` holds files and directories, relative to the root of the repository.
    """

    name: str
    sources: frozenset[str]
    seconds: int


class Selection(NamedTuple):
    """Slow tests whose sources have changed: the ones to run, and those for which a run of CI has no time."""

    due: frozenset[str]
    left_out: tuple[str, ...]


def select(tests: Iterable[SlowTest], changed: frozenset[str] | None, seconds: int = MOST_SECONDS) -> Selection:
    """Choose the slow tests that a run of CI has time for, from those whose sources have changed.

    A test with a source whose tests take little time together comes before one with only general sources, and then the
    first case of each function before the second one of any. The choice depends on nothing but the arguments.

    Args:
        tests: all slow tests.
        changed: the changed files and their directories; None if unknown, in which case all sources count as changed.
        seconds: seconds of a core that the chosen tests may take together.
    """
    due: set[str] = set()
    left_out = []
    for test in _most_specific_first(list(tests), changed):
        if test.seconds <= seconds:
            seconds -= test.seconds
            due.add(test.name)
        else:
            left_out.append(test.name)
    return Selection(frozenset(due), tuple(sorted(left_out)))


def _most_specific_first(tests: list[SlowTest], changed: frozenset[str] | None) -> list[SlowTest]:
    """Return the tests that have a changed source, in the order in which they are chosen."""
    costs: Counter[str] = Counter()
    for test in tests:
        costs.update(dict.fromkeys(test.sources, test.seconds))
    ranked, cases = [], Counter[str]()
    for test in sorted(tests, key=lambda test: test.name):
        if sources := test.sources if changed is None else test.sources & changed:
            function = test.name.partition("[")[0]
            cases[function] += 1
            ranked.append((min(costs[source] for source in sources), cases[function], test.name, test))
    return [test for *_, test in sorted(ranked, key=lambda entry: entry[:3])]


def last_pass() -> str:
    """Return the hash of the last commit at which all tests passed; "" if none is recorded."""
    record = ROOT / ALL_PASSED
    return record.read_text().strip() if record.exists() else ""


@cache
def changed_paths() -> frozenset[str] | None:
    """Return the files that have changed since all tests passed, and their directories, relative to the root.

    Returns:
        None if that is unknown: no commit is recorded, the clone does not have it, or git is not installed.
    """
    since = last_pass()
    changed = _git("diff", "--name-only", "--relative", since) if since else None
    if changed is None:
        return None
    new = _git("ls-files", "--others", "--exclude-standard") or ""
    files = [PurePosixPath(line) for line in (changed + new).splitlines()]
    return frozenset(str(path) for file in files for path in (file, *file.parents))


def _git(*arguments: str) -> str | None:
    """Return what git prints; None if it fails or is not installed."""
    try:
        run = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return run.stdout if run.returncode == 0 else None


def sources_of(test_file: Path, more: Iterable[str] = ()) -> frozenset[str]:
    """Return what a test depends on: the package directory of its directory, its file, what that imports, and `more`.

    Imports are followed through test files. The modules of the package that these import are the last ones.

    Raises:
        ValueError: one of `more` is not a file or directory of this repository.
    """
    if wrong := [source for source in more if not _exists(str(source))]:
        raise ValueError(f"{wrong} are not files or directories of this repository, relative to its root")
    file = Path(os.path.relpath(test_file, ROOT)).as_posix()
    return frozenset({_package_directory(file), *more}) | _imported(file)


@cache
def _exists(path: str) -> bool:
    return (ROOT / path).exists()


@cache
def _package_directory(file: str) -> str:
    """Return the directory that a test file is about: `deepspeed_compress/tools/lint` for one in `tests/tools/lint`."""
    directory = PurePosixPath(file).relative_to("tests").parent
    candidates = (
        f"{top}/{part}" for part in (directory, *directory.parents) for top in ("deepspeed_compress", "launch")
    )
    return str(PurePosixPath(next(path for path in candidates if (ROOT / path).is_dir())))


@cache
def _imported(file: str) -> frozenset[str]:
    """Return `file`, and the files of this repository that it imports, directly or through other test files."""
    found, unread = {file}, [file]
    while unread:
        new = _direct_imports(unread.pop()) - found
        unread += [other for other in new if other.startswith("tests/")]
        found |= new
    return frozenset(found)


@cache
def _direct_imports(file: str) -> frozenset[str]:
    """Return the files of this repository that `file` imports anywhere."""
    return frozenset(path for name in _imported_names(ROOT / file) if (path := _module_file(name)))


def _imported_names(file: Path) -> Iterator[str]:
    """Yield what a file imports, as `package.module` or `package.module.name`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def _module_file(name: str) -> str | None:
    """Return the file of a module, or of the module that has this name; None if it is not in this repository."""
    path = name.replace(".", "/")
    candidates = (f"{part}{end}" for part in (path, path.rpartition("/")[0]) for end in (".py", "/__init__.py"))
    return next((candidate for candidate in candidates if (ROOT / candidate).is_file()), None)


def processor_of(asked: str, features: Iterable[str]) -> str:
    """Return the requested name of `PROCESSORS`.

    Args:
        asked: a name.
        features: names of the features of this machine's processor.

    Raises:
        ValueError: this machine cannot compute as the requested processor, or there is none of this name.
    """
    usable = [name for name in PROCESSORS if name != "avx2" or "avx2" in features]
    if asked not in usable:
        raise ValueError(f"{asked!r} is none of {usable}, which this machine can run")
    return asked


def environment_of(processor: str) -> dict[str, str]:
    """Return what to set to compute as one of `PROCESSORS`.

    Each has a cache of its own for what torch compiles: torch looks code up without regard to the instruction set that
    it was generated for. It cannot build the code of another one, and code that was built for another one crashes.
    """
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{processor}"
    return {**PROCESSORS[processor], "TORCHINDUCTOR_CACHE_DIR": str(cache)}


def processor_features() -> list[str]:
    """Return the features of this machine's processor, as Linux names them on x86-64."""
    cpuinfo = Path("/proc/cpuinfo")
    if platform.machine() != "x86_64" or not cpuinfo.exists():
        return []
    return next(line.split() for line in cpuinfo.read_text().splitlines() if line.startswith("flags"))
