"""Builds the communication of weights for the settings in force."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.exchange import Link
from deepspeed_compress.collectives.gather import EXACT, DifferenceGather
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.parameters import Parameters, is_plain
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Cast
from deepspeed_compress.config import SECTION, CompressedWeights
from deepspeed_compress.errors import CompressWarning

LEVEL = 3
"""Level of the reducer of gathered weights (see `Messages`). Lower levels belong to gradients."""


_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def find_rounded(
    settings: CompressedWeights, trained: Mapping[str, Tensor], frozen: Mapping[str, Tensor]
) -> frozenset[str]:
    """Return the names of the parameters that are rounded when they are gathered: numbers that are trained, or named.

    Packed codes, which frozen parameters may hold in any dtype, are data and not numbers. So frozen parameters are
    rounded only on request, and those that are known to be packed, or have a dtype that nothing trains, never.

    Args:
        settings: the settings of weights, which name frozen parameters by `frozen`.
        trained: the parameters that the optimizer trains, by name.
        frozen: all others.
    """
    candidates = {**(frozen if settings.frozen else {}), **trained}
    dtypes = {parameter.dtype for parameter in trained.values()}.intersection(_NUMBERS)
    return frozenset(
        name for name, candidate in candidates.items() if candidate.dtype in dtypes and is_plain(candidate)
    )


@dataclass(frozen=True)
class WeightReduction:
    """Builder of the communication of weights for given `settings`."""

    settings: CompressedWeights
    parameters: Parameters
    run: Run

    def difference_gather(
        self, group: ProcessGroup, sizes: Sequence[tuple[str, int]], dtype: torch.dtype
    ) -> DifferenceGather:
        """Return the gather of one flat buffer of weights.

        Parameters are sent in the order of the model, which is roughly that of the forward pass.

        Args:
            group: ranks that share the weights.
            sizes: (name, numel) of the parameters in the order of the buffer.
            dtype: dtype of the buffer.
        """
        raw = self.parameters.uncompressed(self.settings.min_numel)
        channels = (Channel(Codec(Cast(dtype)), uncompressed=True), Channel(Codec(self.settings.compressor())))
        channel_of = {name: EXACT if name in raw else 1 for name, _ in sizes}
        order = {name: place for place, name in enumerate(self.parameters.shapes)}
        return DifferenceGather(group, sizes, Messages(channels, channel_of), self.run, order=order)

    def rounding_reducer(self, group: ProcessGroup, dtype: torch.dtype) -> PayloadReducer:
        """Return a reducer that gathers rounded weights over `group`, without feedback.

        Weights that are not rounded are sent in `dtype`. Every parameter has its own channel, although all channels are
        equal, so that its blocks, and therefore its rounding, do not depend on which parameters are gathered together.
        """
        raw = self.parameters.uncompressed(self.settings.min_numel)
        place = {name: index for index, name in enumerate(self.parameters.shapes, 1)}
        rounded = [Channel(Codec(self.settings.compressor()))] * len(place)
        channels = (Channel(Codec(Cast(dtype)), uncompressed=True), *rounded)
        channel_of = {name: index for name, index in place.items() if name not in raw}
        messages = Messages(channels, channel_of, LEVEL)
        return PayloadReducer(Link(group), messages, self.run, traffic="bytes_weights")


def warn_without_frozen(weights: WeightReduction, rounded: frozenset[str]) -> None:
    """Emit a CompressWarning if `frozen` is set, and none of the parameters `rounded` is frozen."""
    frozen = weights.parameters.frozen
    if weights.settings.frozen and rounded.isdisjoint(frozen):
        text = (
            f"/{SECTION}/weights/frozen: true has no effect, because none of the {len(frozen)} frozen parameters holds "
            "plain numbers of a type that is trained, and is not persistent (allowed: false); remove the key"
        )
        warnings.warn(text, CompressWarning, stacklevel=2)


def warn_of_evaluation() -> None:
    """Emit a CompressWarning, on the first rank, that weights are exact, because training is in evaluation mode."""
    if dist.get_rank() == 0:
        text = (
            f"/{SECTION}/weights has no effect, because gradients are reduced while the model is in evaluation mode, "
            "in which weights are gathered exactly; call train() on it before the forward pass, or remove the key"
        )
        warnings.warn(text, CompressWarning, stacklevel=2)
