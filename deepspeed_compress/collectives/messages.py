"""The settings of a step that both ends of a message share, and the layout of the message to each owner."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from deepspeed_compress.collectives.buckets import Partition, cut
from deepspeed_compress.compression.codec import Batch, Codec, Part
from deepspeed_compress.compression.feedback import Feedback, NoFeedback, SpreadSum
from deepspeed_compress.compression.segments import Segment


@dataclass(frozen=True)
class Channel:
    """Encoding of the elements of some parameters: what both ends agree on, and the state that the sender keeps.

    Attributes:
        codec: codec of the elements.
        feedback: error feedback of the gradients that a rank sends to their owners.
        mean_feedback: error feedback of the means that an owner sends back in an all-reduce.
        spread: schedule by which the optimizer receives a sum; None to deliver it on arrival.
        uncompressed: True if the codec does not compress.
    """

    codec: Codec
    feedback: Feedback = NoFeedback()  # noqa: RUF009  (frozen, hence safe to share)
    mean_feedback: Feedback = NoFeedback()  # noqa: RUF009
    spread: SpreadSum | None = None
    uncompressed: bool = False


@dataclass(frozen=True)
class Messages:
    """The messages of one reducer in one step.

    Attributes:
        channels: the channels.
        channel_of: index of the channel of each parameter, by name. Other parameters use channel 0.
        level: number from 0 to `LEVELS` - 1 that keeps apart the messages and random numbers of a run's reducers.
    """

    channels: tuple[Channel, ...]
    channel_of: Mapping[str, int] = field(default_factory=dict)
    level: int = 0


@dataclass(frozen=True)
class Piece:
    """Segments of one owner that one channel encodes as a single vector of `numel` elements.

    Attributes:
        channel: index of the channel.
        segments: the segments.
        numel: number of elements.
        begin: first byte within the owner's message.
        end: end of its bytes within the owner's message, exclusive.
        first: index of its first element among the owner's elements, in message order.
    """

    channel: int
    segments: tuple[Segment, ...]
    numel: int
    begin: int
    end: int
    first: int


@dataclass(frozen=True)
class MessageLayout:
    """The parts of each owner's message, the size of the message in bytes, and its number of elements."""

    pieces: tuple[tuple[Piece, ...], ...]
    sizes: tuple[int, ...]
    numels: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class RankLayout:
    """A message layout as `rank` uses it, with the batches that it encodes and decodes.

    Channels that are equal share a batch. Batches have numbers of channels, which stand for all that are equal.
    """

    messages: Messages
    layout: MessageLayout
    rank: int

    @property
    def size(self) -> int:
        """Return the number of bytes of the message of the elements that this rank owns."""
        return self.layout.sizes[self.rank]

    @property
    def numel(self) -> int:
        """Return the number of elements that this rank owns."""
        return self.layout.numels[self.rank]

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Return the pieces of the message of the elements that this rank owns."""
        return self.layout.pieces[self.rank]

    @cached_property
    def own(self) -> tuple[Segment, ...]:
        """Return the segments that this rank owns, in the order of its message."""
        return tuple(segment for piece in self.pieces for segment in piece.segments)

    @cached_property
    def outgoing_sizes(self) -> list[int]:
        """Return the sizes of the messages to all owners, of which this rank has none to itself."""
        return [size if owner != self.rank else 0 for owner, size in enumerate(self.layout.sizes)]

    @cached_property
    def incoming_sizes(self) -> list[int]:
        """Return the sizes of the messages of all ranks about the elements that this rank owns."""
        return [self.size if source != self.rank else 0 for source in range(len(self.layout.sizes))]

    @cached_property
    def outgoing(self) -> tuple[tuple[int, Batch], ...]:
        """Return (channel, batch) of the messages to other owners, which follow one another."""
        return self._batches(self._others, self.outgoing_sizes)

    @cached_property
    def gathered(self) -> tuple[tuple[int, Batch], ...]:
        """Return (channel, batch) of the messages of other owners among those of all owners."""
        return self._batches(self._others, self.layout.sizes)

    @cached_property
    def gathered_own(self) -> tuple[tuple[int, Batch], ...]:
        """Return (channel, batch) of this rank's message among those of all owners."""
        return self._batches([self.rank], self.layout.sizes)

    @cached_property
    def place(self) -> slice:
        """Return the place of this rank's message among those of all owners."""
        begin = sum(self.layout.sizes[: self.rank])
        return slice(begin, begin + self.size)

    @property
    def _others(self) -> list[int]:
        return [owner for owner in range(len(self.layout.sizes)) if owner != self.rank]

    def _batches(self, owners: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, Batch], ...]:
        begins, first_equal = list(accumulate(sizes, initial=0)), _first_equal(self.messages.channels)
        parts: dict[int, list[Part]] = {}
        for owner in owners:
            for piece in self.layout.pieces[owner]:
                begin, end = begins[owner] + piece.begin, begins[owner] + piece.end
                part = Part(piece.segments, piece.numel, begin, end, owner, piece.channel)
                parts.setdefault(first_equal[piece.channel], []).append(part)
        channels = self.messages.channels
        return tuple((index, Batch(found, channels[index].codec.alignment)) for index, found in sorted(parts.items()))


def _first_equal(channels: Sequence[Channel]) -> list[int]:
    """Return the index of the first equal channel of each of `channels`. Channel 0 equals no other."""
    known: dict[tuple[Channel, bool], int] = {}
    return [known.setdefault((channel, index == 0), index) for index, channel in enumerate(channels)]


def make_layouts(messages: Messages, partition: Partition, rounds: int = 1) -> tuple[MessageLayout, ...]:
    """Return the message layouts for `partition`, in `rounds` of near-equal size.

    The function is pure, so the result is equal on every rank.
    """
    return layouts_of_parts(messages, [partition.owned_by(rank) for rank in range(partition.world_size)], rounds)


def layouts_of_parts(
    messages: Messages, parts: Sequence[Sequence[Segment]], rounds: int = 1
) -> tuple[MessageLayout, ...]:
    """Return the message layouts for the segments of each owner, which are sent in the given order."""
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
    """Messages that `rank` sends to reduce a bucket.

    It sends a part to every other owner and, if `everywhere`, its means to all of them.
    """

    messages: Messages
    layouts: tuple[MessageLayout, ...]
    rank: int
    everywhere: bool

    @property
    def bytes(self) -> int:
        """Return the number of bytes that leave the rank."""
        return self._length([channel for channel, _ in enumerate(self.messages.channels)])

    @property
    def uncompressed_bytes(self) -> int:
        """Return the number of bytes that leave the rank uncompressed."""
        return self._length([index for index, channel in enumerate(self.messages.channels) if channel.uncompressed])

    def _length(self, channels: Sequence[int]) -> int:
        others = len(self.layouts[0].pieces) - 1
        return sum(
            (piece.end - piece.begin) * (others * self.everywhere if owner == self.rank else 1)
            for owner, piece in self._pieces()
            if piece.channel in channels
        )

    def uncompressed_names(self) -> set[str]:
        """Return the names of the uncompressed parameters."""
        pieces = (piece for _, piece in self._pieces() if self.messages.channels[piece.channel].uncompressed)
        return {segment.parameter for piece in pieces for segment in piece.segments}

    def names(self) -> set[str]:
        return {segment.parameter for _, piece in self._pieces() for segment in piece.segments}

    def _pieces(self) -> Iterator[tuple[int, Piece]]:
        """Yield (owner, piece) pairs."""
        for layout in self.layouts:
            for owner, pieces in enumerate(layout.pieces):
                yield from ((owner, piece) for piece in pieces)
