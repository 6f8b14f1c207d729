"""Settings of what tensor, pipeline, expert and sequence parallelism send: activations and their gradients."""

from typing import Literal

from deepspeed_compress.config.methods import Model


class TensorActivations(Model):
    """Sums of activations and of their gradients over the ranks that share a layer, during training."""

    merge: bool = True
    """Sum the gradient of a tensor once if several layers of a module read it: query, key and value, or gate and up.
    This changes nothing but the order of an addition."""
    bits: Literal[8, 4] | None = None
    """Bits per element of these sums; null sends them uncompressed. Sums over the vocabulary stay uncompressed."""
    backward_bits: Literal[8, 4] | None = None
    """Bits per element of the sums of the backward pass; null takes `bits`. Gradients need more bits than outputs."""

    @property
    def bits_of_gradients(self) -> int | None:
        """Return the bits per element of the sums of the backward pass; None if they stay uncompressed."""
        return self.bits if self.backward_bits is None else self.backward_bits


class PipelineActivations(Model):
    """Activations and their gradients between pipeline stages, during training."""

    bits: Literal[8, 4] = 8
    """Bits per element of the first tensor that a stage passes on, and of its gradient. Other tensors, such as masks,
    stay uncompressed."""


class Dispatch(Model):
    """Exchange of tokens on their way to the experts."""

    bits: Literal[8, 4] = 8
    """Bits per element of these tokens in the forward pass, and of their gradients in the backward pass."""


class Combine(Model):
    """Exchange of what the experts return."""

    bits: Literal[8, 4] = 8
    """Bits per element of these results in the forward pass, and of their gradients in the backward pass."""


class ExpertActivations(Model):
    """Exchanges of tokens between ranks that share the experts of a layer, during training. Counts stay exact."""

    dispatch: Dispatch | None = None
    """Tokens on their way to the experts, and their gradients; null sends them uncompressed."""
    combine: Combine | None = None
    """Results of the experts on their way back, and their gradients; null sends them uncompressed."""


class SequenceActivations(Model):
    """Queries, keys, values and outputs of attention between sequence-parallel ranks (Ulysses), during training."""

    bits: Literal[8, 4] = 8
    """Bits per element of these tensors and of their gradients. Positions stay uncompressed."""


class Activations(Model):
    """Compression of what ranks with different parts of the model send to each other."""

    tensor: TensorActivations | None = None
    """Sums between tensor-parallel ranks; null leaves them to the engine."""
    pipeline: PipelineActivations | None = None
    """Messages between pipeline stages; null leaves them to the engine."""
    experts: ExpertActivations | None = None
    """Exchanges between ranks that share experts; null leaves them to the engine."""
    sequence: SequenceActivations | None = None
    """All-to-alls between sequence-parallel ranks; null leaves them to the engine."""
