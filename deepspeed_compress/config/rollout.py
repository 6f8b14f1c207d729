"""Settings of weight updates for rollout workers."""

from typing import Annotated, Literal

from pydantic import Field

from deepspeed_compress.config.methods import Model


class Rollout(Model):
    """Weights for rollout workers, which generate with the newest policy: exact changes, published after each step."""

    directory: Annotated[str, Field(min_length=1)]
    """Directory of the published versions, which all ranks and all rollout workers share, or the address of a server of
    such a store: "tcp://host:port"."""
    method: Literal["exact", "blockwise"] = "exact"
    """`exact`: receivers hold the weights bit for bit. `blockwise`: changes are rounded to `bits` per value if that is
    shorter, and what was lost is sent with the next version."""
    bits: Literal[8, 4] | None = None
    """Bits per value of the method `blockwise`; null for 8."""
    every: int = Field(default=1, ge=1)
    """Optimizer steps per version."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type of the published weights, to which those of training are cast."""
    full_every: int = Field(default=100, ge=1)
    """Number of versions per full copy. Receivers that start, or have missed much, begin with a full copy."""
    keep_full: int = Field(default=2, ge=1)
    """Number of full copies to keep. Everything before the oldest of them is deleted."""
    max_lag: int = Field(default=8, ge=0)
    """Number of versions by which rollouts may be behind, on average, before the doctor reports them. The program tells
    it how many they are (`engine.rollout.report_lag`)."""
    asynchronous: bool = True
    """Encode and write a version in a thread during the next step, so that training only waits for a copy of the
    weights; false waits until the version is complete."""

    @property
    def lossy_bits(self) -> Literal[8, 4] | None:
        """Return the bits per value of lossy changes; None for exact ones."""
        return None if self.method == "exact" else self.bits or 8
