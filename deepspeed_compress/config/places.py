"""Settings of methods by place (gradients, inside a node, weights), and the parts that each place builds from them."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue

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

if TYPE_CHECKING:
    from deepspeed_compress.compression.compressors import Compressor
    from deepspeed_compress.compression.feedback import Feedback
    from deepspeed_compress.compression.residuals import ResidualStores
    from deepspeed_compress.compression.transforms import Transform


class MemoryConfig(Model):
    """Values that a method keeps between steps: one for every gradient element that this rank sends."""

    dtype: Literal["fp32", "bf16", "int8"] = "bf16"
    """Type in which it is stored: 4, 2 or about 1 bytes an element."""
    device: Literal["accelerator", "cpu"] = "accelerator"
    """`cpu` keeps it in host memory and copies it message by message."""

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"


class ErrorFeedbackConfig(MemoryConfig):
    """Error feedback: keeps what compression dropped (the residual) and adds it to the next step's gradient."""

    decay: float = Field(default=1.0, gt=0, le=1)
    """Factor of the residual in the next step; below 1 it is forgotten by and by."""
    reset_interval: int | None = Field(default=None, ge=1)
    """Optimizer steps after which all residuals are set to zero; null never."""


NodeConfig = Annotated[
    methods.NoCompression
    | methods.CastConfig
    | methods.BlockwiseConfig
    | methods.LinearConfig
    | methods.PercentileConfig
    | methods.QSGDConfig
    | methods.FP8Config
    | methods.SignConfig,
    Field(discriminator="method"),
    BeforeValidator(with_default_method),
]


class Hierarchy(Model):
    """Reduction in two levels: first inside each node, then between nodes with the chosen method."""

    ranks_per_node: int = Field(ge=2)
    """Ranks of the job on each node, consecutive ones."""
    inside: NodeConfig = methods.NoCompression()
    """The method inside a node; it has error feedback as the other has."""


class CompressedGradients(Model):
    """Keys of every method that compresses gradients."""

    # strict=False: JSON has lists, not tuples.
    overrides: Annotated[tuple[Override, ...], Field(strict=False)] = ()
    """Parameters that are treated differently; the first match counts."""
    min_numel: int = Field(default=0, ge=0)
    """Parameters with fewer elements go uncompressed, in the same messages."""
    chunk_bytes: Annotated[int, Field(ge=65536)] | None = None
    """A bucket goes in pieces of this many bytes, so that one is compressed while another travels; null sends it
    whole."""

    @property
    @abstractmethod
    def residuals(self) -> MemoryConfig | None:
        """Return how residuals (with some methods, momenta) are stored; None if there are none."""

    def transform(self, widths: Mapping[str, int]) -> "Transform":
        """Return the change of basis before compression.

        `widths` has the row length of each matrix, by the name of its parameter.
        """
        from deepspeed_compress.compression.transforms import Identity

        return Identity()

    def gradient_feedback(self, stores: "ResidualStores") -> "Feedback":
        """Return the feedback of the sender of a gradient."""
        return self.residual_feedback(stores, "gradients")

    def residual_feedback(self, stores: "ResidualStores", name: str) -> "Feedback":
        """Return error feedback with residuals in the store `name`, or no feedback if it is switched off."""
        from deepspeed_compress.compression.feedback import ErrorFeedback, NoFeedback

        kept = self.residuals
        if kept is None:
            return NoFeedback()
        decay = kept.decay if isinstance(kept, ErrorFeedbackConfig) else 1.0
        return ErrorFeedback(stores.get(name, kept.dtype, kept.on_host), decay)


class LayeredGradients(CompressedGradients):
    """Methods that can reduce in two levels."""

    hierarchy: Hierarchy | None = None
    """Reduction in two levels; null reduces among all ranks at once."""


class FeedbackGradients(LayeredGradients):
    """Methods with error feedback."""

    error_feedback: ErrorFeedbackConfig | None = ErrorFeedbackConfig()
    """Error feedback; null switches it off."""
    rotation: RotationConfig | None = None
    """Change of basis before compression, undone once after the sum; null for none."""

    @property
    def residuals(self) -> MemoryConfig | None:
        return self.error_feedback

    def transform(self, widths: Mapping[str, int]) -> "Transform":
        return super().transform(widths) if self.rotation is None else self.rotation.transform(widths)


class NoneGradients(methods.NoCompression):
    """No compression: bit-identical to DeepSpeed alone."""


class CastGradients(FeedbackGradients, methods.CastConfig):
    """Gradients as 16-bit floating-point numbers."""


class BlockwiseGradients(FeedbackGradients, methods.BlockwiseConfig):
    """Gradients as 8-, 4-, 3- or 2-bit integers with one scale for each block."""


class LinearGradients(FeedbackGradients, methods.LinearConfig):
    """Gradients as integers between the minimum and the maximum of each block."""


class PercentileGradients(FeedbackGradients, methods.PercentileConfig):
    """Gradients as integers, the largest of each block clipped."""


class QSGDGradients(FeedbackGradients, methods.QSGDConfig):
    """Gradients as stochastic levels of the L2 norm of each block."""

    error_feedback: ErrorFeedbackConfig | None = None
    """Error feedback; null, the default of this unbiased method, has none."""


class FP8Gradients(FeedbackGradients, methods.FP8Config):
    """Gradients as 8-bit floating-point numbers with one scale for each block."""


class SignGradients(FeedbackGradients, methods.SignConfig):
    """Signs of the gradients; error feedback keeps the magnitudes."""


class TopKGradients(FeedbackGradients, methods.DensityWarmUp, methods.TopKConfig):
    """The largest gradients, and where they were; error feedback keeps the rest."""


class RandomKGradients(FeedbackGradients, methods.DensityWarmUp, methods.RandomKConfig):
    """Gradients at random places; error feedback keeps the rest."""


class BlockTopKGradients(FeedbackGradients, methods.DensityWarmUp, methods.BlockTopKConfig):
    """The largest groups of neighbouring gradients; error feedback keeps the rest."""


class DGCGradients(LayeredGradients, methods.DensityWarmUp, methods.LargestConfig):
    """Deep Gradient Compression: top-k of a momentum that each rank keeps. The optimizer must have none."""

    model_config = NAMED
    method: Literal["dgc"]
    """`dgc`: top-k with momentum correction and momentum factor masking."""
    density: Density = 0.001
    """Fraction of the values that is sent."""
    momentum: float = Field(default=0.9, gt=0, lt=1)
    """Momentum m of the local velocity u = m u + g."""
    nesterov: bool = False
    """Nesterov form: u = m (u + g), and u + g is accumulated."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """L2 norm to which the gradient of each parameter is clipped on each rank, before anything else; null never."""
    memory: MemoryConfig = MemoryConfig()
    """How velocity and accumulated velocity are stored."""

    @property
    def residuals(self) -> MemoryConfig | None:
        return self.memory

    def gradient_feedback(self, stores: "ResidualStores") -> "Feedback":
        from deepspeed_compress.compression.feedback import MomentumCorrection

        kept = (self.memory.dtype, self.memory.on_host)
        velocity, accumulated = stores.get("velocity", *kept), stores.get("gradients", *kept)
        return MomentumCorrection(velocity, accumulated, self.momentum, self.nesterov)


class DeMoGradients(LayeredGradients, methods.DensityWarmUp, methods.SparseConfig):
    """Decoupled momentum: the largest DCT coefficients of a momentum that each rank keeps.

    The optimizer must have none.
    """

    model_config = NAMED
    method: Literal["demo"]
    """`demo`: top-k of the discrete cosine transform of a local momentum."""
    momentum: float = Field(default=0.98, gt=0, lt=1)
    """Momentum m of m u + g, from which what was sent is subtracted."""
    tile: Tile = 64
    """Rows and columns of a tile of the transform, a power of two."""
    values: ValuesConfig | None = methods.BlockwiseConfig(bits=4)
    """How the coefficients sent are compressed in their turn; null sends them as fp32."""
    memory: MemoryConfig = MemoryConfig()
    """How the momentum is stored."""

    @property
    def residuals(self) -> MemoryConfig | None:
        return self.memory

    @property
    def choices(self) -> int:
        return self.tile**2

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import TopK

        return TopK(self.density_at(step), self.choices, self.values_compressor())

    def transform(self, widths: Mapping[str, int]) -> "Transform":
        return methods.DCTConfig(method="dct", tile=self.tile).transform(widths)

    def gradient_feedback(self, stores: "ResidualStores") -> "Feedback":
        from deepspeed_compress.compression.feedback import ErrorFeedback

        momentum = stores.get("gradients", self.memory.dtype, self.memory.on_host)
        return ErrorFeedback(momentum, self.momentum, own_exact=False)

    def bits_per_element(self) -> float:
        # Counted for whole tiles, into which most matrices are cut.
        return methods.largest_bits(self.choices, self.density, self.value_bits())


class PowerSGDGradients(CompressedGradients):
    """Low rank: two thin factors for the gradient of every matrix, found by one power iteration a step."""

    model_config = NAMED
    method: Literal["powersgd"]
    """`powersgd`: low-rank factors of gradient matrices."""
    rank: int = Field(default=4, ge=1, le=256)
    """Columns of each factor."""
    factors: ValuesConfig | None = None
    """How the factors are compressed in their turn; null sends them as fp32."""
    error_feedback: MemoryConfig | None = MemoryConfig()
    """Keeps what the factors do not say of the gradient; null switches it off."""

    @property
    def residuals(self) -> MemoryConfig | None:
        return self.error_feedback

    def softer(self) -> dict[str, JsonValue] | None:
        """Return the keys to change for a little less loss, as `MethodConfig.softer` does."""
        return {"rank": min(16, 4 * self.rank)} if self.rank < 16 else None

    def factor_compressor(self) -> "Compressor":
        """Return the compressor of the messages of factors."""
        from deepspeed_compress.compression.compressors import Cast

        return Cast() if self.factors is None else self.factors.compressor()


AnyCompressedGradients = (
    CastGradients
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
    | PowerSGDGradients
)
"""Settings of gradients with any method except "none"."""
GradientsConfig = Annotated[
    NoneGradients | AnyCompressedGradients,
    Field(discriminator="method"),
    BeforeValidator(with_default_method),
]


class CompressedWeights(methods.MethodConfig):
    """Keys of every method that compresses weights."""

    min_numel: int = Field(default=0, ge=0)
    """Parameters with fewer elements go uncompressed, in the same messages."""
    overlap: bool = False
    """Whether the next forward begins before all weights are here, with ZeRO 1 and 2 on CPU: modules wait for theirs.
    Not for programs that read parameters between a step and the next forward."""


class BlockwiseWeights(CompressedWeights, methods.BlockwiseConfig):
    """Weight differences as scaled integers."""

    bits: Literal[8, 4, 3, 2] = 4
    """Bits of each value sent."""


class SignWeights(CompressedWeights, methods.SignConfig):
    """Signs of weight differences, and the mean magnitude of each block."""


class TopKWeights(CompressedWeights, methods.TopKConfig):
    """The largest weight differences; the others wait."""


WeightsConfig = Annotated[
    methods.NoCompression | BlockwiseWeights | SignWeights | TopKWeights,
    Field(discriminator="method"),
    BeforeValidator(with_default_method),
]
