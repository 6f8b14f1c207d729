"""Part 3: operations in an exchange that wait for the GPU, or that allocate memory after the first steps."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

import deepspeed_compress
from deepspeed_compress.tools.gpu_check.findings import Finding, Task

__all__ = ["SECTIONS", "WEIGHTS", "findings", "place_of"]

_KEPT = {"density": 0.05, "block_size": 64}
SECTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "bf16": {"method": "bf16"},
        "fp16": {"method": "fp16"},
        "blockwise, 8 bits": {"method": "blockwise", "bits": 8},
        "blockwise, 4 bits": {"method": "blockwise", "bits": 4},
        "blockwise, 4 bits, stochastic": {"method": "blockwise", "bits": 4, "rounding": "stochastic"},
        "blockwise, 2 bits": {"method": "blockwise", "bits": 2},
        "blockwise, memory in 8 bits": {"bits": 4, "error_feedback": {"dtype": "int8"}},
        "blockwise after Hadamard": {"bits": 4, "rotation": {"method": "hadamard", "block_size": 64}},
        "linear": {"method": "linear", "bits": 4},
        "stochastic_linear": {"method": "stochastic_linear"},
        "percentile": {"method": "percentile"},
        "qsgd": {"method": "qsgd", "levels": 7},
        "fp8_e4m3": {"method": "fp8_e4m3"},
        "fp8_e5m2": {"method": "fp8_e5m2"},
        "sign": {"method": "sign"},
        "topk": {"method": "topk", **_KEPT},
        "topk of a tensor": {"method": "topk", "density": 0.05, "scope": "tensor"},
        "topk by a threshold": {"method": "topk", "density": 0.05, "scope": "threshold"},
        "topk, values of 4 bits": {"method": "topk", **_KEPT, "values": {"bits": 4}},
        "randomk": {"method": "randomk", **_KEPT},
        "block_topk": {"method": "block_topk", "density": 0.25, "block_size": 64, "group": 8},
        "dgc": {"method": "dgc", **_KEPT},
        "demo": {"method": "demo", "density": 0.05},
        "powersgd": {"method": "powersgd", "rank": 2},
    }
)
"""Sections under `gradients`: every method, and settings that change the path of its elements."""
WEIGHTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "weights, blockwise": {"method": "blockwise", "bits": 4},
        "weights, sign": {"method": "sign"},
        "weights, topk": {"method": "topk", **_KEPT},
    }
)
"""Sections under `weights`."""
_WARM_UP, _WATCHED = 3, 4
_GOAL, _GOAL_MEMORY = "nothing waits", "nothing new is reserved"
_HERE = Path(__file__).parent
_PACKAGE = Path(deepspeed_compress.__file__).parent


def findings(task: Task) -> Iterator[Finding]:
    """Yield two findings per method of gradients and of weights: what waits and what is allocated."""
    if find_spec("pydantic") is None:
        yield Finding("exchanges", "not run", why="needs pydantic, which --wheels may bring")
        return
    from deepspeed_compress.tools.gpu_check.exchanges import exchange_gradients, exchange_weights

    found = [(name, exchange_gradients, section) for name, section in SECTIONS.items()]
    for name, make, section in [*found, *((name, exchange_weights, one) for name, one in WEIGHTS.items())]:
        try:
            yield from _look(name, make(section, task.device), task)
        except Exception as error:
            yield Finding(name, "fail", goal=_GOAL, why=f"{type(error).__name__}: {str(error)[:300]}")


def _look(name: str, exchange: Callable[[], object], task: Task) -> Iterator[Finding]:
    for _ in range(_WARM_UP):
        exchange()
    if not task.on_gpu:
        yield Finding(name, "not run", goal=_GOAL, why="needs CUDA; the exchange itself goes through")
        return
    before = _reserved()
    waits = _waits(exchange)
    for _ in range(_WATCHED):
        exchange()
    yield Finding(name, "missed" if waits else "pass", goal=_GOAL, why=waits)
    grown = {key: value - before[key] for key, value in _reserved().items() if value > before[key]}
    why = ", ".join(f"{key} +{value:,}" for key, value in grown.items())
    yield Finding(f"{name}, memory", "missed" if grown else "pass", goal=_GOAL_MEMORY, why=why)


def _reserved() -> dict[str, int]:
    torch.cuda.synchronize()
    kept = torch.cuda.memory_stats()
    names = ("num_alloc_retries", "segment.all.allocated", "reserved_bytes.all.current")
    return {name: kept[name] for name in names}


def _waits(exchange: Callable[[], object]) -> str:
    """Return where the first call that waits for the GPU is made, or ""."""
    torch.cuda.synchronize()
    try:
        with _no_waiting():
            for _ in range(_WATCHED):
                exchange()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return place_of(error)
    return ""


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Make calls that wait for the GPU raise RuntimeError within the context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def place_of(error: BaseException) -> str:
    """Return the innermost line of the package, outside this tool, that led to `error`: "FILE:LINE, its text"."""
    frames = traceback.extract_tb(error.__traceback__)
    files = ((frame, Path(frame.filename)) for frame in reversed(frames))
    ours = (one for one in files if one[1].is_relative_to(_PACKAGE) and not one[1].is_relative_to(_HERE))
    frame, file = next(ours, (frames[-1], Path(frames[-1].filename)))
    shown = file.relative_to(_PACKAGE) if file.is_relative_to(_PACKAGE) else file
    return f"{shown}:{frame.lineno}, {frame.line}"
