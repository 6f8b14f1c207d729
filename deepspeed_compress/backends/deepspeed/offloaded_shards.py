"""Gradients of a shard whose optimizer is offloaded, before nodes have averaged them.

With `offload_optimizer`, DeepSpeed moves reduced gradients to the host while it reduces, and notes their norms and
whether one is not finite at the same time. These notes are of one node. After the nodes have averaged the gradients,
norms are noted anew from the means, and nodes agree on whether to skip the step, so that all of them clip and skip
alike.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.backends.deepspeed.units import NodeUnit
from deepspeed_compress.backends.deepspeed.weights.master_weights import MasterSlice
from deepspeed_compress.session.patches import Patches

SEAMS = (
    Seam("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.has_overflow", ("self", "partition_gradients")),
    Seam("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3.has_overflow"),
)
"""DeepSpeed functions replaced here. The ZeRO 3 one is wrapped for profiling, so only its presence can be checked."""

K = TypeVar("K")


def offloads_optimizer(engine: Any) -> bool:
    """Return True if the optimizer states of `engine` are in host memory."""
    optimizer = engine.optimizer
    three = isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3)
    return bool(optimizer.offload_optimizer if three else optimizer.cpu_offload)


class OffloadedGradients:
    """Gradients of this rank's shard in host memory.

    Args:
        engine: an engine with `offload_optimizer`.
        unit: this rank's node.
        patches: restores DeepSpeed's check for overflows.
    """

    def __init__(self, engine: Any, unit: NodeUnit, patches: Patches) -> None:
        self._engine, self._optimizer, self._unit = engine, engine.optimizer, unit
        self._parameters = {name: parameter for parameter, name in engine.param_names.items()}
        self._used: list[MasterSlice] = []
        """Slices whose parameters some node uses in the running step."""
        self._finite = True
        """True if the means of the running step are finite."""
        patches.wrap(self._optimizer, "has_overflow", self._has_overflow)

    def take(self, slices: Mapping[K, MasterSlice]) -> dict[K, Tensor]:
        """Return the gradients of `slices`, as flat views of DeepSpeed's buffers. Collective.

        A buffer keeps the gradient of an earlier step if this step does not use its parameter. If another node does
        use it, zeros count here. If no node does, a copy is returned, because DeepSpeed steps what the buffer has.

        Returns:
            All gradients; none if no node has had a backward pass.
        """
        noted = [self._identity(one) in self._optimizer.norm_for_param_grads for one in slices.values()]
        used = self._on_any_node(noted)
        self._used = [one for one, is_used in zip(slices.values(), used, strict=True) if is_used]
        gradients: dict[K, Tensor] = {}
        for (key, one), here, anywhere in zip(slices.items(), noted, used, strict=True):
            gradient = _gradient(one)
            if anywhere and not here:
                gradient.zero_()
            gradients[key] = gradient if anywhere else gradient.clone()
        return gradients if self._used else {}

    def note_means(self) -> None:
        """Replace the norms that DeepSpeed has noted by those of the means over the nodes."""
        norms = {self._identity(one): _gradient(one).double().norm(2) for one in self._used}
        self._optimizer.norm_for_param_grads.update(norms)
        self._finite = all(norm.isfinite() for norm in norms.values())

    def _has_overflow(self, original: Callable[..., bool], *args: Any, **options: Any) -> bool:
        """Return True if any node skips the step. Collective.

        DeepSpeed also finds overflows that are in no mean: those of gradients that the program has given up.
        """
        return any(self._on_any_node([original(*args, **options) or not self._finite]))

    def _on_any_node(self, found: list[bool]) -> list[bool]:
        """Return for each of `found` whether it is True on a rank of equal place in any node. Collective."""
        anywhere = torch.tensor(found, dtype=torch.uint8, device=self._engine.device)
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=self._unit.peers)
        return [bool(one) for one in anywhere.tolist()]

    def _identity(self, one: MasterSlice) -> int:
        return int(self._optimizer.get_param_id(self._parameters[one.parameter]))


def _gradient(one: MasterSlice) -> Tensor:
    """Return the gradient of a slice, as a flat view of the buffer that DeepSpeed keeps for an offloaded optimizer."""
    assert one.home.grad is not None, "DeepSpeed allocates the gradients of offloaded optimizers with their states"
    return one.within(one.home.grad)
