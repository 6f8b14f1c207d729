"""Layers that AutoTP splits, and hooks that take over the sum of one of them."""

import weakref
from typing import Any

import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed_compress.backends.deepspeed.versions import column_forwards, row_forwards


def is_column(layer: nn.Module) -> bool:
    """Return True if `layer` is column-parallel: its input is whole, and its output stays split. Heads are excluded."""
    head = getattr(layer, "is_vocab_parallel_lm_head", False) or getattr(layer, "gather_output", False)
    return type(layer).forward in column_forwards() and not head and _is_split(layer)


def is_row(layer: nn.Module) -> bool:
    """Return True if `layer` is row-parallel: its input is split, and its output is summed. Heads are excluded."""
    return type(layer).forward in row_forwards() and _is_split(layer)


def _is_split(layer: Any) -> bool:
    return bool(layer.mp_group is not None and layer.tp_world_size > 1)


class LayerHooks:
    """Hooks around the forward pass of one layer, which take over its sum.

    Meanwhile the layer has no group. DeepSpeed then computes what this rank has, and sums nothing. Copies of the layer
    carry the same hooks, which ignore every layer but their own, so a copy sums as DeepSpeed does.
    """

    def __init__(self, layer: Any) -> None:
        self._layer, self._group = weakref.ref(layer), layer.mp_group
        self._runs = False
        self._handles: list[RemovableHandle] = []

    def detach(self) -> None:
        """Remove the hooks."""
        layer = self._layer()
        if self._runs and layer is not None:
            self.restore(layer)
        while self._handles:
            self._handles.pop().remove()

    def _may_begin(self, layer: Any) -> bool:
        """Return True if the hooks may take over this call of `layer`.

        They leave calls to DeepSpeed that are traced, or in which it sums by other means than in each layer. Hooks of
        another engine may have taken over already.
        """
        if not self._is_own(layer):
            return False
        if self._runs:  # an interrupt has ended the last call before its hook
            self.restore(layer)
        elsewhere = getattr(layer, "defer_collectives_to_compiler", False) or TensorParallel_Layer.tp_overlap_comm
        return layer.mp_group is self._group and not elsewhere and not torch.compiler.is_compiling()

    def _begin(self, layer: Any) -> None:
        self._runs, layer.mp_group = True, None

    def _ran(self, layer: Any) -> bool:
        """Return True if the hooks have taken over the call of `layer` that ends now."""
        return self._runs and self._is_own(layer)

    def _is_own(self, layer: Any) -> bool:
        return self._layer() is layer

    def restore(self, layer: Any) -> None:
        """Give the layer its group again."""
        self._runs, layer.mp_group = False, self._group

    def __deepcopy__(self, memo: Any) -> "LayerHooks":
        return self
