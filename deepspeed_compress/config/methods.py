"""Settings of every method, wherever it is used. The text under a field is its description in the JSON Schema."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

DEFAULT_METHOD = "blockwise"


class Model(BaseModel):
    # strict: "8", 8.0 and true are not 8, so a file means the same to every program that reads it.
    # defer_build: a program that never uses a model does not wait for it.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, validate_default=True, defer_build=True)


def _demand_method(schema: dict[str, Any]) -> None:
    schema["required"] = ["method", *(key for key in schema.get("required", ()) if key != "method")]


# Only the default method may be left out; in the JSON Schema the other variants demand it.
NAMED = ConfigDict(json_schema_extra=_demand_method)


def _power_of_two(value: int) -> int:
    if value.bit_count() != 1:
        raise ValueError("not a power of two")
    return value


def _powers(low: int, high: int) -> Any:
    """A field for a power of two from `low` to `high`, spelled out in the schema."""
    sizes: list[JsonValue] = [1 << n for n in range(low.bit_length() - 1, high.bit_length())]
    return Field(ge=low, le=high, json_schema_extra={"enum": sizes})


QuantizationBlock = Annotated[int, _powers(32, 65536), AfterValidator(_power_of_two)]
SelectionBlock = Annotated[int, _powers(64, 65536), AfterValidator(_power_of_two)]
Group = Annotated[int, _powers(8, 1024), AfterValidator(_power_of_two)]
Tile = Annotated[int, _powers(16, 256), AfterValidator(_power_of_two)]
Density = Annotated[float, Field(gt=0, le=1)]
ScaleDtype = Literal["fp32", "bf16", "fp16"]
Rounding = Literal["nearest", "stochastic"]


def with_default_method(value: object) -> object:
    """A union's value with the default method where none is written."""
    return {"method": DEFAULT_METHOD, **value} if isinstance(value, dict) else value


class NoCompression(Model):
    """No compression."""

    model_config = NAMED
    method: Literal["none"] = "none"
    """`none`: uncompressed."""


class Cast(Model):
    """16-bit floating-point numbers."""

    model_config = NAMED
    method: Literal["bf16", "fp16"]
    """`bf16` or `fp16`: 16-bit floating-point numbers."""


class Blockwise(Model):
    """Integers with one scale for each block."""

    method: Literal["blockwise"] = "blockwise"
    """`blockwise`: integers, scaled by the largest magnitude of each block."""
    bits: Literal[8, 4, 2] = 8
    """Bits of each value sent."""
    block_size: QuantizationBlock = 256
    """Values that share one scale, a power of two."""
    rounding: Rounding = "nearest"
    """`stochastic` is unbiased, repeatable by `seed`, and slower."""
    scale_dtype: ScaleDtype = "fp32"
    """Type in which scales are sent."""


class Linear(Model):
    """Integers between the least and the greatest value of each block."""

    model_config = NAMED
    method: Literal["linear", "stochastic_linear"]
    """`linear` rounds to the nearest level between minimum and maximum, `stochastic_linear` without bias."""
    bits: Literal[8, 4, 2] = 8
    """Bits of each value sent."""
    block_size: QuantizationBlock = 256
    """Values that share a minimum and a maximum, a power of two."""
    scale_dtype: ScaleDtype = "fp32"
    """Type in which minimum and range are sent."""


class Percentile(Model):
    """Integers, scaled by a percentile of the magnitudes of each block; larger values are clipped."""

    model_config = NAMED
    method: Literal["percentile"]
    """`percentile`: integers; the few largest values of a block are clipped."""
    bits: Literal[8, 4, 2] = 4
    """Bits of each value sent."""
    block_size: QuantizationBlock = 256
    """Values that share one scale, a power of two."""
    percentile: float = Field(default=99.0, gt=0, le=100)
    """Percentage of the magnitudes of a block that are not clipped."""
    rounding: Rounding = "nearest"
    """`stochastic` is unbiased within the clipping range."""


class QSGD(Model):
    """Unbiased levels of the L2 norm of each block."""

    model_config = NAMED
    method: Literal["qsgd"]
    """`qsgd`: stochastic levels of the block's L2 norm."""
    levels: int = Field(default=7, ge=1, le=127)
    """Levels s above zero: 1, 3, 7, 15 ... fill 2, 3, 4, 5 ... bits with the sign."""
    block_size: QuantizationBlock = 256
    """Values that share one norm, a power of two."""


class FP8(Model):
    """8-bit floating-point numbers with one scale for each block."""

    model_config = NAMED
    method: Literal["fp8_e4m3", "fp8_e5m2"]
    """`fp8_e4m3` (3 bits of mantissa) or `fp8_e5m2` (wider range)."""
    block_size: QuantizationBlock = 256
    """Values that share one scale, a power of two."""


class Sign(Model):
    """One bit a value, and the mean magnitude of each block."""

    model_config = NAMED
    method: Literal["sign"]
    """`sign`: signs, and the mean magnitude of each block."""
    block_size: QuantizationBlock = 256
    """Values that share one mean magnitude, a power of two."""


ValuesConfig = Annotated[
    Cast | Blockwise | Linear | Percentile | QSGD | FP8 | Sign,
    Field(discriminator="method"),
    BeforeValidator(with_default_method),
]
"""How the values that a sparsifier keeps are compressed in their turn."""


class Sparse(Model):
    """Some of the values, chosen anew for every message."""

    density: Density = 0.01
    """Fraction of the values that is sent."""
    values: ValuesConfig | None = None
    """How the values sent are compressed in their turn; null sends them as fp32."""


class DensityWarmUp(Model):
    """A density that begins high."""

    density_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the density falls from 25 % to `density`, by factors of 4 or less."""


class TopK(Sparse):
    """The largest magnitudes, and where they were."""

    model_config = NAMED
    method: Literal["topk"]
    """`topk`: the largest magnitudes."""
    block_size: SelectionBlock = 4096
    """Values from which the largest are chosen, a power of two; read by `scope` `block` alone."""
    scope: Literal["block", "tensor", "threshold"] = "block"
    """`block`: the same number from every block; `tensor`: the largest of a whole message; `threshold`: nearly these,
    found faster by a threshold from a sample."""
    min_magnitude: float = Field(default=0.0, ge=0)
    """Values of smaller magnitude are sent as zeros; under fp16 it is compared with loss-scaled values."""


class RandomK(Sparse):
    """Values at random places that all ranks draw alike, so that no index is sent."""

    model_config = NAMED
    method: Literal["randomk"]
    """`randomk`: values at random places."""
    block_size: SelectionBlock = 4096
    """Values from which the same number is drawn each time, a power of two."""
    rescale: bool = False
    """Multiply by 1 / density, which makes it unbiased; for use without error feedback."""


class BlockTopK(Sparse):
    """Whole groups of neighbours, those of the largest L2 norm."""

    model_config = NAMED
    method: Literal["block_topk"]
    """`block_topk`: the groups of neighbours with the largest L2 norm."""
    block_size: SelectionBlock = 65536
    """Values from which the groups are chosen, a power of two."""
    group: Group = 32
    """Neighbouring values that are sent together, a power of two up to `block_size`."""


class Hadamard(Model):
    """Randomized Walsh-Hadamard transform of blocks."""

    model_config = NAMED
    method: Literal["hadamard"]
    """`hadamard`: spreads large values over their block."""
    block_size: SelectionBlock = 1024
    """Values of a block, a power of two."""


class DCT(Model):
    """Discrete cosine transform of square tiles of matrices."""

    model_config = NAMED
    method: Literal["dct"]
    """`dct`: concentrates smooth patterns in few values."""
    tile: Tile = 64
    """Rows and columns of a tile, a power of two."""


RotationConfig = Annotated[Hadamard | DCT, Field(discriminator="method")]
