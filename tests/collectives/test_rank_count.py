"""The host's work for a bucket does not depend on the number of ranks: calls of kernels and of Python functions."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

import pytest
import torch

from deepspeed_compress.collectives.buckets import Partition, even_partition, partition_by_owners
from deepspeed_compress.collectives.exchange import Link
from deepspeed_compress.collectives.gather import DifferenceGather
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import QSGD, Blockwise, Cast, Sign
from deepspeed_compress.compression.feedback import ErrorFeedback
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.transforms import Hadamard
from deepspeed_compress.monitor import Meter
from deepspeed_compress.tools.bench import mirror
from deepspeed_compress.tools.bench.mirror import Mirror
from tests.support.kernels import operations

RANKS = (2, 16, 64, 512)
SIZES = (("weight", 120_000), ("norm", 700), ("other", 60_001))
CODECS = {
    "8 bits": Codec(Blockwise(8, 64)),
    "4 bits": Codec(Blockwise(4, 64)),
    "4 bits, rotated": Codec(Blockwise(4, 64), Hadamard(64)),
    "4 bits, stochastic": Codec(Blockwise(4, 64, stochastic=True)),
    "3 bits": Codec(Blockwise(3, 64)),
    "2 bits": Codec(Blockwise(2, 64)),
    "sign": Codec(Sign(64)),
    "qsgd": Codec(QSGD(7, 64)),
    "bf16": Codec(Cast(torch.bfloat16)),
}
CPU = torch.device("cpu")
_FOREIGN = (torch.__path__[0], mirror.__file__)
"""Files whose calls are not those of a bucket: torch's, and the mirror's, which stands for a network."""


@contextmanager
def counted() -> Iterator[tuple[Counter[str], Counter[str]]]:
    """Count the calls of kernels and of Python functions, without those of callbacks of the garbage collector."""
    kernels, calls, module = Counter[str](), Counter[str](), for_device(CPU)

    def counting(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            kernels[name] += 1
            return operation(*args, **options)

        return call

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            calls[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1

    with patch_all(module, {name: counting(name, getattr(module, name)) for name in operations(module)}):
        # Other modules' callbacks (hypothesis registers one) would run in it, whenever enough objects exist.
        gc.disable()
        sys.setprofile(profile)
        try:
            yield kernels, calls
        finally:
            sys.setprofile(None)
            gc.enable()


@contextmanager
def patch_all(module: ModuleType, found: dict[str, Any]) -> Iterator[None]:
    with patch.multiple(module, **found):
        yield


def run() -> Run:
    return Run(StepClock(), Meter(timed=False))


def reducer(ranks: int, codec: Codec) -> PayloadReducer:
    """Return a reducer with error feedback, whose small parameters are sent uncompressed."""
    feedback = [ErrorFeedback(Residuals("bf16", transactional=True)) for _ in range(2)]
    channels = (Channel(Codec(Cast(torch.bfloat16)), uncompressed=True), Channel(codec, *feedback))
    return PayloadReducer(Link(Mirror(0, ranks)), Messages(channels, {"weight": 1, "other": 1}), run())


def count(work: Callable[[], object], begin: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
    """Return the counts of the third run; the first ones meet new layouts and change the basis of residuals."""
    for _ in range(2):
        begin()
        work()
    begin()
    with counted() as found:
        work()
    return found


def of_reducer(operation: str, ranks: int, codec: Codec, layout: str) -> tuple[Counter[str], Counter[str]]:
    """Return the counts of one operation."""
    reduce = reducer(ranks, codec)
    partition = even_partition(SIZES, ranks) if layout == "ZeRO 2" else shares(ranks)
    stores = [channel.feedback.residuals for channel in reduce.messages.channels[1:]]
    stores += [channel.mean_feedback.residuals for channel in reduce.messages.channels[1:]]
    bucket, step = torch.randn(partition.numel, dtype=torch.bfloat16), iter(range(9))

    def begin() -> None:
        for store in stores:
            store.commit()
        reduce.run.clock.begin(next(step))

    scale = [0.5] if "reduce" in operation else []
    return count(lambda: getattr(reduce, operation)(bucket, partition, *scale), begin)


def shares(ranks: int) -> Partition:
    """Return a bucket of ZeRO 3: of every parameter an equal share for each rank."""
    return partition_by_owners(tuple((name, -(-numel // ranks)) for name, numel in SIZES), ranks)


def of_weights(ranks: int) -> tuple[Counter[str], Counter[str]]:
    """Return the counts of a gather of weights."""
    channels = (Channel(Codec(Cast(torch.bfloat16)), uncompressed=True), Channel(Codec(Blockwise(8, 64))))
    gather = DifferenceGather(Mirror(0, ranks), SIZES, Messages(channels, {"weight": 1, "other": 1}), run())
    held, master = torch.randn(gather.numel, dtype=torch.bfloat16), torch.randn(gather.own_numel)
    return count(lambda: gather.gather(held, master), lambda: gather.run.clock.begin(0))


def differing(counts: list[tuple[Counter[str], Counter[str]]], allowed: int = 1) -> dict[str, Any]:
    """Return the names whose counts differ by more than `allowed` between numbers of ranks.

    One more call is that of messages whose sizes happen to be equal.
    """
    names = {name for both in counts for counter in both for name in counter if not name.startswith(_FOREIGN)}
    found = {name: [kernels[name] + calls[name] for kernels, calls in counts] for name in names}
    return {name: numbers for name, numbers in found.items() if max(numbers) - min(numbers) > allowed}


@pytest.mark.parametrize("layout", ["ZeRO 2", "ZeRO 3"])
@pytest.mark.parametrize("operation", ["reduce_scatter", "all_reduce", "all_gather"])
@pytest.mark.parametrize("codec", CODECS)
def test_calls_for_a_bucket_do_not_depend_on_the_number_of_ranks(codec: str, operation: str, layout: str) -> None:
    # A rotation has a call for every size of blocks that remainders consist of: at most six, in each of three batches.
    allowed = 40 if isinstance(CODECS[codec].transform, Hadamard) else 1
    assert differing([of_reducer(operation, ranks, CODECS[codec], layout) for ranks in RANKS], allowed) == {}


def test_calls_for_weights_do_not_depend_on_the_number_of_ranks() -> None:
    assert differing([of_weights(ranks) for ranks in RANKS]) == {}
