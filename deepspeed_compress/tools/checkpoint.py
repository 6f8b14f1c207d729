"""``ds-compress checkpoint``: list, verify, prune and convert the checkpoints in a directory."""

import argparse
from datetime import datetime
from pathlib import Path

from deepspeed_compress.checkpointing import catalog
from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing.catalog import Checkpoint
from deepspeed_compress.checkpointing.loadable_sizes import loads_on
from deepspeed_compress.config.numbers import UNKNOWN, size
from deepspeed_compress.errors import DataError
from deepspeed_compress.tools.outputs.printable import printable
from deepspeed_compress.tools.tables import WIDTH, print_table


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


def list_all(options: argparse.Namespace) -> int:
    """Print the checkpoints, and the numbers of ranks on which they load. Return the exit code."""
    found, latest = _found(options.directory), catalog.latest_tag(options.directory)
    texts = ("tag", "written", "saved by", "state")
    columns = ("tag", "step", "ranks", "size", *texts[1:])
    rows = [_cells(one, latest) for one in found]
    # Other commands take the tag as an argument, so it must not be wrapped.
    print_table("", columns, rows, texts, least=WIDTH)
    sizes: dict[str, list[str]] = {}
    for one in found:
        sizes.setdefault(loads_on(one.place), []).append(printable(one.tag))
    for where, tags in sizes.items():
        print(f"loads on {where}: {', '.join(tags)}")
    for one in found:
        if one.problem:
            print(f"error: {printable(one.problem)}")
    return 0


def _cells(one: Checkpoint, latest: str | None) -> tuple[str, ...]:
    written = datetime.fromtimestamp(one.time).isoformat(" ", "seconds")
    origin = "every" if one.automatic else "the program"
    state = ("complete" if one.complete else "incomplete") + (", latest" if one.tag == latest else "")
    return printable(one.tag), _shown(one.step), _shown(one.world), size(one.size), written, origin, state


def _shown(number: int | None) -> str:
    return UNKNOWN if number is None else f"{number:,}"


def verify(options: argparse.Namespace) -> int:
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


def prune(options: argparse.Namespace) -> int:
    """Remove old checkpoints. Return the exit code."""
    for one in catalog.superfluous(options.directory, _found(options.directory), options.keep):
        if not options.dry_run:
            catalog.remove(one)
        print(f"{'would remove' if options.dry_run else 'removed'} {printable(one.tag)}, {size(one.size)}")
    return 0


def convert(options: argparse.Namespace) -> int:
    """Write a universal checkpoint. Return the exit code."""
    from deepspeed_compress.tools import universal

    place = universal.convert(options.directory, options.tag, options.output, options.tensor, options.workers)
    print(f'{place}: to load it, write "checkpoint": {{"load_universal": true}} into the configuration of the run')
    return 0
