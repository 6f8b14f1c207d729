"""``ds-compress checkpoint convert``: create a universal checkpoint with DeepSpeed's converter, and complete it.

DeepSpeed's `ds_to_universal` needs a flag if the checkpoint does not describe its parameters. It drops the residuals of
compression. It copies the matrices of GPT-2 unchanged, although split models store them transposed.
"""

import contextlib
import pickle
import re
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import PARAM
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from deepspeed_compress.checkpointing.catalog import latest_tag
from deepspeed_compress.checkpointing.completeness import find_problems
from deepspeed_compress.errors import DataError, StateError
from deepspeed_compress.safe_files import write_text

LATEST_UNIVERSAL = "latest_universal"
"""File that names the universal checkpoint of a directory, for DeepSpeed."""

_CONV1D = re.compile(r"(?:^|\.)(?:attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight$")
"""Pattern of the matrices of GPT-2 in transformers: (inputs, outputs) in a Conv1D."""
_ATTENTION = re.compile(r"(?:^|\.)attn\.c_attn\.weight$")
"""Pattern of a matrix with three times as many outputs as inputs, whose shape shows whether it is transposed."""


def convert(directory: Path, tag: str | None, output: str | None, tensor: int | None, workers: int = 1) -> Path:
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
    tag = tag or latest_tag(directory)
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
    folders = [folder for folder in (place / "zero").iterdir() if folder.is_dir()]
    attention = [folder for folder in folders if _ATTENTION.search(folder.name)]
    if not attention or _is_linear(attention[0]) == linear:
        return
    for folder in (one for one in folders if _CONV1D.search(one.name)):
        for file in folder.glob("*.pt"):
            found = _weight(file)
            if isinstance(found, dict):
                # The other entries describe how the matrix was split, which would no longer be correct.
                torch.save({PARAM: found[PARAM].t().contiguous()}, file)


def _weight(file: Path) -> Any:
    """Load DeepSpeed's file of one weight, without running code that the file may refer to.

    Raises:
        StateError: The file contains other objects.
    """
    try:
        with torch.serialization.safe_globals([SubparamShape]):
            return torch.load(file, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise StateError(f"{file} contains more than a weight, so it is not read ({error})") from error


def _is_linear(folder: Path) -> bool:
    outputs, inputs = _weight(folder / "fp32.pt")[PARAM].shape
    return bool(outputs == 3 * inputs)
