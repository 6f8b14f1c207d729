"""Encoding and decoding on a GPU never make the host wait."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FunctionType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from deepspeed_compress.compression import kernels
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Compressor
from deepspeed_compress.compression.feedback import ErrorFeedback, MomentumCorrection
from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.residuals import STORAGE, Residuals
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.compression.transforms import DCT, Hadamard, Identity, Transform
from tests.support.codecs import CODECS, SETTINGS
from tests.support.host_waits import HostWaits
from tests.support.kernels import operations

ROWS, WIDTH = 40, 25
SEGMENTS = (Segment("weight", 0, ROWS * WIDTH, 0, 0),)


def starts_programs(function: FunctionType) -> bool:
    """Return True if a function of the GPU kernels launches a Triton program, directly or through a helper."""
    used = function.__code__.co_names
    helpers = [one for one in map(function.__globals__.get, used) if isinstance(one, FunctionType)]
    inside = [helper for helper in helpers if helper.__module__.startswith(f"{kernels.__name__}.gpu")]
    return "cuda" in used or any(map(starts_programs, inside))


@contextmanager
def kernels_for_gpus() -> Iterator[None]:
    """Use the GPU kernels for CPU tensors. Triton programs, which never wait, are replaced by plain torch."""
    gpu = pytest.importorskip("deepspeed_compress.compression.kernels.gpu")
    with ExitStack() as stack:
        for name in operations(gpu):
            operation = getattr(gpu, name)
            if starts_programs(operation):
                stack.enter_context(patch.object(gpu, name, getattr(reference, operation.__name__)))
        stack.enter_context(patch.object(kernels, "_implementation", lambda _: gpu))
        yield


def waits(codec: Codec, feedback: Any) -> set[str]:
    """Return the waits in encoding and decoding, after a first message that fills caches."""
    x, out = torch.randn(ROWS * WIDTH), torch.empty(codec.compressor.payload_bytes(ROWS * WIDTH), dtype=torch.uint8)
    with kernels_for_gpus():
        for step in range(2):
            with HostWaits() as seen:
                feedback.encode(codec.coefficients(x, SEGMENTS), SEGMENTS, out, 3 + step, codec)
                codec.decode([out, out], SEGMENTS, torch.zeros_like(x), 0.5, add=True)
                feedback.keep(x.clone(), SEGMENTS, codec)
    return seen.found


@pytest.mark.parametrize("compressor", CODECS, ids=repr)
def test_compressors_do_not_wait(compressor: Compressor) -> None:
    assert waits(Codec(compressor), ErrorFeedback(Residuals("fp32", transactional=True))) == set()


@pytest.mark.parametrize(
    "transform", [Hadamard(64), DCT({"weight": WIDTH}, 8), Identity()], ids=lambda one: type(one).__name__
)
@pytest.mark.parametrize("storage", STORAGE)
def test_transforms_and_residuals_do_not_wait(transform: Transform, storage: str) -> None:
    codec, stores = Codec(SETTINGS["topk"][0], transform), [Residuals(storage, transactional=True) for _ in range(2)]
    assert waits(codec, ErrorFeedback(stores[0], own_exact=False)) == set()
    assert waits(codec, MomentumCorrection(*stores, momentum=0.9)) == set()


@pytest.mark.parametrize(
    "read",
    [
        lambda x: int(x[0]),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool((x > 3).any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 3],
        lambda x: torch.equal(x, x),
        lambda x: x.unique(),
        lambda x: torch.arange(len(x)).repeat_interleave(x),
        lambda x: torch.tensor([1.0, 2.0]),
    ],
)
def test_a_waiting_operation_is_detected(read: Callable[[torch.Tensor], object]) -> None:
    with HostWaits(Path(__file__).parent) as seen:
        read(torch.arange(6))
    [found] = seen.found
    assert found.startswith(f"{Path(__file__).name}:<lambda>: ")


def test_an_operation_that_does_not_wait_is_not_reported() -> None:
    with HostWaits(Path(__file__).parent) as seen:
        x = torch.arange(6)
        (
            x[torch.zeros(2, dtype=torch.int64)]
            + x.repeat_interleave(2)[:2]
            + x.sort().values[:2].masked_fill(x[:2] > 3, 0)
        )
    assert not seen.found
