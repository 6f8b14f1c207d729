"""What is in force in a step, as both ends of a message see it, and how the message to each owner is put together."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from deepspeed_compress.communication.buckets import Partition, cut
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.feedback import Feedback, NoFeedback, SpreadSum
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment

__all__ = ["Channel", "MessageLayout", "Messages", "Piece", "Transfer", "layouts_of_parts", "make_layouts"]


@dataclass(frozen=True)
class Channel:
    """How the elements of some parameters travel: what both ends agree on, and what the sender keeps.

    `feedback`: of the gradients that a rank sends to their owners. `mean_feedback`: of the means that an owner sends
    back in an all-reduce. `spread`: how the optimizer gets a sum; None: as it arrives. `uncompressed`: the codec is
    that of elements which nothing compresses.
    """

    codec: Codec
    feedback: Feedback = NoFeedback()  # noqa: RUF009  (frozen, hence safe to share)
    mean_feedback: Feedback = NoFeedback()  # noqa: RUF009
    spread: SpreadSum | None = None
    uncompressed: bool = False


@dataclass(frozen=True)
class Messages:
    """The messages of one reducer in one step.

    `channel_of`: parameter name to the index of its channel; names that it does not have go through channel 0.
    `level` tells the messages and random numbers of several reducers of one run apart: 0 to `LEVELS` - 1.
    """

    channels: tuple[Channel, ...]
    channel_of: Mapping[str, int] = field(default_factory=dict)
    level: int = 0


@dataclass(frozen=True)
class Piece:
    """Segments of one owner that one channel encodes as a single vector of `numel` elements.

    `channel`: its index. `begin`, `end`: its bytes within the owner's message. `first`: its first element within the
    owner's elements, counted piece after piece.
    """

    channel: int
    segments: tuple[Segment, ...]
    numel: int
    begin: int
    end: int
    first: int


@dataclass(frozen=True)
class MessageLayout:
    """By owner: the pieces of its message, the size of the message in bytes, and its number of elements."""

    pieces: tuple[tuple[Piece, ...], ...]
    sizes: tuple[int, ...]
    numels: tuple[int, ...]


def make_layouts(messages: Messages, partition: Partition, rounds: int = 1) -> tuple[MessageLayout, ...]:
    """The messages for `partition`, in `rounds` of near-equal size; pure, hence equal on every rank."""
    return layouts_of_parts(messages, [partition.owned_by(rank) for rank in range(partition.world_size)], rounds)


def layouts_of_parts(
    messages: Messages, parts: Sequence[Sequence[Segment]], rounds: int = 1
) -> tuple[MessageLayout, ...]:
    """The same for what each owner has, whose segments travel in the order that they have here."""
    cuts = [cut(part, rounds) for part in parts]
    return tuple(_layout(messages, owned) for owned in zip(*cuts, strict=True))


def _layout(messages: Messages, owned: Sequence[Sequence[Segment]]) -> MessageLayout:
    owners = [_pieces(messages, segments) for segments in owned]
    return MessageLayout(
        pieces=tuple(owners),
        sizes=tuple(pieces[-1].end if pieces else 0 for pieces in owners),
        numels=tuple(sum(piece.numel for piece in pieces) for pieces in owners),
    )


def _pieces(messages: Messages, segments: Sequence[Segment]) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    begin = first = 0
    for index, channel in enumerate(messages.channels):
        chosen = tuple(one for one in segments if messages.channel_of.get(one.parameter, 0) == index)
        if not chosen:
            continue
        numel = sum(segment.numel for segment in chosen)
        end = begin + channel.codec.compressor.payload_bytes(numel)
        pieces.append(Piece(index, chosen, numel, begin, end, first))
        begin, first = end, first + numel
    return tuple(pieces)


@dataclass(frozen=True)
class Transfer:
    """What `rank` sends to reduce a bucket: a part to every other owner, and `everywhere` its means to all of them."""

    messages: Messages
    layouts: tuple[MessageLayout, ...]
    rank: int
    everywhere: bool

    @property
    def bytes(self) -> int:
        """Bytes that leave the rank."""
        return self._length([channel for channel, _ in enumerate(self.messages.channels)])

    @property
    def uncompressed_bytes(self) -> int:
        """The part of them that nothing compresses."""
        return self._length([index for index, one in enumerate(self.messages.channels) if one.uncompressed])

    def _length(self, channels: Sequence[int]) -> int:
        others = len(self.layouts[0].pieces) - 1
        return sum(
            (piece.end - piece.begin) * (others * self.everywhere if owner == self.rank else 1)
            for owner, piece in self._pieces()
            if piece.channel in channels
        )

    def stored(self) -> Iterator[tuple[Residuals, int]]:
        """What is kept between steps: the stores, each with a number of elements of this bucket."""
        for owner, piece in self._pieces():
            channel, own = self.messages.channels[piece.channel], owner == self.rank
            # A momentum is kept of own elements too, and so is what waits for another step.
            if not own or not channel.codec.sends or not channel.feedback.own_exact:
                yield from ((store, piece.numel) for store in channel.feedback.stores)
            if own and self.everywhere:
                yield from ((store, piece.numel) for store in channel.mean_feedback.stores)
            if channel.spread is not None and (own or self.everywhere):
                yield channel.spread.left, piece.numel

    def uncompressed_names(self) -> set[str]:
        """The parameters that nothing compresses."""
        pieces = (piece for _, piece in self._pieces() if self.messages.channels[piece.channel].uncompressed)
        return {segment.parameter for piece in pieces for segment in piece.segments}

    def names(self) -> set[str]:
        return {segment.parameter for _, piece in self._pieces() for segment in piece.segments}

    def _pieces(self) -> Iterator[tuple[int, Piece]]:
        """(owner, piece)."""
        for layout in self.layouts:
            for owner, pieces in enumerate(layout.pieces):
                yield from ((owner, piece) for piece in pieces)
