"""Reading of the .jsonl files of a run. Every line is checked, and only an index of the lines grows with the file.

A file is read twice. The first pass checks all lines and keeps a small `Entry` for each, which identifies the lines of
the run. The second pass loads these lines, or a sample of them if there are many.
"""

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from deepspeed_compress.errors import DataError
from deepspeed_compress.monitor.journal import Part
from deepspeed_compress.tools.outputs.printable import printable

SAMPLE = 20_000
"""Number of lines of a file that are kept in memory if the caller asks for a sample."""
LONGEST = 1 << 16
"""Maximum bytes of a line. The longest lines that the package writes have a few hundred bytes."""
_BUDGET = 1 << 26
"""Maximum bytes of the lines of a sample."""
_LARGE = 1 << 26
"""Size in bytes from which reading a file shows a progress bar."""
_BLOCK = 64
"""Lines that a sample keeps together, because some figures compare a step with the next one."""
_GROUPS = 64
"""Maximum number of kinds of lines that are sampled separately."""
_SHOWN = 60

T = TypeVar("T")
Check = Callable[[dict[str, Any]], str]
"""Function that returns what is wrong with the object on a line, or ""."""


class Entry(NamedTuple):
    """Line in an index: its byte offset, optimizer step, part of a run (None if not recorded), and keys."""

    offset: int
    step: int
    part: Part | None
    keys: frozenset[str]


class Entries:
    """List of entries in the order of their file, which takes 20 bytes for each.

    Most lines are alike, so their parts and keys are kept once.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._offsets, self._steps, self._kinds = array("q"), array("q"), array("I")
        self._known: dict[tuple[Part | None, frozenset[str]], int] = {}
        self._shared: list[tuple[Part | None, frozenset[str]]] = []
        for entry in entries:
            self.append(entry)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, place: int) -> Entry:
        return Entry(self._offsets[place], self._steps[place], *self._shared[self._kinds[place]])

    def __iter__(self) -> Iterator[Entry]:
        return map(self.__getitem__, range(len(self)))

    def append(self, entry: Entry) -> None:
        """Add an entry at the end."""
        kind = (entry.part, entry.keys)
        if kind not in self._known:
            self._known[kind] = len(self._shared)
            self._shared.append(kind)
        self._offsets.append(entry.offset)
        self._steps.append(entry.step)
        self._kinds.append(self._known[kind])

    def pop(self) -> None:
        """Remove the last entry."""
        for column in (self._offsets, self._steps, self._kinds):
            column.pop()


@dataclass(frozen=True)
class LineIndex:
    """Index of the lines of one file. The file may be missing, in which case there are no entries."""

    file: Path
    entries: Entries

    def load(self, entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
        """Yield the objects of `entries`, which must be in the order of the file."""
        if not self.entries:
            return
        with self.file.open("rb") as stream:
            for entry in entries:
                stream.seek(entry.offset)
                yield loads(stream.readline(LONGEST))

    def load_sample(self, entries: Entries) -> Iterator[dict[str, Any]]:
        """Yield the objects of a sample of `entries`, or of all of them if there are few."""
        return self.load(_sample(entries))


def _sample(entries: Entries) -> Iterable[Entry]:
    """Return a sample of `entries`, in which each kind of line is sampled separately."""
    if not entries:
        return entries
    mean = (entries[-1].offset - entries[0].offset) / len(entries)
    most = min(SAMPLE, max(_BLOCK, int(_BUDGET / max(mean, 1.0))))
    if len(entries) <= most:
        return entries
    groups: dict[frozenset[str], array[int]] = {}
    for place, entry in enumerate(entries):
        groups.setdefault(entry.keys, array("q")).append(place)
    kinds = groups.values() if len(groups) <= _GROUPS else [range(len(entries))]
    share = max(most // len(kinds), _BLOCK)
    return map(entries.__getitem__, sorted(chain.from_iterable(sampled(kind, share) for kind in kinds)))


def sampled(values: Sequence[T], most: int) -> list[T]:
    """Return about `most` of `values`: the first block, the last value, and blocks in between.

    The position of a block within its share of the values is derived from a hash, so that the sample does not coincide
    with figures that are recorded in every n-th line.
    """
    if len(values) <= most:
        return list(values)
    shares = max(1, most // _BLOCK)
    width = len(values) // shares
    room = max(width - _BLOCK, 0)
    starts = [share * width + (share * 2_654_435_761 % 2**32) * room // 2**32 for share in range(shares)]
    places = [at for start in starts for at in range(start, min(start + _BLOCK, len(values)))]
    return [values[at] for at in dict.fromkeys((*places, len(values) - 1))]


def index_lines(file: Path, check: Check) -> LineIndex:
    """Check all lines of `file` and index them. A last line truncated by a crash is left out.

    Raises:
        DataError: A line is too long, is not a JSON object with a `step`, or `check` finds something wrong with it. The
            message names the file and the line.
    """
    entries = Entries()
    if not file.exists():
        return LineIndex(file, entries)
    if not file.is_file():
        raise DataError(f"{file}: not a regular file; give the directory of a run")
    try:
        with _opened(file) as stream:
            for number, offset, line in _lines(file, stream):
                problem = _general_problem(line) or check(line)
                if problem:
                    raise DataError(f"{file}:{number}: {printable(problem)}; correct the line, or remove it")
                entries.append(Entry(offset, line["step"], _part(line), frozenset(line)))
    except OSError as error:
        raise DataError(f"{file}: cannot be read ({error.strerror or error}); give the directory of a run") from error
    return LineIndex(file, entries)


def _part(line: Mapping[str, Any]) -> Part | None:
    run = line.get("run")
    return None if run is None else Part(run["id"], run["started"], run["since"])


def _opened(file: Path) -> AbstractContextManager[BinaryIO]:
    """Open `file`, with a progress bar on a terminal if it is large."""
    if file.stat().st_size < _LARGE:
        return file.open("rb")
    from rich import progress
    from rich.console import Console

    console, text = Console(stderr=True), f"reading {file.name}"
    hidden = not console.is_terminal
    return progress.open(file, "rb", description=text, console=console, transient=True, disable=hidden)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a small .jsonl file. A last line truncated by a crash is left out."""
    if not file.is_file():
        return []
    with file.open("rb") as stream:
        return [line for _, _, line in _lines(file, stream)]


def loads(text: bytes) -> Any:
    """Parse JSON, with None in place of NaN and infinity.

    Raises:
        ValueError: `text` is not JSON.
    """
    try:
        return json.loads(text.decode("utf-8", "replace"), parse_constant=lambda name: None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _lines(file: Path, stream: BinaryIO) -> Iterator[tuple[int, int, Any]]:
    """Yield (line number, byte offset, parsed value) of each line."""
    number = offset = 0
    while line := stream.readline(LONGEST):
        number += 1
        try:
            if len(line) == LONGEST and not line.endswith(b"\n"):
                raise ValueError(f"longer than {LONGEST:,} bytes")
            value = loads(line)
        except ValueError as error:
            if len(line) < LONGEST and not stream.readline(1):
                return
            shown = printable(line[:_SHOWN].decode("utf-8", "replace").rstrip("\n"))
            raise DataError(f"{file}:{number}: not JSON ({printable(str(error))}): {shown!r}") from None
        yield number, offset, value
        offset += len(line)


def _general_problem(line: Any) -> str:
    """Return what is wrong with `line` as a line of any of these files, or ""."""
    if not isinstance(line, dict) or type(line.get("step")) is not int or not 0 <= line["step"] < 2**53:
        return '"step" is missing or invalid (allowed: an object with "step", an integer from 0)'
    run = line.get("run")
    if run is None:
        return ""
    texts = isinstance(run, dict) and isinstance(run.get("id"), str) and isinstance(run.get("started"), str)
    if not texts or type(run.get("since")) is not int or abs(run["since"]) >= 2**53:
        return '"run" is not a part of a run (allowed: an object with "id", "started" and "since")'
    return ""
