"""Settings of methods by place (gradients, inside a node, weights), and the parts that each place builds from them."""

from abc import abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue

from deepspeed_compress.config import methods, sparse_methods
from deepspeed_compress.config.methods import NAMED, Model, RotationConfig, Tile, ValuesConfig, with_default_method
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.sparse_methods import Density

if TYPE_CHECKING:
    from deepspeed_compress.compression.compressors import Compressor
    from deepspeed_compress.compression.feedback import Feedback
    from deepspeed_compress.compression.residual_stores import ResidualStores
    from deepspeed_compress.compression.transforms import Transform


class MemoryConfig(Model):
    """Storage of values that a method keeps between steps: one for every gradient element that this rank sends."""

    dtype: Literal["fp32", "bf16", "int8"] = "bf16"
    """Data type in which the values are stored: 4, 2 or 1.02 bytes per element."""
    device: Literal["accelerator", "cpu"] = "accelerator"
    """Device that stores the values. `cpu` keeps them in host memory and copies them message by message."""

    @property
    def on_host(self) -> bool:
        return self.device == "cpu"


class ErrorFeedbackConfig(MemoryConfig):
    """Error feedback: what compression dropped (the residual) is added to the next gradient of the same elements."""

    decay: float = Field(default=1.0, gt=0, le=1)
    """Factor by which the residual is multiplied before it is added. Values below 1 let it fade."""
    reset_interval: int | None = Field(default=None, ge=1)
    """Optimizer steps after which all residuals are set to zero; null never resets them."""


NodeConfig = Annotated[
    methods.NoCompression | methods.Quantizer, Field(discriminator="method"), BeforeValidator(with_default_method)
]


class Hierarchy(Model):
    """Reduction in two levels: first inside each node, then between nodes with the chosen method."""

    ranks_per_node: int = Field(ge=2)
    """Number of consecutive ranks of the job on each node."""
    inside: NodeConfig = methods.NoCompression()
    """Compression inside a node, for all compressed parameters, with the same error feedback as between nodes."""


class CompressedGradients(Model):
    """Keys of every method that compresses gradients."""

    # strict=False: JSON has lists, not tuples.
    overrides: Annotated[tuple[Override, ...], Field(strict=False)] = ()
    """Other settings for the parameters whose names match a pattern. The first override that matches applies."""
    min_numel: int = Field(default=0, ge=0)
    """Parameters with fewer elements are sent uncompressed, in the same messages; 0 compresses all."""
    chunk_bytes: Annotated[int, Field(ge=65536)] | None = None
    """Bytes of gradients per piece of a bucket, so that one piece is compressed while another is sent; null makes
    pieces of about a million elements for each rank, on GPUs 32 million."""

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
    """Reduction in two levels, inside nodes and between nodes; null reduces among all ranks at once."""


class FeedbackGradients(LayeredGradients):
    """Methods with error feedback."""

    error_feedback: ErrorFeedbackConfig | None = ErrorFeedbackConfig()
    """Error feedback; null switches it off, saves its memory, and loses what compression drops."""
    rotation: RotationConfig | None = None
    """Transform of gradients before compression, which is undone once on the sum. It does not apply to overrides or
    inside a node; null for none."""

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
    """Error feedback; null, the default, has none: the method is unbiased, and with few levels its error is too large
    to be fed back."""


class FP8Gradients(FeedbackGradients, methods.FP8Config):
    """Gradients as 8-bit floating-point numbers with one scale for each block."""


class SignGradients(FeedbackGradients, methods.SignConfig):
    """Signs of the gradients; error feedback keeps the magnitudes."""


class TopKGradients(FeedbackGradients, sparse_methods.DensityWarmUp, sparse_methods.TopKConfig):
    """The largest gradients and their indices; error feedback keeps the rest."""


class RandomKGradients(FeedbackGradients, sparse_methods.DensityWarmUp, sparse_methods.RandomKConfig):
    """Gradients at random positions; error feedback keeps the rest."""


class BlockTopKGradients(FeedbackGradients, sparse_methods.DensityWarmUp, sparse_methods.BlockTopKConfig):
    """The largest groups of neighboring gradients; error feedback keeps the rest."""


class DGCGradients(LayeredGradients, sparse_methods.DensityWarmUp, sparse_methods.LargestConfig):
    """Deep Gradient Compression: top-k of a momentum that each rank keeps. The optimizer must have none."""

    model_config = NAMED
    method: Literal["dgc"]
    """`dgc`: Deep Gradient Compression, the `topk` of a momentum that each rank keeps."""
    density: Density = 0.001
    """Fraction of the values that is sent, rounded up in each block."""
    momentum: float = Field(default=0.9, gt=0, lt=1)
    """Momentum m of the local velocity u = m u + g."""
    nesterov: bool = False
    """Use the Nesterov form: u = m (u + g), and u + g is accumulated."""
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    """L2 norm to which each rank clips the gradient of each parameter, without the loss scale, before anything else;
    null never clips."""
    memory: MemoryConfig = MemoryConfig()
    """Storage of the velocity and the accumulated velocity."""

    @property
    def residuals(self) -> MemoryConfig | None:
        return self.memory

    def gradient_feedback(self, stores: "ResidualStores") -> "Feedback":
        from deepspeed_compress.compression.feedback import MomentumCorrection

        kept = (self.memory.dtype, self.memory.on_host)
        velocity, accumulated = stores.get("velocity", *kept), stores.get("gradients", *kept)
        return MomentumCorrection(velocity, accumulated, self.momentum, self.nesterov)


class DeMoGradients(LayeredGradients, sparse_methods.DensityWarmUp, sparse_methods.SparseConfig):
    """Decoupled momentum: the largest DCT coefficients of a momentum that each rank keeps.

    The optimizer must have none.
    """

    model_config = NAMED
    method: Literal["demo"]
    """`demo`: decoupled momentum, the largest DCT coefficients of a momentum that each rank keeps."""
    momentum: float = Field(default=0.98, gt=0, lt=1)
    """Factor m of the momentum m u + g, from which each rank subtracts what it has sent."""
    tile: Tile = 64
    """Rows and columns of the tiles of a matrix that are transformed."""
    values: ValuesConfig | None = methods.BlockwiseConfig(bits=4)
    """Compression of the selected coefficients; null sends them as fp32."""
    memory: MemoryConfig = MemoryConfig()
    """Storage of the momentum."""

    @property
    def residuals(self) -> MemoryConfig | None:
        return self.memory

    def compressor(self, step: int | None = None) -> "Compressor":
        from deepspeed_compress.compression.compressors import TopK

        return TopK(self.density_at(step), self.tile**2, self.values_compressor())

    def transform(self, widths: Mapping[str, int]) -> "Transform":
        return methods.DCTConfig(method="dct", tile=self.tile).transform(widths)

    def gradient_feedback(self, stores: "ResidualStores") -> "Feedback":
        from deepspeed_compress.compression.feedback import ErrorFeedback

        momentum = stores.get("gradients", self.memory.dtype, self.memory.on_host)
        return ErrorFeedback(momentum, self.momentum, own_exact=False)

    def bits_per_element(self) -> float:
        # Counted for whole tiles, into which most matrices are cut.
        return sparse_methods.largest_bits(self.tile**2, self.density, self.value_bits())


class PowerSGDGradients(CompressedGradients):
    """Low rank: two thin factors for the gradient of every matrix, found by one power iteration per step."""

    model_config = NAMED
    method: Literal["powersgd"]
    """`powersgd`: low-rank factors of every gradient matrix; vectors are sent uncompressed."""
    rank: int = Field(default=4, ge=1, le=256)
    """Number of columns of each factor."""
    factors: ValuesConfig | None = None
    """Compression of the factors; null sends them as fp32."""
    error_feedback: MemoryConfig | None = MemoryConfig()
    """Storage of the residual: the part of the gradient that the factors do not represent, which is added to the next
    gradient; null switches error feedback off."""

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
    NoneGradients | AnyCompressedGradients, Field(discriminator="method"), BeforeValidator(with_default_method)
]


class CompressedWeights(methods.MethodConfig):
    """Keys of every method that compresses weights."""

    min_numel: int = Field(default=0, ge=0)
    """Parameters with fewer elements are sent uncompressed, in the same messages; 0 compresses all."""
    overlap: bool = False
    """Start the next forward pass before all weights have arrived; each module waits for its own. Only for ZeRO 1 and
    2, and not for programs that read parameters between a step and the next forward pass."""
    frozen: bool = False
    """Round frozen parameters too, where they are gathered (ZeRO 3 and FSDP2). Packed codes, and types other than those
    that are trained, travel exactly all the same."""


class BlockwiseWeights(CompressedWeights, methods.BlockwiseConfig):
    """Weight differences as scaled integers."""

    bits: Literal[8, 4, 3, 2] = 4
    """Bits per value."""


class SignWeights(CompressedWeights, methods.SignConfig):
    """Signs of weight differences, and the mean magnitude of each block."""


class TopKWeights(CompressedWeights, sparse_methods.TopKConfig):
    """The largest weight differences; the others wait."""


WeightsConfig = Annotated[
    methods.NoCompression | BlockwiseWeights | SignWeights | TopKWeights,
    Field(discriminator="method"),
    BeforeValidator(with_default_method),
]
