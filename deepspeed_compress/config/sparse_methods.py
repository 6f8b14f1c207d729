"""Settings of the sparsifiers, which send a fraction of the values."""

import math
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field, JsonValue

from deepspeed_compress.config import methods

if TYPE_CHECKING:
    from deepspeed_compress.compression.compressors import Compressor

LONG_MESSAGE = 2**20
"""Elements of the message for which `bits_per_element` is computed."""
Density = Annotated[float, Field(gt=0, le=1)]
Group = Annotated[int, methods.powers(8, 1024), AfterValidator(methods.power_of_two)]


class SparseConfig(methods.MethodConfig):
    """A fraction of the values, selected again for every message."""

    density: Density = 0.01
    """Fraction of the values that is sent, rounded up in each block."""
    values: methods.ValuesConfig | None = None
    """Compression of the selected values; null sends them as fp32."""

    def density_at(self, step: int | None) -> float:
        """Return the density of optimizer step `step` (0-based); None means after all warm-ups."""
        return self.density

    def values_compressor(self) -> "Compressor":
        """Return the compressor of the values that are sent."""
        from deepspeed_compress.compression.compressors import Cast

        return Cast() if self.values is None else self.values.compressor()

    def value_bits(self) -> float:
        """Return the bits of a value that is sent, without its index."""
        return methods.SCALE_BITS["fp32"] if self.values is None else self.values.bits_per_element()

    def softer(self) -> dict[str, JsonValue] | None:
        # Four times the density, up to a quarter; beyond that, indices cost more than they save.
        return {"density": min(0.25, 4 * self.density)} if self.density < 0.25 else None


class DensityWarmUp(SparseConfig):
    """Density that starts high."""

    density_warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the density falls to `density`, a quarter of them each at 25 %, 6.25 %, 1.56 % and
    0.39 %, but never below `density`. Counted from step 0, including uncompressed steps; 0 starts with `density`."""

    def density_at(self, step: int | None) -> float:
        """Return 25 %, 6.25 %, 1.56 % ... in stages of a quarter of the warm-up, never below `density`.

        Deep Gradient Compression (arXiv:1712.01887, section 3.3) reduces it by the same factor each epoch.
        """
        if step is None or step >= self.density_warmup_steps:
            return self.density
        stage = 4 * step // self.density_warmup_steps
        return max(self.density, 0.25 ** (stage + 1))


class LargestConfig(SparseConfig):
    """The largest magnitudes and their indices, under any method name."""

    block_size: methods.SelectionBlock = 4096
    """Number of values from which the largest are selected. An index takes log2 of it in bits. Only `scope` `block`
    uses it."""
    scope: Literal["block", "tensor", "threshold"] = "block"
    """Values among which the largest are selected: `block` takes the same number from every block, `tensor` the
    largest of a whole message, and `threshold` the same elements as `tensor`, found faster in long messages by
    sampling."""
    min_magnitude: float = Field(default=0.0, ge=0)
    """Smallest magnitude that is sent; smaller values are sent as zeros, and the size of the message stays. With fp16
    it is compared with loss-scaled values."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import TopK

        return TopK(self.density_at(step), self.block_size, self.values_compressor(), self.scope, self.min_magnitude)

    def bits_per_element(self) -> float:
        width = self.block_size if self.scope == "block" else LONG_MESSAGE
        return largest_bits(width, self.density, self.value_bits())


class TopKConfig(LargestConfig):
    """The largest magnitudes and their indices."""

    model_config = methods.NAMED
    method: Literal["topk"]
    """`topk`: the largest magnitudes, and their indices."""


class RandomKConfig(SparseConfig):
    """Values at random positions that all ranks draw alike, so that no index is sent."""

    model_config = methods.NAMED
    method: Literal["randomk"]
    """`randomk`: values at random positions that all ranks draw alike, so that no indices are sent."""
    block_size: methods.SelectionBlock = 4096
    """Number of values from which the same number is drawn each time."""
    rescale: bool = False
    """Multiply by 1 / density, which makes the method unbiased. Only for use without error feedback."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import RandomK

        return RandomK(self.density_at(step), self.block_size, self.values_compressor(), self.rescale)

    def bits_per_element(self) -> float:
        return kept_of(self.block_size, self.density) / self.block_size * self.value_bits()


class BlockTopKConfig(SparseConfig):
    """Groups of neighboring values with the largest L2 norm."""

    model_config = methods.NAMED
    method: Literal["block_topk"]
    """`block_topk`: the groups of neighboring values with the largest L2 norm."""
    block_size: methods.SelectionBlock = 65536
    """Number of values from which groups are selected."""
    group: Group = 32
    """Number of neighboring values that are sent or dropped together, at most `block_size`."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import BlockTopK

        return BlockTopK(self.density_at(step), self.block_size, self.group, self.values_compressor())

    def bits_per_element(self) -> float:
        groups = self.block_size // self.group
        return largest_bits(groups, self.density, self.value_bits() * self.group) / self.group


def largest_bits(width: int, density: float, value_bits: float) -> float:
    """Return the bits per element if the largest of each `width` are sent, with an index and `value_bits` each."""
    return kept_of(width, density) / width * (value_bits + (width - 1).bit_length())


def kept_of(width: int, density: float) -> int:
    """Return how many elements of a block of `width` are kept.

    The slack cancels errors of binary fractions: 0.07 * 100 keeps 7, not 8.
    """
    return min(width, max(1, math.ceil(density * width - 1e-9)))
