"""Frozen models of the section. The text under each field is its description in the JSON Schema."""

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, JsonValue

SECTION = "deepspeed_compress"
DEFAULT_METHOD = "blockwise"


class _Model(BaseModel):
    # strict: "8", 8.0 and true are not 8, so a file means the same to every program that reads it.
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, validate_default=True
    )


def _power_of_two(value: int) -> int:
    if value.bit_count() != 1:
        raise ValueError("not a power of two")
    return value


def _regex(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


def _with_default_method(value: object) -> object:
    return {"method": DEFAULT_METHOD, **value} if isinstance(value, dict) else value


# Only the default method may be left out; in the JSON Schema the other variants demand it.
_NAMED = ConfigDict(json_schema_extra={"required": ["method"]})


def _block_size(low: int) -> Any:
    """A field for a power of two from `low` to 65536, spelled out in the schema."""
    sizes: list[JsonValue] = [1 << n for n in range(low.bit_length() - 1, 17)]
    return Field(ge=low, le=65536, json_schema_extra={"enum": sizes})


class Parallelism(_Model):
    """How the ranks are divided. Expands into DeepSpeed's own keys, with which it must agree."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """ZeRO stage, written to `zero_optimization.stage`. Left out or null: DeepSpeed's own setting holds."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that share each layer, written to `tensor_parallel.autotp_size`."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages. More than 1 needs ZeRO stage 0 or 1."""


class ErrorFeedback(_Model):
    """Keeps what compression dropped (the residual) and adds it to the next step's gradient."""

    dtype: Literal["fp32", "bf16"] = "bf16"
    """Type in which the residual is stored; bf16 takes half the memory of fp32."""


class Override(_Model):
    """Another treatment for the parameters whose name a pattern matches."""

    parameters: Annotated[
        str,
        Field(min_length=1, examples=["embed|norm|bias"], json_schema_extra={"format": "regex"}),
        AfterValidator(_regex),
    ]
    """Python regular expression, searched for anywhere in the parameter's name."""
    method: Literal["none"]
    """What these parameters get: `none` sends them uncompressed."""


class _Feedback(_Model):
    error_feedback: ErrorFeedback | None = ErrorFeedback()
    """Error feedback; null switches it off."""
    # strict=False: JSON has lists, not tuples.
    overrides: Annotated[tuple[Override, ...], Field(strict=False)] = ()
    """Parameters that are treated differently; the first match counts."""


class _Cast(_Model):
    model_config = _NAMED
    method: Literal["bf16", "fp16"]
    """`bf16` or `fp16`: send 16-bit floating-point numbers."""


class _Blockwise(_Model):
    method: Literal["blockwise"] = "blockwise"
    """`blockwise`: integers, scaled by the largest magnitude of each block."""
    bits: Literal[8, 4] = 8
    """Bits of each value sent."""
    block_size: Annotated[int, _block_size(32), AfterValidator(_power_of_two)] = 256
    """Values that share one scale, a power of two."""
    rounding: Literal["nearest", "stochastic"] = "nearest"
    """`stochastic` is unbiased, repeatable by `seed`, and slower."""


class CastValues(_Cast):
    """Kept values of top-k as 16-bit floating-point numbers."""


class BlockwiseValues(_Blockwise):
    """Kept values of top-k as scaled integers."""


ValuesConfig = Annotated[
    CastValues | BlockwiseValues, Field(discriminator="method"), BeforeValidator(_with_default_method)
]


class NoneConfig(_Model):
    """No compression: bit-identical to DeepSpeed alone."""

    model_config = _NAMED
    method: Literal["none"] = "none"
    """`none`: send gradients as DeepSpeed does."""


class CastConfig(_Feedback, _Cast):
    """Gradients as 16-bit floating-point numbers."""


class BlockwiseConfig(_Feedback, _Blockwise):
    """Gradients as 8- or 4-bit integers with one scale for each block."""


class TopKConfig(_Feedback):
    """The largest gradients of each block, and where they were; error feedback keeps the rest."""

    model_config = _NAMED
    method: Literal["topk"] = "topk"
    """`topk`: send the same number of largest magnitudes from every block."""
    density: float = Field(default=0.01, gt=0, le=1)
    """Fraction of the values that is sent."""
    block_size: Annotated[int, _block_size(64), AfterValidator(_power_of_two)] = 4096
    """Values from which the largest are chosen, a power of two."""
    values: ValuesConfig | None = None
    """How the values sent are compressed in their turn; null sends them as fp32."""


GradientsConfig = Annotated[
    NoneConfig | CastConfig | BlockwiseConfig | TopKConfig,
    Field(discriminator="method"),
    BeforeValidator(_with_default_method),
]


class Schedule(_Model):
    """What changes over the steps of training."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the start that are sent uncompressed."""


class Monitor(_Model):
    """What is measured, how often, and where it is written."""

    every: int = Field(default=1, ge=1)
    """Optimizer steps between measurements."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Directory for `compression.jsonl`; null writes no file."""
    cosine_every: int = Field(default=0, ge=0)
    """Optimizer steps between comparisons with the true mean gradient, each of which costs one uncompressed
    all-reduce of a bucket; 0 makes none."""


class Lint(_Model):
    """Read by the linter alone; training ignores it."""

    ignore: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of lint rules that do not apply to this file."""


class CompressConfig(_Model):
    """Compressed communication for DeepSpeed. Every key has a default: `{}` is 8-bit blockwise gradients
    with error feedback."""

    parallelism: Parallelism | None = None
    """Degrees of parallelism; null leaves them to DeepSpeed's own keys."""
    gradients: GradientsConfig = BlockwiseConfig()
    """How gradients are compressed, chosen by `method` (`blockwise` when left out)."""
    schedule: Schedule = Schedule()
    """How compression changes over the steps of training."""
    monitor: Monitor = Monitor()
    """Statistics of what was sent."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Key of the random numbers of stochastic rounding."""
    lint: Lint = Lint()
    """Settings of the linter."""
