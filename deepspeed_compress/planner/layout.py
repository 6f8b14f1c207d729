"""A layout: how a job divides its model, its batch and its messages."""

from dataclasses import dataclass
from typing import Literal

Recompute = Literal["none", "full", "selective"]
Engine = Literal["deepspeed", "megatron"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a job over its ranks.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Pipeline stages.
        data: Replicas. The product of the three is the number of ranks.
        zero: ZeRO stage.
        micro: Sequences of a micro-batch.
        accumulation: Micro-batches of a step.
        recompute: Activations that are computed again in backward.
        virtual: Interleaved stages per rank (Megatron only).
        sequence_parallel: Whether norms are split over tensor ranks, too (Megatron only).
        shard_within: Replicas that ZeRO shards over, or 0 for all (hybrid sharding).
        gradient_bits: Bits of gradients between ranks, or 0 for uncompressed ones.
        weight_bits: Bits of gathered weights, or 0 for uncompressed ones.
        islands: Groups of replicas that train independently between exchanges.
        sync_every: Steps between exchanges of islands.
        engine: Program that can start it.
    """

    tensor: int
    pipeline: int
    data: int
    zero: int
    micro: int
    accumulation: int
    recompute: Recompute = "none"
    virtual: int = 1
    sequence_parallel: bool = False
    shard_within: int = 0
    gradient_bits: int = 0
    weight_bits: int = 0
    islands: int = 1
    sync_every: int = 1
    engine: Engine = "deepspeed"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.data * self.micro * self.accumulation

    @property
    def island_size(self) -> int:
        """Replicas of an island; all replicas without islands."""
        return self.data // self.islands

    @property
    def shards(self) -> int:
        """Replicas that ZeRO divides its states over."""
        return self.shard_within or self.island_size

    @property
    def compressed(self) -> bool:
        """True if any message is compressed."""
        return bool(self.gradient_bits or self.weight_bits or self.islands > 1)

    def __str__(self) -> str:
        parts = [f"zero{self.zero}", f"d{self.data}"]
        parts += [f"{letter}{size}" for letter, size in (("t", self.tensor), ("p", self.pipeline)) if size > 1]
        parts += [f"v{self.virtual}"] * (self.virtual > 1) + [f"node{self.shard_within}"] * bool(self.shard_within)
        parts += [f"b{self.micro}x{self.accumulation}"] + [self.recompute] * (self.recompute != "none")
        parts += [f"g{self.gradient_bits}"] * bool(self.gradient_bits) + [f"w{self.weight_bits}"] * bool(
            self.weight_bits
        )
        parts += [f"i{self.islands}every{self.sync_every}"] * (self.islands > 1)
        return "-".join(parts + ["megatron"] * (self.engine == "megatron"))
