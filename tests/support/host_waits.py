"""Detection, on the CPU, of operations for which the host would wait for a GPU."""

import sys
from collections import Counter
from contextlib import ExitStack
from functools import partialmethod
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import deepspeed_compress

_PACKAGE = Path(deepspeed_compress.__file__).parent
_OTHERS = ("/site-packages/deepspeed/", "/torch/optim/", "/tests/")
_WAITING = frozenset(
    {
        "_local_scalar_dense",  # item, float(), bool()
        "equal",
        "nonzero",  # and other operations whose size depends on values
        "masked_select",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "bincount",
        "lift_fresh",  # torch.tensor and similar functions: a copy from memory that is not pinned
    }
)
_COPIES = ("tolist", "numpy", "cpu")
"""Methods that dispatch no operation if a tensor is already on the host."""


class HostWaits(TorchDispatchMode):
    """Context that records waiting operations in files below `root`.

    Attributes:
        times: number of times of each operation, by "file:function: operation".
    """

    def __init__(self, root: Path = _PACKAGE) -> None:
        super().__init__()
        self._root = str(root)
        self.times: Counter[str] = Counter()
        self._patches = ExitStack()

    @property
    def found(self) -> set[str]:
        return set(self.times)

    def __enter__(self) -> "HostWaits":
        for name in _COPIES:
            self._patches.enter_context(patch.object(Tensor, name, _recorded(self, name, getattr(Tensor, name))))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _waits(func, args):
            self.record(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def record(self, operation: str) -> None:
        place = _caller(self._root)
        if place is not None:
            self.times[f"{place}: {operation}"] += 1


def _recorded(waits: HostWaits, name: str, original: Any) -> partialmethod[Any]:
    return partialmethod(_call_recorded, waits, name, original)


def _call_recorded(tensor: Tensor, waits: HostWaits, name: str, original: Any) -> Any:
    waits.record(name)
    return original(tensor)


def _waits(func: Any, args: Any) -> bool:
    name = func._schema.name.removeprefix("aten::")
    masks = name in ("index", "index_put_", "_index_put_impl_") and any(_is_mask(leaf) for leaf in tree_leaves(args[1]))
    counts = name == "repeat_interleave" and func._overloadname == "Tensor"
    return name in _WAITING or masks or counts


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _caller(root: str) -> str | None:
    """Return the function in `root` that called an operation, or None if it was called from elsewhere."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(root):
            return f"{Path(file).relative_to(root)}:{frame.f_code.co_name}"
        if any(other in file for other in _OTHERS) and file != __file__:
            return None
        frame = frame.f_back
    return None
