"""How the message to each owner is put together: which segments go through which codec, and where they lie."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from deepspeed_compress.communication.buckets import Partition, cut
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.segments import Segment

__all__ = ["CodecOf", "Piece", "Plan", "make_plans"]

CodecOf = Callable[[str], int]
"""Parameter name to the index of its codec."""


@dataclass(frozen=True)
class Piece:
    """Segments of one owner that one codec encodes as a single vector.

    `begin`, `end`: its bytes within the owner's message. `first`: its first element within the owner's elements,
    counted piece after piece.
    """

    codec: int
    segments: tuple[Segment, ...]
    numel: int
    begin: int
    end: int
    first: int


@dataclass(frozen=True)
class Plan:
    """The pieces of every owner's message, and the size of each message in bytes."""

    pieces: tuple[tuple[Piece, ...], ...]
    sizes: tuple[int, ...]
    numels: tuple[int, ...]


def make_plans(partition: Partition, codecs: Sequence[Codec], codec_of: CodecOf, chunks: int = 1) -> tuple[Plan, ...]:
    """The messages for `partition`, in `chunks` rounds of near-equal size; pure, hence equal on every rank."""
    cuts = [cut(partition.owned_by(rank), chunks) for rank in range(partition.world_size)]
    return tuple(_plan(owned, codecs, codec_of) for owned in zip(*cuts, strict=True))


def _plan(owned: Sequence[Sequence[Segment]], codecs: Sequence[Codec], codec_of: CodecOf) -> Plan:
    owners = [_pieces(segments, codecs, codec_of) for segments in owned]
    return Plan(
        pieces=tuple(owners),
        sizes=tuple(pieces[-1].end if pieces else 0 for pieces in owners),
        numels=tuple(sum(piece.numel for piece in pieces) for pieces in owners),
    )


def _pieces(segments: Sequence[Segment], codecs: Sequence[Codec], codec_of: CodecOf) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    begin = first = 0
    for index, codec in enumerate(codecs):
        chosen = tuple(segment for segment in segments if codec_of(segment.parameter) == index)
        if not chosen:
            continue
        numel = sum(segment.numel for segment in chosen)
        end = begin + codec.compressor.payload_bytes(numel)
        pieces.append(Piece(index, chosen, numel, begin, end, first))
        begin, first = end, first + numel
    return tuple(pieces)
