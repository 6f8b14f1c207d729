"""Functions with which rules read a document, and functions that write examples."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.strings import to_json

AUTO = "auto"
TRUE_WORDS = frozenset({"true", "t", "yes", "y", "on", "1"})
FALSE_WORDS = frozenset({"false", "f", "no", "n", "off", "0"})
"""Strings that pydantic reads as booleans."""
HUGGING_FACE = frozenset({"hf", "accelerate"})
ZERO = "zero_optimization"
OFFLOADS = frozenset({"cpu", "nvme"})

_WIDTH = 60


def show(value: object) -> str:
    """Return a value as JSON, shortened to fit into a sentence."""
    text = to_json(value)
    return text if len(text) <= _WIDTH else text[: _WIDTH - 3] + "..."


def listed(values: object) -> str:
    """Return values as JSON, separated by commas."""
    return ", ".join(show(value) for value in values) if isinstance(values, list | tuple | frozenset) else show(values)


def name(path: Path) -> str:
    """Return a path in the form of DeepSpeed's messages, such as zero_optimization.stage."""
    return ".".join(str(part) for part in path)


def number(value: object) -> float | None:
    """Return a finite number, or None for anything else, including booleans."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if float("-inf") < value < float("inf") else None


def integer(value: object) -> int | None:
    """Return an integer as DeepSpeed's models read it (2, 2.0 or "2"), or None."""
    if isinstance(value, str) and len(value) < 20 and value.isascii() and value.isdigit():
        return int(value)
    found = number(value)
    return int(found) if found is not None and found == int(found) else None


def truth(value: object) -> bool | None:
    """Return a boolean as DeepSpeed's models read it, or None if the value is not one."""
    if isinstance(value, str):
        word = value.lower()
        return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None
    return bool(value) if isinstance(value, bool) or (isinstance(value, int | float) and value in (0, 1)) else None


def is_true(document: Document, *path: str) -> bool:
    """Return True if a boolean of a strict section is set."""
    return truth(document.get(*path)) is True


def section(document: Document, *path: str) -> Mapping[str, Any]:
    """Return an object of the configuration, or an empty dict if there is none."""
    value = document.get(*path)
    return value if isinstance(value, dict) else {}


def stage(document: Document) -> int | None:
    """Return the ZeRO stage, or None if it is left to another program ("auto") or cannot be read."""
    ours = integer(document.get("deepspeed_compress", "parallelism", "zero_stage"))
    if ours is not None:
        return ours
    zero = document.get(ZERO)
    if not isinstance(zero, dict):
        return int(zero is True)
    value = zero.get("stage", 0)
    return int(value) if isinstance(value, bool) else integer(value)


def offload(document: Document, what: str) -> str | None:
    """Return the device of `offload_optimizer` or `offload_param`, or None if it is not a valid one."""
    device = document.get(ZERO, what, "device")
    return device if isinstance(device, str) and device in OFFLOADS else None


def bf16(document: Document) -> bool:
    """Return True if the model is in bf16. The old name of the section is used if the new one is missing."""
    return is_true(document, "bf16" if document.get("bf16") is not None else "bfloat16", "enabled")


def fp16(document: Document) -> bool:
    return is_true(document, "fp16", "enabled")


def optimizer(document: Document) -> str:
    """Return the optimizer's type in lower case, as DeepSpeed compares it, or an empty string."""
    value = document.get("optimizer", "type")
    return value.lower() if isinstance(value, str) else ""


def params(document: Document, what: str) -> Mapping[str, Any]:
    """Return the parameters of the optimizer or the scheduler."""
    return section(document, what, "params")


def stages(document: Document) -> int:
    """Return the number of pipeline stages in the configuration, or 1."""
    ours = integer(document.get("deepspeed_compress", "parallelism", "pipeline"))
    return max(ours or integer(document.get("pipeline", "stages")) or 1, 1)


def tensor_size(document: Document) -> int:
    """Return the number of tensor-parallel ranks in the configuration, or 1."""
    ours = integer(document.get("deepspeed_compress", "parallelism", "tensor"))
    return max(ours or integer(document.get("tensor_parallel", "autotp_size")) or 1, 1)


def hugging_face(context: Context) -> bool:
    return context.framework in HUGGING_FACE


def means_auto(value: object) -> bool:
    """Return True if a value is "auto" or another spelling of it."""
    return isinstance(value, str) and value.strip().lower() == AUTO


def leaves(value: object, path: Path = ()) -> Iterator[tuple[Path, object]]:
    """Yield every value that is not an object, with its path. An array is a single value."""
    if isinstance(value, dict):
        for key, child in value.items():
            yield from leaves(child, (*path, key))
    else:
        yield path, value
