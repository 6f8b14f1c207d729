"""Compressed exchange of tokens between ranks that share the experts of a layer.

`MoEAlltoAllTokenDispatcher` sends tokens to the experts by one method, and their results back by another one. Both look
the exchange up in their module, where it is replaced while one of them runs. Probabilities and counts of tokens stay
exact.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.hooks import CompiledCalls, TrainingPass
from deepspeed_compress.backends.activations.tokens import Leg, exchange_rows, is_smaller, make_leg
from deepspeed_compress.config import SECTION, ExpertActivations
from deepspeed_compress.monitor import Meter
from deepspeed_compress.session.patches import Patches, replaced

EXPERTS = f"/{SECTION}/activations/experts"
PARAMETERS = ("group", "input_", "output_split_sizes_", "input_split_sizes")
"""Parameters of the function `all_to_all` of Megatron's module, which exchanges rows."""
METHODS = ("token_dispatch", "token_combine")
"""Methods of a dispatcher that call it: on the way to the experts, and back."""


def find_dispatchers(chunks: Sequence[nn.Module]) -> list[Any]:
    """Return the dispatchers of the layers of `chunks` whose experts are spread over ranks."""
    layers = (module for chunk in chunks for module in chunk.modules() if isinstance(module, BaseMoELayer))
    return [layer.token_dispatcher for layer in layers if layer.ep_group.size() > 1]


def attach_experts(
    chunks: Sequence[nn.Module], settings: ExpertActivations, meter: Meter, patches: Patches
) -> list[CompiledCalls]:
    """Compress the exchanges of the experts of `chunks`, until `patches` are undone.

    Returns:
        What has to be called before each step of the optimizer.
    """
    legs = [None if one is None else make_leg(one.bits, meter) for one in (settings.dispatch, settings.combine)]
    compiled = [CompiledCalls(weakref.ref(chunk), EXPERTS, "exchanges") for chunk in chunks]
    for chunk, calls in zip(chunks, compiled, strict=True):
        training = TrainingPass(chunk)
        patches.on_undo(training.detach)
        for dispatcher in find_dispatchers([chunk]):
            for name, leg in zip(METHODS, legs, strict=True):
                if leg is not None:
                    way = _Way(getattr(dispatcher, name), leg, training, calls)
                    patches.replace(dispatcher, name, way)
    return compiled


@dataclass(frozen=True)
class _Way:
    """Method `original` of a dispatcher, with a compressed exchange in training."""

    original: Callable[..., Any]
    leg: Leg
    training: TrainingPass
    compiled: CompiledCalls

    def __call__(self, *args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            self.compiled.note()
            return self.original(*args, **options)
        if not self.training.is_training:
            return self.original(*args, **options)
        with replaced(token_dispatcher, all_to_all=partial(self._exchange, token_dispatcher.all_to_all)):
            return self.original(*args, **options)

    def _exchange(
        self,
        theirs: Callable[..., Tensor],
        group: ProcessGroup,
        input_: Tensor,
        output_split_sizes_: Sequence[int] | None = None,
        input_split_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """Exchange rows in place of Megatron's function `theirs`. Splits are equal if they are None."""
        if input_.dim() != 2 or not is_smaller(input_, self.leg.bits):
            return theirs(group, input_, output_split_sizes_, input_split_sizes)
        return exchange_rows(input_, self.leg, group, input_split_sizes, output_split_sizes_)
