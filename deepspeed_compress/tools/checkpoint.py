"""``ds-compress checkpoint``: list, verify, prune and convert the checkpoints in a directory.

DeepSpeed's converter to universal checkpoints, `ds_to_universal`, needs a flag if a checkpoint does not describe its
parameters. It drops the residuals of compression. It copies the matrices of GPT-2 unchanged, although split models
store them transposed.
"""

import argparse
import contextlib
import re
import shutil
import sys
from argparse import Namespace
from datetime import datetime
from pathlib import Path

from deepspeed_compress.checkpointing.completeness import LATEST_UNIVERSAL, Checkpoint, find_problems
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.config.numbers import shown, size
from deepspeed_compress.errors import DataError, StateError
from deepspeed_compress.safe_files import write_text
from deepspeed_compress.tools.outputs.report import printable
from deepspeed_compress.tools.tables import WIDTH, print_table


def _found(directory: Path) -> list[Checkpoint]:
    """Return the checkpoints in `directory`.

    Raises:
        DataError: There are none.
    """
    found = CheckpointDirectory(directory).checkpoints() if directory.is_dir() else []
    if not found:
        raise DataError(f"{directory}: contains no checkpoints (*_states.pt in directories); choose another directory")
    return found


def list_all(options: argparse.Namespace) -> int:
    """Print the checkpoints. Return the exit code."""
    found, latest = _found(options.directory), CheckpointDirectory(options.directory).latest_tag()
    texts = ("tag", "written", "saved by", "state")
    columns = ("tag", "step", "ranks", "size", *texts[1:])
    rows = []
    for one in found:
        written = datetime.fromtimestamp(one.time).isoformat(" ", "seconds")
        origin = "every" if one.automatic else "the program"
        state = ("complete" if one.complete else "incomplete") + (", latest" if one.tag == latest else "")
        figures = (shown(one.step, ",.0f"), shown(one.world, ",.0f"), size(one.size))
        rows.append((printable(one.tag), *figures, written, origin, state))
    # Other commands take the tag as an argument, so it must not be wrapped.
    print_table("", columns, rows, texts, least=WIDTH)
    for one in found:
        if one.problem:
            print(f"error: {printable(one.problem)}")
    return 0


def verify(options: argparse.Namespace) -> int:
    """Verify the checkpoints. Return exit code 1 if any is damaged, else 0."""
    from rich.console import Console
    from rich.progress import track

    wanted = [one for one in _found(options.directory) if options.tag in (None, one.tag)]
    if not wanted:
        raise DataError(f"--tag {options.tag}: {options.directory} has no such checkpoint; choose one that list shows")
    problems: list[str] = []
    for one in track(wanted, "reading", console=Console(stderr=True), transient=True):
        found = list(find_problems(one.place))
        problems += found
        known = "complete" if one.world is not None or found else "has no digests, so only DeepSpeed can check it"
        print(f"{printable(one.tag)}: {'damaged' if found else known}")
    for problem in problems:
        print(f"error: {printable(problem)}")
    return int(bool(problems))


def prune(options: argparse.Namespace) -> int:
    """Remove old checkpoints. Return the exit code."""
    for one in CheckpointDirectory(options.directory).superfluous(_found(options.directory), options.keep):
        if not options.dry_run:
            one.remove()
        print(f"{'would remove' if options.dry_run else 'removed'} {printable(one.tag)}, {size(one.size)}")
    return 0


def convert(options: argparse.Namespace) -> int:
    """Write a universal checkpoint. Return the exit code."""
    place = convert_to_universal(options.directory, options.tag, options.output, options.tensor, options.workers)
    print(f'{place}: to load it, write "checkpoint": {{"load_universal": true}} into the configuration of the run')
    return 0


_WEIGHT = "param"
"""Key of the weight in DeepSpeed's file of one weight (`deepspeed.checkpoint.constants.PARAM`)."""

_CONV1D = re.compile(r"(?:^|\.)(?:attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
"""Pattern of the matrices of GPT-2 in transformers: (inputs, outputs) in a Conv1D."""
_ATTENTION = re.compile(r"(?:^|\.)attn\.c_attn\.weight$")
"""Pattern of a matrix with three times as many outputs as inputs, whose shape shows whether it is transposed."""


def convert_to_universal(
    directory: Path, tag: str | None, output: str | None, tensor: int | None, workers: int = 1
) -> Path:
    """Write the universal checkpoint `directory`/`output` of the checkpoint `tag`, and name it in `latest_universal`.

    Args:
        directory: Directory of the checkpoints.
        tag: Checkpoint to convert, or None for the latest.
        output: Name of the new checkpoint, or None for the default.
        tensor: Tensor-parallel size of the run that will load it, or None to keep GPT-2 as it was saved.
        workers: Number of worker processes.

    Returns:
        The path of the universal checkpoint.

    Raises:
        DataError: There is no such checkpoint, or the path exists already.
        StateError: The checkpoint is damaged, or DeepSpeed's converter cannot convert it.
    """
    tag = tag or CheckpointDirectory(directory).latest_tag()
    if tag is None or not (directory / tag).is_dir():
        raise DataError(f"{directory}: has no checkpoint {tag or 'that `latest` names'}; choose another with --tag")
    place = directory / (output or f"{tag}_universal")
    if place.exists():
        raise DataError(f"{place}: exists already; choose another name with --output")
    problems = list(find_problems(directory / tag))
    if problems:
        raise StateError("; ".join(problems))
    try:
        _convert(directory / tag, place, workers)
        if place.parent != directory:
            # If the tag has several parts, DeepSpeed writes this file where no run looks for it.
            (place.parent / LATEST_UNIVERSAL).unlink()
            write_text(directory / LATEST_UNIVERSAL, place.relative_to(directory).as_posix())
        if tensor is not None:
            transpose_gpt2(place, linear=tensor > 1)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        raise
    return place


def _convert(source: Path, place: Path, workers: int) -> None:
    from deepspeed.checkpoint import ds_to_universal

    # Only checkpoints with tensor or pipeline parallelism describe their parameters.
    split = len({file.name.partition("mp_rank_")[2] for file in source.glob("*mp_rank_*_model_states.pt")}) > 1
    options = Namespace(
        input_folder=str(source),
        output_folder=str(place),
        num_extract_workers=workers,
        num_merge_workers=workers,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=not split,
    )
    try:
        with contextlib.redirect_stdout(sys.stderr):
            ds_to_universal.main(options)
    except (AssertionError, KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise StateError(f"{source}: DeepSpeed's converter fails ({error!r})") from error
    for file in source.glob("deepspeed_compress_rank_*"):
        shutil.copy2(file, place)


def transpose_gpt2(place: Path, linear: bool) -> None:
    """Store the matrices of GPT-2 in the universal checkpoint `place` as linear layers do, or as Conv1D does.

    Does nothing if they are stored in that form already, or for other models.
    """
    import torch

    from deepspeed_compress.checkpointing.deepspeed.resharding import read_weight

    folders = [folder for folder in (place / "zero").iterdir() if folder.is_dir()]
    attention = [folder for folder in folders if _ATTENTION.search(folder.name)]
    if not attention:
        return
    outputs, inputs = read_weight(attention[0] / "fp32.pt")[_WEIGHT].shape
    if (outputs == 3 * inputs) == linear:
        return
    for folder in (one for one in folders if _CONV1D.search(one.name)):
        for file in folder.glob("*.pt"):
            found = read_weight(file, mmap=False)
            if isinstance(found, dict):
                # The other entries describe how the matrix was split, which would no longer be correct.
                torch.save({_WEIGHT: found[_WEIGHT].t().contiguous()}, file)
