"""Gradients of a shard whose optimizer is offloaded, before nodes have averaged them.

With `offload_optimizer`, DeepSpeed moves reduced gradients to the host while it reduces, and notes their norms and
whether one is not finite at the same time. These notes are of one node. After the nodes have averaged the gradients,
they are made anew from the means, so that all nodes clip and skip alike.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

from deepspeed_compress.backends.deepspeed.units import NodeUnit
from deepspeed_compress.backends.deepspeed.weights.master_weights import MasterSlice

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
    """

    def __init__(self, engine: Any, unit: NodeUnit) -> None:
        self._engine, self._optimizer, self._unit = engine, engine.optimizer, unit
        self._parameters = {name: parameter for parameter, name in engine.param_names.items()}
        self._used: list[MasterSlice] = []
        """Slices whose parameters some node uses in the running step."""

    def take(self, slices: Mapping[K, MasterSlice]) -> dict[K, Tensor]:
        """Return the gradients of `slices`, as flat views of DeepSpeed's buffers. Collective.

        A buffer keeps the gradient of an earlier step if this step does not use its parameter. If another node does
        use it, zeros count here.

        Returns:
            All gradients; none if no node has had a backward pass.
        """
        noted = [self._identity(one) in self._optimizer.norm_for_param_grads for one in slices.values()]
        somewhere = torch.tensor(noted, dtype=torch.uint8, device=self._engine.device)
        dist.all_reduce(somewhere, op=dist.ReduceOp.MAX, group=self._unit.peers)
        used = somewhere.bool().tolist()
        self._used = [one for one, is_used in zip(slices.values(), used, strict=True) if is_used]
        gradients = {key: _gradient(one) for key, one in slices.items()}
        for gradient, here, anywhere in zip(gradients.values(), noted, used, strict=True):
            if anywhere and not here:
                gradient.zero_()
        return gradients if self._used else {}

    def note_means(self) -> None:
        """Replace what DeepSpeed has noted about the gradients by the same about their means over the nodes."""
        for one in self._used:
            mean = _gradient(one)
            note = self._note_3 if isinstance(self._optimizer, DeepSpeedZeroOptimizer_Stage3) else self._note_12
            self._optimizer.norm_for_param_grads[self._identity(one)] = note(mean)

    def _identity(self, one: MasterSlice) -> int:
        return int(self._optimizer.get_param_id(self._parameters[one.parameter]))

    def _note_12(self, mean: Tensor) -> Tensor:
        """Note a mean as `set_norm_for_param_grad_in_gpu` does, and return its norm."""
        self._optimizer.update_offload_overflow_tracker(mean)
        norm: Tensor = mean.double().norm(2)
        return norm

    def _note_3(self, mean: Tensor) -> Tensor:
        """Note a mean as ZeRO 3 does in `has_overflow` and `partition_grads`, and return its norm."""
        tracker: Tensor = self._optimizer.inf_or_nan_tracker
        tracker.logical_or_(mean.isfinite().all().logical_not().to(tracker.device))
        norm: Tensor = self._optimizer._constant_buffered_norm2(mean)
        return norm


def _gradient(one: MasterSlice) -> Tensor:
    """Return the gradient of a slice, as a flat view of the buffer that DeepSpeed keeps for an offloaded optimizer."""
    assert one.home.grad is not None, "DeepSpeed allocates the gradients of offloaded optimizers with their states"
    return one.within(one.home.grad)
