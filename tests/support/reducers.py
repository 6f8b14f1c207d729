"""Buckets and reducers for tests of collectives."""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import Partition, partition_by_sizes
from deepspeed_compress.collectives.exchange import Link
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import Reducer, Run
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Compressor
from deepspeed_compress.compression.feedback import ErrorFeedback, NoFeedback
from deepspeed_compress.compression.residuals import Residuals
from tests.support.codecs import noise


def interleaved(ranks: int) -> Partition:
    """Return a bucket in which every rank owns parts of several parameters, as in ZeRO 3."""
    runs = [(rank, 10 + rank) for rank in range(ranks)]
    return partition_by_sizes([("weight", runs), ("bias", runs[:1]), ("norm", runs[::-1])], ranks)


def normal(rank: int, numel: int, step: int = 0) -> Tensor:
    """Return normal numbers that depend on `rank` and `step`: fp32 [numel]."""
    return noise(numel, 100 * step + rank)


def integers(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return integers so small that their sums are exact in every dtype."""
    return torch.randint(-20, 20, (numel,), generator=torch.Generator().manual_seed(rank)).to(dtype)


def raw_bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def reduced_both_ways(reducer: Reducer, bucket: Tensor, partition: Partition, factor: float) -> tuple[Tensor, Tensor]:
    """Return what becomes of `bucket` if each rank gets its part of the sum, and if each gets the whole."""
    scattered, everywhere = bucket.clone(), bucket.clone()
    reducer.reduce_scatter(scattered, partition, factor)
    reducer.all_reduce(everywhere, partition, factor)
    return scattered, everywhere


def payload_reducer(
    group: ProcessGroup, codec: Compressor, run: Run, feedback: bool = False, chunk_numel: int | None = None
) -> PayloadReducer:
    """Return a reducer with one channel, with error feedback in both directions if `feedback`."""
    kept = (ErrorFeedback(Residuals("fp32", transactional=False)) if feedback else NoFeedback() for _ in range(2))
    return PayloadReducer(Link(group), Messages((Channel(Codec(codec), *kept),)), run, chunk_numel)
