"""The settings of a step that both ends of a message share, and the layout of the message to each owner."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate

from deepspeed_compress.collectives.buckets import cut
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


@dataclass(frozen=True, eq=False)
class MessageLayout:
    """The layout of the messages of all owners, as `rank` uses it, with the batches that it encodes and decodes.

    Channels that are equal share a batch.

    Attributes:
        messages: the messages.
        rank: the rank.
        owners: pieces of the message of each owner's elements.
        sizes: number of bytes of each of these messages.
    """

    messages: Messages
    rank: int
    owners: tuple[tuple[Part, ...], ...]
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Return the number of bytes of the message of the elements that this rank owns."""
        return self.sizes[self.rank]

    @cached_property
    def numel(self) -> int:
        """Return the number of elements that this rank owns."""
        return sum(piece.numel for piece in self.pieces)

    @property
    def pieces(self) -> tuple[Part, ...]:
        """Return the pieces of the message of the elements that this rank owns."""
        return self.owners[self.rank]

    @cached_property
    def own(self) -> tuple[Segment, ...]:
        """Return the segments that this rank owns, in the order of its message."""
        return tuple(segment for piece in self.pieces for segment in piece.segments)

    @cached_property
    def outgoing_sizes(self) -> list[int]:
        """Return the sizes of the messages to all owners, of which this rank has none to itself."""
        return [size if owner != self.rank else 0 for owner, size in enumerate(self.sizes)]

    @cached_property
    def incoming_sizes(self) -> list[int]:
        """Return the sizes of the messages of all ranks about the elements that this rank owns."""
        return [self.size if source != self.rank else 0 for source in range(len(self.sizes))]

    @cached_property
    def outgoing(self) -> tuple[tuple[int, Batch], ...]:
        """Return (channel, batch) of the messages to other owners, which follow one another."""
        return self._batches(self.outgoing_sizes)

    @cached_property
    def gathered(self) -> tuple[tuple[int, Batch], ...]:
        """Return (channel, batch) of the messages of other owners among those of all owners."""
        return self._batches(self.sizes)

    @cached_property
    def gathered_own(self) -> tuple[tuple[int, Batch], ...]:
        """Return (channel, batch) of this rank's message among those of all owners."""
        return self._batches(self.sizes, own=True)

    @cached_property
    def place(self) -> slice:
        """Return the place of this rank's message among those of all owners."""
        begin = sum(self.sizes[: self.rank])
        return slice(begin, begin + self.size)

    def _batches(self, sizes: Sequence[int], own: bool = False) -> tuple[tuple[int, Batch], ...]:
        """Return (channel, batch) of the message of this rank if `own`, else of all others, in a buffer of `sizes`.

        A batch has the number of the first of its equal channels. Channel 0 equals no other.
        """
        known: dict[tuple[Channel, bool], int] = {}
        channels, parts = self.messages.channels, dict[int, list[Part]]()
        first_equal = [known.setdefault((channel, index == 0), index) for index, channel in enumerate(channels)]
        for pieces, start in zip(self.owners, accumulate(sizes, initial=0), strict=False):
            for piece in pieces:
                if (piece.owner == self.rank) == own:
                    moved = replace(piece, begin=start + piece.begin, end=start + piece.end)
                    parts.setdefault(first_equal[piece.channel], []).append(moved)
        return tuple((index, Batch(found, channels[index].codec.alignment)) for index, found in sorted(parts.items()))


def make_layouts(
    messages: Messages, parts: Sequence[Sequence[Segment]], rank: int, rounds: int = 1
) -> tuple[MessageLayout, ...]:
    """Return the message layouts for the segments of each owner, sent in their order, in `rounds` of near-equal size.

    The function is pure, so all ranks have the same pieces and sizes.
    """
    layouts = []
    for owned in zip(*(cut(part, rounds) for part in parts), strict=True):
        owners = tuple(_pieces(messages, owner, segments) for owner, segments in enumerate(owned))
        sizes = tuple(pieces[-1].end if pieces else 0 for pieces in owners)
        layouts.append(MessageLayout(messages, rank, owners, sizes))
    return tuple(layouts)


def _pieces(messages: Messages, owner: int, segments: Sequence[Segment]) -> tuple[Part, ...]:
    pieces: list[Part] = []
    begin = first = 0
    for index, channel in enumerate(messages.channels):
        chosen = tuple(one for one in segments if messages.channel_of.get(one.parameter, 0) == index)
        if not chosen:
            continue
        numel = sum(segment.numel for segment in chosen)
        end = begin + channel.codec.compressor.payload_bytes(numel)
        pieces.append(Part(chosen, numel, begin, end, owner, index, first))
        begin, first = end, first + numel
    return tuple(pieces)


@dataclass(frozen=True)
class Transfer:
    """Messages that a rank sends to reduce a bucket.

    It sends a part to every other owner and, if `everywhere`, its means to all of them.
    """

    layouts: tuple[MessageLayout, ...]
    everywhere: bool

    @property
    def channels(self) -> tuple[Channel, ...]:
        return self.layouts[0].messages.channels

    @property
    def bytes(self) -> int:
        """Return the number of bytes that leave the rank."""
        return self._length(range(len(self.channels)))

    @property
    def uncompressed_bytes(self) -> int:
        """Return the number of bytes that leave the rank uncompressed."""
        return self._length([index for index, channel in enumerate(self.channels) if channel.uncompressed])

    def _length(self, channels: Sequence[int]) -> int:
        rank, others = self.layouts[0].rank, len(self.layouts[0].owners) - 1
        return sum(
            (piece.end - piece.begin) * (others * self.everywhere if piece.owner == rank else 1)
            for piece in self._pieces()
            if piece.channel in channels
        )

    def uncompressed_names(self) -> set[str]:
        """Return the names of the uncompressed parameters."""
        pieces = (piece for piece in self._pieces() if self.channels[piece.channel].uncompressed)
        return {segment.parameter for piece in pieces for segment in piece.segments}

    def names(self) -> set[str]:
        return {segment.parameter for piece in self._pieces() for segment in piece.segments}

    def _pieces(self) -> Iterator[Part]:
        return (piece for layout in self.layouts for pieces in layout.owners for piece in pieces)
