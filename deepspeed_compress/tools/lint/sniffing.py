"""Whether a file that was found, not asked for, is a configuration of DeepSpeed or Accelerate."""

import os
import re
from fnmatch import fnmatch

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import keys

_NAMED = ("ds_config*", "ds_zero*")
_PERHAPS = ("*deepspeed*", "ds[_-]*", "*zero*", "*stage*")
_OWN = ("zero_optimization", "train_micro_batch_size_per_gpu", "deepspeed_compress")
"""Keys that no other file has."""
_OF_ACCELERATE = "deepspeed_config"
_TELLING = re.compile("|".join(_OWN).encode())
_TELLING_YAML = re.compile(rf"^[\"']?({'|'.join((*_OWN, _OF_ACCELERATE))})[\"']?[ \t]*:".encode(), re.MULTILINE)


def is_telling(path: str, content: bytes, yaml: bool = False) -> bool:
    """Whether a configuration is meant, so that even a syntax error is worth a word."""
    return _fits(path, _NAMED) or (_TELLING_YAML if yaml else _TELLING).search(content) is not None


def may_be_config(path: str, content: bytes, yaml: bool = False) -> bool:
    """Whether it is worth reading: most files of a directory are something else, and may be large."""
    return _fits(path, _PERHAPS) or is_telling(path, content, yaml)


def is_config(document: Document) -> bool:
    """Whether it is one: by its name, by keys of its own, or by a likely name and keys half of which DeepSpeed has."""
    if _fits(document.path, _NAMED) or any(document.has(key) for key in _OWN):
        return True
    known = sum(key in keys().sections[()].keys for key in document.data)
    return _fits(document.path, _PERHAPS) and 0 < len(document.data) <= 2 * known


def _fits(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(os.path.basename(path), pattern) for pattern in patterns)
