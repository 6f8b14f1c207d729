"""State files of DeepSpeed."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch

from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import open_regular


def read_states(file: Path) -> dict[str, Any]:
    """Return the contents of a file, unpickled as DeepSpeed does, with tensors that are memory-mapped if possible.

    It is impossible in torch's older format, which DeepSpeed writes with `"checkpoint_serialization": false`.

    Raises:
        StateError: the file is missing or damaged.
    """
    try:
        with open_regular(file) as stream:
            can_map = zipfile.is_zipfile(stream)
        found: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=False, mmap=can_map)
    except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise StateError(f"{file} is missing or damaged ({error})") from error
    return found
