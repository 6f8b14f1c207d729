"""``ds-compress checkpoint``: list, verify, prune and convert the checkpoints in a directory."""

import argparse
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from types import MappingProxyType

from deepspeed_compress.checkpointing import catalog
from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing.catalog import Checkpoint
from deepspeed_compress.checkpointing.loadable_sizes import loads_on
from deepspeed_compress.config.numbers import UNKNOWN, size
from deepspeed_compress.errors import DataError
from deepspeed_compress.tools.outputs.printable import printable


def run(options: argparse.Namespace) -> int:
    """Run the requested subcommand and return its exit code."""
    return _SUBJECTS[options.subject](options)


def _found(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints in `directory`.

    Raises:
        DataError: There are none.
    """
    found = catalog.checkpoints(directory) if directory.is_dir() else []
    if not found:
        raise DataError(
            f"{directory}: contains no checkpoints (directories with *_states.pt); choose another directory"
        )
    return found


def _list(options: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Column, Table

    # Other commands take the tag as an argument, so it must not be wrapped.
    tag = Column("tag", no_wrap=True)
    table = Table(tag, "step", "ranks", "size", "written", "saved by", "state")
    found = _found(options.directory)
    latest = catalog.latest_tag(options.directory)
    sizes: dict[str, list[str]] = {}
    for one in found:
        written = datetime.fromtimestamp(one.time).isoformat(" ", "seconds")
        origin = "every" if one.automatic else "the program"
        state = "complete" if one.complete else "incomplete"
        named = f"{state}, latest" if one.tag == latest else state
        table.add_row(
            escape(printable(one.tag)), _shown(one.step), _shown(one.world), size(one.size), written, origin, named
        )
        sizes.setdefault(loads_on(one.place), []).append(printable(one.tag))
    Console().print(table)
    for where, tags in sizes.items():
        print(f"loads on {where}: {', '.join(tags)}")
    for one in found:
        if one.problem:
            print(f"error: {printable(one.problem)}")
    return 0


def _shown(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}"


def _verify(options: argparse.Namespace) -> int:
    """Verify the checkpoints. Return exit code 1 if any is damaged, else 0."""
    from rich.console import Console
    from rich.progress import track

    wanted = [one for one in _found(options.directory) if options.tag in (None, one.tag)]
    if not wanted:
        raise DataError(f"--tag {options.tag}: {options.directory} has no such checkpoint; choose one that list shows")
    problems: list[str] = []
    for one in track(wanted, "reading", console=Console(stderr=True), transient=True):
        found = list(files.find_problems(one.place))
        problems += found
        known = "complete" if one.world is not None or found else "has no digests, so only DeepSpeed can check it"
        print(f"{printable(one.tag)}: {'damaged' if found else f'{known}; loads on {loads_on(one.place)}'}")
    for problem in problems:
        print(f"error: {printable(problem)}")
    return int(bool(problems))


def _prune(options: argparse.Namespace) -> int:
    for one in catalog.superfluous(_found(options.directory), options.keep, catalog.protected(options.directory)):
        if not options.dry_run:
            catalog.remove(one)
        print(f"{'would remove' if options.dry_run else 'removed'} {printable(one.tag)}, {size(one.size)}")
    return 0


def _convert(options: argparse.Namespace) -> int:
    from deepspeed_compress.tools.universal import convert

    place = convert(options.directory, options.tag, options.output, options.tensor, options.workers)
    print(f'{place}: to load it, write "checkpoint": {{"load_universal": true}} into the configuration of the run')
    return 0


_SUBJECTS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {"convert": _convert, "list": _list, "prune": _prune, "verify": _verify}
)
