"""Operations in an exchange that wait for the GPU, or that allocate memory after the first steps."""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

import deepspeed_compress
from tests.gpu.plugin import needs

KEPT = {"density": 0.05, "block_size": 64}
SECTIONS: Mapping[str, Mapping[str, Any]] = {
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
    "topk": {"method": "topk", **KEPT},
    "topk of a tensor": {"method": "topk", "density": 0.05, "scope": "tensor"},
    "topk by a threshold": {"method": "topk", "density": 0.05, "scope": "threshold"},
    "topk, values of 4 bits": {"method": "topk", **KEPT, "values": {"bits": 4}},
    "randomk": {"method": "randomk", **KEPT},
    "block_topk": {"method": "block_topk", "density": 0.25, "block_size": 64, "group": 8},
    "dgc": {"method": "dgc", **KEPT},
    "demo": {"method": "demo", "density": 0.05},
    "powersgd": {"method": "powersgd", "rank": 2},
}
"""Sections under `gradients`: every method, and settings that change the path of its elements."""
WEIGHTS: Mapping[str, Mapping[str, Any]] = {
    "weights, blockwise": {"method": "blockwise", "bits": 4},
    "weights, sign": {"method": "sign"},
    "weights, topk": {"method": "topk", **KEPT},
}
"""Sections under `weights`."""
WARM_UP, WATCHED = 3, 4
PACKAGE = Path(deepspeed_compress.__file__).parent


def weights_step(name: str, device: str) -> Callable[[], object]:
    from tests.gpu.exchanges import exchange_weights

    return exchange_weights(WEIGHTS[name], device)


def gradients_step(name: str, device: str) -> Callable[[], object]:
    from tests.gpu.exchanges import exchange_gradients

    return exchange_gradients(SECTIONS[name], device)


@pytest.mark.gpu
@needs("pydantic")
@pytest.mark.parametrize("name", [*SECTIONS, *WEIGHTS])
def test_exchange(name: str, device: torch.device, record_property: Callable[[str, object], None]) -> None:
    record_property("goal", "nothing waits, nothing new is reserved")
    exchange = (gradients_step if name in SECTIONS else weights_step)(name, device.type)
    for _ in range(WARM_UP):
        exchange()
    if device.type != "cuda":
        pytest.skip("needs CUDA; the exchange itself goes through")
    before = reserved()
    waiting = waits(exchange)
    for _ in range(WATCHED):
        exchange()
    grown = {key: value - before[key] for key, value in reserved().items() if value > before[key]}
    if waiting or grown:
        pytest.xfail(", ".join(filter(None, (waiting, *(f"{key} +{value:,}" for key, value in grown.items())))))


def reserved() -> dict[str, int]:
    torch.cuda.synchronize()
    kept = torch.cuda.memory_stats()
    names = ("num_alloc_retries", "segment.all.allocated", "reserved_bytes.all.current")
    return {name: kept[name] for name in names}


def waits(exchange: Callable[[], object]) -> str:
    """Return where the first call that waits for the GPU is made, or ""."""
    torch.cuda.synchronize()
    try:
        with no_waiting():
            for _ in range(WATCHED):
                exchange()
    except RuntimeError as error:
        if "synchronizing CUDA operation" not in str(error):
            raise
        return place_of(error)
    return ""


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make calls that wait for the GPU raise RuntimeError within the context."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def place_of(error: BaseException) -> str:
    """Return the innermost line of the package, without its tools, that led to `error`: "FILE:LINE, its text"."""
    frames = traceback.extract_tb(error.__traceback__)
    files = ((frame, Path(frame.filename)) for frame in reversed(frames))
    tools = PACKAGE / "tools"
    ours = (one for one in files if one[1].is_relative_to(PACKAGE) and not one[1].is_relative_to(tools))
    frame, file = next(ours, (frames[-1], Path(frames[-1].filename)))
    shown = file.relative_to(PACKAGE) if file.is_relative_to(PACKAGE) else file
    return f"{shown}:{frame.lineno}, {frame.line}"


def test_every_method_is_looked_at() -> None:
    from deepspeed_compress.config import SECTION, parse_section
    from deepspeed_compress.config.places import AnyCompressedGradients

    looked = {parse_section({SECTION: {"gradients": dict(one)}}).gradients.method for one in SECTIONS.values()}
    known = {
        name for model in get_args(AnyCompressedGradients) for name in get_args(model.model_fields["method"].annotation)
    }
    assert looked == known


@pytest.mark.parametrize("name", [*SECTIONS, *WEIGHTS])
def test_an_exchange_completes_without_a_gpu(name: str) -> None:
    step = (gradients_step if name in SECTIONS else weights_step)(name, "cpu")
    step()
    step()
