"""Where methods are used (gradients, inside a node, weights), and what each place adds."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from deepspeed_compress.config import methods
from deepspeed_compress.config.methods import (
    NAMED,
    Density,
    Model,
    RotationConfig,
    Tile,
    ValuesConfig,
    with_default_method,
)
from deepspeed_compress.config.overrides import Override


class Memory(Model):
    """What a method remembers between steps, an element for every gradient that this rank sends."""

    dtype: Literal["fp32", "bf16", "int8"] = "bf16"
    """Type in which it is stored: 4, 2 or about 1 bytes an element."""
    device: Literal["accelerator", "cpu"] = "accelerator"
    """`cpu` keeps it in host memory and copies it message by message."""


class ErrorFeedback(Memory):
    """Keeps what compression dropped (the residual) and adds it to the next step's gradient."""

    decay: float = Field(default=1.0, gt=0, le=1)
    """Factor of the residual in the next step; below 1 it is forgotten by and by."""
    reset_interval: int | None = Field(default=None, ge=1)
    """Optimizer steps after which all residuals are set to zero; null never."""


NodeConfig = Annotated[
    methods.NoCompression
    | methods.Cast
    | methods.Blockwise
    | methods.Linear
    | methods.Percentile
    | methods.QSGD
    | methods.FP8
    | methods.Sign,
    Field(discriminator="method"),
    BeforeValidator(with_default_method),
]


class Hierarchy(Model):
    """Reduction in two levels: first inside each node, then between nodes with the chosen method."""

    ranks_per_node: int = Field(ge=2)
    """Ranks of the job on each node, consecutive ones."""
    inside: NodeConfig = methods.NoCompression()
    """The method inside a node; it has error feedback as the other has."""


class _Messages(Model):
    # strict=False: JSON has lists, not tuples.
    overrides: Annotated[tuple[Override, ...], Field(strict=False)] = ()
    """Parameters that are treated differently; the first match counts."""
    min_numel: int = Field(default=0, ge=0)
    """Parameters with fewer elements go uncompressed, in the same messages."""
    chunk_bytes: Annotated[int, Field(ge=65536)] | None = None
    """A bucket goes in pieces of this many bytes, so that one is compressed while another travels; null sends it
    whole."""


class _Layered(_Messages):
    hierarchy: Hierarchy | None = None
    """Reduction in two levels; null reduces among all ranks at once."""


class _Feedback(_Layered):
    error_feedback: ErrorFeedback | None = ErrorFeedback()
    """Error feedback; null switches it off."""
    rotation: RotationConfig | None = None
    """Change of basis before compression, undone once after the sum; null for none."""


class NoneGradients(methods.NoCompression):
    """No compression: bit-identical to DeepSpeed alone."""


class CastGradients(_Feedback, methods.Cast):
    """Gradients as 16-bit floating-point numbers."""


class BlockwiseGradients(_Feedback, methods.Blockwise):
    """Gradients as 8-, 4- or 2-bit integers with one scale for each block."""


class LinearGradients(_Feedback, methods.Linear):
    """Gradients as integers between the minimum and the maximum of each block."""


class PercentileGradients(_Feedback, methods.Percentile):
    """Gradients as integers, the largest of each block clipped."""


class QSGDGradients(_Feedback, methods.QSGD):
    """Gradients as stochastic levels of the L2 norm of each block."""

    error_feedback: ErrorFeedback | None = None
    """Error feedback; null, the default of this unbiased method, has none."""


class FP8Gradients(_Feedback, methods.FP8):
    """Gradients as 8-bit floating-point numbers with one scale for each block."""


class SignGradients(_Feedback, methods.Sign):
    """Signs of the gradients; error feedback keeps the magnitudes."""


class TopKGradients(_Feedback, methods.DensityWarmUp, methods.TopK):
    """The largest gradients, and where they were; error feedback keeps the rest."""


class RandomKGradients(_Feedback, methods.DensityWarmUp, methods.RandomK):
    """Gradients at random places; error feedback keeps the rest."""


class BlockTopKGradients(_Feedback, methods.DensityWarmUp, methods.BlockTopK):
    """The largest groups of neighbouring gradients; error feedback keeps the rest."""


class DGCGradients(_Layered, methods.DensityWarmUp, methods.TopK):
    """Deep Gradient Compression: top-k of a momentum that each rank keeps. The optimizer must have none."""

    model_config = NAMED
    method: Literal["dgc"]  # type: ignore[assignment]
    """`dgc`: top-k with momentum correction and momentum factor masking."""
    density: Density = 0.001
    """Fraction of the values that is sent."""
    momentum: float = Field(default=0.9, gt=0, lt=1)
    """Momentum m of the local velocity u = m u + g."""
    nesterov: bool = False
    """Nesterov form: u = m (u + g), and u + g is accumulated."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """L2 norm to which the gradient of each parameter is clipped on each rank, before anything else; null never."""
    memory: Memory = Memory()
    """How velocity and accumulated velocity are stored."""


class DeMoGradients(_Layered, methods.DensityWarmUp, methods.Sparse):
    """Decoupled momentum: the largest DCT coefficients of a momentum that each rank keeps. The optimizer must have
    none."""

    model_config = NAMED
    method: Literal["demo"]
    """`demo`: top-k of the discrete cosine transform of a local momentum."""
    momentum: float = Field(default=0.98, gt=0, lt=1)
    """Momentum m of m u + g, from which what was sent is subtracted."""
    tile: Tile = 64
    """Rows and columns of a tile of the transform, a power of two."""
    values: ValuesConfig | None = methods.Blockwise(bits=4)
    """How the coefficients sent are compressed in their turn; null sends them as fp32."""
    memory: Memory = Memory()
    """How the momentum is stored."""


class PowerSGDGradients(_Messages):
    """Low rank: two thin factors for the gradient of every matrix, found by one power iteration a step."""

    model_config = NAMED
    method: Literal["powersgd"]
    """`powersgd`: low-rank factors of gradient matrices."""
    rank: int = Field(default=4, ge=1, le=256)
    """Columns of each factor."""
    factors: ValuesConfig | None = None
    """How the factors are compressed in their turn; null sends them as fp32."""
    error_feedback: Memory | None = Memory()
    """Keeps what the factors do not say of the gradient; null switches it off."""


GradientsConfig = Annotated[
    NoneGradients
    | CastGradients
    | BlockwiseGradients
    | LinearGradients
    | PercentileGradients
    | QSGDGradients
    | FP8Gradients
    | SignGradients
    | TopKGradients
    | RandomKGradients
    | BlockTopKGradients
    | DGCGradients
    | DeMoGradients
    | PowerSGDGradients,
    Field(discriminator="method"),
    BeforeValidator(with_default_method),
]


class _Weights(Model):
    min_numel: int = Field(default=0, ge=0)
    """Parameters with fewer elements go uncompressed, in the same messages."""


class BlockwiseWeights(_Weights, methods.Blockwise):
    """Weight differences as scaled integers."""

    bits: Literal[8, 4, 2] = 4
    """Bits of each value sent."""


class SignWeights(_Weights, methods.Sign):
    """Signs of weight differences, and the mean magnitude of each block."""


class TopKWeights(_Weights, methods.TopK):
    """The largest weight differences; the others wait."""


WeightsConfig = Annotated[
    methods.NoCompression | BlockwiseWeights | SignWeights | TopKWeights,
    Field(discriminator="method"),
    BeforeValidator(with_default_method),
]
