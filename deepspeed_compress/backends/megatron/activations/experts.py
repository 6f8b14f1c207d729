"""Compressed exchange of tokens between ranks that share the experts of a layer.

`MoEAlltoAllTokenDispatcher` sends tokens to the experts by one method, and their results back by another one. Both look
the exchange up in their module, where it is replaced while one of them runs. Probabilities and counts of tokens stay
exact.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
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


def find_dispatchers(chunks: Sequence[nn.Module]) -> list[Any]:
    """Return the dispatchers of the layers of `chunks` whose experts are spread over ranks."""
    layers = (module for chunk in chunks for module in chunk.modules() if isinstance(module, BaseMoELayer))
    return [layer.token_dispatcher for layer in layers if layer.ep_group.size() > 1]


def attach_experts(
    chunks: Sequence[nn.Module], settings: ExpertActivations, meter: Meter, patches: Patches
) -> Iterator[Callable[[], None]]:
    """Compress the exchanges of the experts of `chunks`, until `patches` are undone.

    Yields:
        What has to be called before each step of the optimizer.
    """
    ways = {"token_dispatch": settings.dispatch, "token_combine": settings.combine}
    legs = {method: make_leg(way.bits, meter) for method, way in ways.items() if way is not None}
    for chunk in chunks:
        training, compiled = TrainingPass(chunk), CompiledCalls(weakref.ref(chunk), EXPERTS, "exchanges")
        patches.on_undo(training.detach)
        for dispatcher in find_dispatchers([chunk]):
            for method, leg in legs.items():
                patches.replace(dispatcher, method, _Way(getattr(dispatcher, method), leg, training, compiled))
        yield compiled.before_step


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
