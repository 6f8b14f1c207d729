"""Settings of casts, quantizers and transforms, which are the same in every place, and the parts that they build.

The text under a field is its description in the JSON Schema. To add a method, define its settings here, or in
`sparse_methods`, with a `compressor` that makes its messages. Compressors are imported when one is first requested, so
that configurations can be read without torch.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

if TYPE_CHECKING:
    from deepspeed_compress.compression.compressors import Compressor
    from deepspeed_compress.compression.transforms import Transform

DEFAULT_METHOD = "blockwise"
SCALE_BITS: Mapping[str, int] = {"fp32": 32, "bf16": 16, "fp16": 16}
"""Bits of a scale, or of a value that is sent unchanged."""


class Model(BaseModel):
    """Base class of all settings: immutable, strict about types, and without unknown keys."""

    # strict: "8", 8.0 and true are not 8, so a file means the same to every program that reads it.
    # defer_build: a program does not spend time on models that it never uses.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, defer_build=True)


def _require_method(schema: dict[str, Any]) -> None:
    schema["required"] = ["method", *(key for key in schema.get("required", ()) if key != "method")]


# Only the default method may be left out; the JSON Schema requires the key in all other variants.
NAMED = ConfigDict(json_schema_extra=_require_method)


def power_of_two(value: int) -> int:
    """Return `value` if it is a power of two.

    Raises:
        ValueError: it is not.
    """
    if value.bit_count() != 1:
        raise ValueError("not a power of two")
    return value


def powers(low: int, high: int) -> Any:
    """Return a field for a power of two from `low` to `high`, enumerated in the schema."""
    sizes: list[JsonValue] = [1 << n for n in range(low.bit_length() - 1, high.bit_length())]
    return Field(ge=low, le=high, json_schema_extra={"enum": sizes})


QuantizationBlock = Annotated[int, powers(32, 65536), AfterValidator(power_of_two)]
SelectionBlock = Annotated[int, powers(64, 65536), AfterValidator(power_of_two)]
Tile = Annotated[int, powers(16, 256), AfterValidator(power_of_two)]
ScaleDtype = Literal["fp32", "bf16", "fp16"]
Rounding = Literal["nearest", "stochastic"]


def with_default_method(value: object) -> object:
    """Return the value of a union, with the default method if none is written."""
    return {"method": DEFAULT_METHOD, **value} if isinstance(value, dict) else value


class MethodConfig(Model):
    """Settings of a method that makes messages."""

    @abstractmethod
    def compressor(self, step: int | None = None) -> "Compressor":
        """Return the compressor of optimizer step `step` (0-based); None means after all warm-ups."""

    @abstractmethod
    def bits_per_element(self) -> float:
        """Return the bits per element of a long message, after all warm-ups."""

    def softer(self) -> dict[str, JsonValue] | None:
        """Return the keys to change for a little less loss, such as {"bits": 8}.

        None means that only no compression is softer.
        """
        return None


class NoCompression(Model):
    """No compression."""

    model_config = NAMED
    method: Literal["none"] = "none"
    """`none`: no compression."""


class CastConfig(MethodConfig):
    """16-bit floating-point numbers."""

    model_config = NAMED
    method: Literal["bf16", "fp16"]
    """`bf16` or `fp16`: 16-bit floats, rounded to nearest even; `fp16` clips finite values at 65504."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import DTYPES, Cast

        return Cast(DTYPES[self.method])

    def bits_per_element(self) -> float:
        return 16


class BlockwiseConfig(MethodConfig):
    """Integers with one scale for each block."""

    method: Literal["blockwise"] = "blockwise"
    """`blockwise`: integers, scaled by the largest magnitude of each block."""
    bits: Literal[8, 4, 3, 2] = 8
    """Bits per value."""
    block_size: QuantizationBlock = 256
    """Number of values that share one scale. Smaller blocks are more accurate and send more scales."""
    rounding: Rounding = "nearest"
    """Rounding to the integer grid: `nearest`, or `stochastic`, which is unbiased, reproducible (see `seed`) and
    slower."""
    scale_dtype: ScaleDtype = "fp32"
    """Data type of the scales in a message. Unbiased rounding needs `fp32`."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import DTYPES, Blockwise

        return Blockwise(self.bits, self.block_size, self.rounding == "stochastic", DTYPES[self.scale_dtype])

    def bits_per_element(self) -> float:
        return self.bits + SCALE_BITS[self.scale_dtype] / self.block_size

    def softer(self) -> dict[str, JsonValue] | None:
        return {"bits": 4 if self.bits < 4 else 8} if self.bits < 8 else None


class LinearConfig(MethodConfig):
    """Integers between the least and the greatest value of each block."""

    model_config = NAMED
    method: Literal["linear", "stochastic_linear"]
    """`linear` or `stochastic_linear`: integers between the minimum and the maximum of each block, rounded to nearest
    or, with `stochastic_linear`, at random without bias."""
    bits: Literal[8, 4, 2] = 8
    """Bits per value."""
    block_size: QuantizationBlock = 256
    """Number of values that share a minimum and a maximum. Smaller blocks are more accurate and send more of them."""
    scale_dtype: ScaleDtype = "fp32"
    """Data type of the minimum and the range in a message. Unbiased rounding needs `fp32`."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import DTYPES, Linear

        return Linear(self.bits, self.block_size, self.method == "stochastic_linear", DTYPES[self.scale_dtype])

    def bits_per_element(self) -> float:
        return self.bits + 2 * SCALE_BITS[self.scale_dtype] / self.block_size

    def softer(self) -> dict[str, JsonValue] | None:
        return {"bits": 2 * self.bits} if self.bits < 8 else None


class PercentileConfig(MethodConfig):
    """Integers, scaled by a percentile of the magnitudes of each block; larger values are clipped."""

    model_config = NAMED
    method: Literal["percentile"]
    """`percentile`: integers; the largest magnitudes of each block are clipped."""
    bits: Literal[8, 4, 2] = 4
    """Bits per value."""
    block_size: QuantizationBlock = 256
    """Number of values that share one scale. Smaller blocks are more accurate and send more scales."""
    percentile: float = Field(default=99.0, gt=0, le=100)
    """Percentage of the magnitudes of a block that are not clipped."""
    rounding: Rounding = "nearest"
    """Rounding to the integer grid: `nearest`, or `stochastic`, which is unbiased within the clipping range,
    reproducible (see `seed`) and slower."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import Percentile

        return Percentile(self.bits, self.block_size, self.percentile, self.rounding == "stochastic")

    def bits_per_element(self) -> float:
        return self.bits + SCALE_BITS["fp32"] / self.block_size

    def softer(self) -> dict[str, JsonValue] | None:
        return {"bits": 2 * self.bits} if self.bits < 8 else None


class QSGDConfig(MethodConfig):
    """Unbiased levels of the L2 norm of each block."""

    model_config = NAMED
    method: Literal["qsgd"]
    """`qsgd`: random levels of the L2 norm of each block, without bias."""
    levels: int = Field(default=7, ge=1, le=127)
    """Number of levels above zero. With the sign, 1, 3, 7 and 15 levels fill 2, 3, 4 and 5 bits."""
    block_size: QuantizationBlock = 256
    """Number of values that share one norm. Smaller blocks are more accurate and send more norms."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import QSGD

        return QSGD(self.levels, self.block_size)

    def bits_per_element(self) -> float:
        return self.levels.bit_length() + 1 + SCALE_BITS["fp32"] / self.block_size

    def softer(self) -> dict[str, JsonValue] | None:
        return {"levels": 127} if self.levels < 127 else None


class FP8Config(MethodConfig):
    """8-bit floating-point numbers with one scale for each block."""

    model_config = NAMED
    method: Literal["fp8_e4m3", "fp8_e5m2"]
    """`fp8_e4m3` or `fp8_e5m2`: 8-bit floats with one scale per block; e4m3 has a longer mantissa, e5m2 a wider
    range."""
    block_size: QuantizationBlock = 256
    """Number of values that share one scale. Smaller blocks are more accurate and send more scales."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import FP8

        return FP8(self.method.removeprefix("fp8_"), self.block_size)

    def bits_per_element(self) -> float:
        return 8 + SCALE_BITS["fp32"] / self.block_size


class SignConfig(MethodConfig):
    """One bit per value, and the mean magnitude of each block."""

    model_config = NAMED
    method: Literal["sign"]
    """`sign`: signs, and the mean magnitude of each block."""
    block_size: QuantizationBlock = 256
    """Number of values that share one mean magnitude. Smaller blocks are more accurate and send more magnitudes."""
    levels: Literal[2, 3] = 2
    """2 sends signs; 3 adds zero for values below half of the mean magnitude, and packs five values into a byte."""
    scale_dtype: ScaleDtype = "fp32"
    """Data type of the magnitudes in a message."""

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import DTYPES, Sign

        return Sign(self.block_size, self.levels, DTYPES[self.scale_dtype])

    def bits_per_element(self) -> float:
        codes = self.block_size if self.levels == 2 else 8 * -(-self.block_size // 5)
        return (codes + SCALE_BITS[self.scale_dtype]) / self.block_size

    def softer(self) -> dict[str, JsonValue] | None:
        return {"method": "blockwise", "bits": 4}


Quantizer = CastConfig | BlockwiseConfig | LinearConfig | PercentileConfig | QSGDConfig | FP8Config | SignConfig
ValuesConfig = Annotated[Quantizer, Field(discriminator="method"), BeforeValidator(with_default_method)]
"""Settings of the compression of the values that a sparsifier keeps."""


class HadamardConfig(Model):
    """Randomized Walsh-Hadamard transform of blocks."""

    model_config = NAMED
    method: Literal["hadamard"]
    """`hadamard`: random signs, then a Walsh-Hadamard transform, which spreads large values over their block; helps
    quantizers."""
    block_size: SelectionBlock = 1024
    """Number of values that are transformed together."""

    def transform(self, widths: Mapping[str, int]) -> "Transform":
        """Return the change of basis; `widths` has the row length of each matrix, by the name of its parameter."""
        from deepspeed_compress.compression.transforms import Hadamard

        return Hadamard(self.block_size)


class DCTConfig(Model):
    """Discrete cosine transform of square tiles of matrices."""

    model_config = NAMED
    method: Literal["dct"]
    """`dct`: a discrete cosine transform, which concentrates smooth patterns in few values; helps sparsifiers."""
    tile: Tile = 64
    """Rows and columns of a tile of a matrix that is transformed."""

    def transform(self, widths: Mapping[str, int]) -> "Transform":
        """Return the change of basis; `widths` has the row length of each matrix, by the name of its parameter."""
        from deepspeed_compress.compression.transforms import DCT

        return DCT(widths, self.tile)


RotationConfig = Annotated[HadamardConfig | DCTConfig, Field(discriminator="method")]
