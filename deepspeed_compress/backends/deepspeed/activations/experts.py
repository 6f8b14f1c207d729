"""Compressed exchange of tokens between ranks that share the experts of a layer.

A forward pass of such a layer exchanges twice: tokens on their way to the experts (dispatch), and results on their way
back (combine). DeepSpeed's layers look their autograd function for that up in their module, where it is replaced while
the forward pass of a layer runs. Counts of tokens do not pass through this function, and stay exact.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.hooks import CompiledCalls, LayerHooks, TrainingPass
from deepspeed_compress.backends.activations.tokens import Leg, exchange_rows, is_smaller, make_leg
from deepspeed_compress.backends.deepspeed.activations.attached import Attached, detach_with_engine, forbid_compiling
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.backends.deepspeed.versions import expert_exchanges
from deepspeed_compress.config import ExpertActivations
from deepspeed_compress.monitor import Meter
from deepspeed_compress.session.patches import Patches, replaced

_AUTO_EP = "deepspeed.module_inject.auto_ep_layer:"
SEAMS = (
    Seam("deepspeed.moe.sharded_moe:MOELayer.forward", "self input kwargs"),
    Seam("deepspeed.moe.sharded_moe:_AllToAll.forward", "ctx group input"),
    Seam(_AUTO_EP + "AutoEPMoELayer.forward", "self hidden_states", since="0.19.2"),
    Seam(_AUTO_EP + "_AllToAllV.forward", "ctx group x input_splits output_splits", since="0.19.2"),
)


def find_expert_layers(engine: Any) -> list[Any]:
    """Return the layers of `engine` whose experts are spread over ranks."""
    if not engine.has_moe_layers:
        return []
    known = expert_exchanges()
    return [one for one in engine.module.modules() if type(one).forward in known and one.ep_size > 1]


def attach_experts(engine: Any, settings: ExpertActivations, meter: Meter, patches: Patches) -> None:
    """Take over the exchanges of layers of experts until the engine is destroyed, collected, or detached from."""
    hooks: list[Attached] = []
    detach_with_engine(engine, hooks, patches)
    compiled = forbid_compiling(engine, "/deepspeed_compress/activations/experts", "exchanges", patches)
    training = TrainingPass(engine.module)
    hooks.append(training)
    legs = [None if leg is None else make_leg(leg.bits, meter) for leg in (settings.dispatch, settings.combine)]
    for layer in find_expert_layers(engine):
        hooks.append(_ExpertHooks(layer, legs, training, compiled))


class _Exchanges:
    """Stand-in for DeepSpeed's autograd function during one forward pass of a layer."""

    def __init__(self, theirs: Any, legs: Sequence[Leg | None]) -> None:
        self._theirs, self._legs = theirs, list(legs)

    def apply(self, group: ProcessGroup, x: Tensor, *splits: Sequence[int]) -> Tensor:
        """Exchange `x`, the tokens that are next on their way.

        Args:
            group: ranks that share the experts.
            x: [experts, capacity, width] without `splits`, else [tokens, width].
            splits: tokens sent to, and received from, each rank; equal numbers of experts if absent.
        """
        leg = self._legs.pop(0)
        if leg is None or not is_smaller(x, leg.bits):
            exact: Tensor = self._theirs.apply(group, x, *splits)
            return exact
        found = exchange_rows(x.reshape(-1, x.shape[-1]), leg, group, *splits)
        return found if splits else found.view(x.shape)


class _ExpertHooks(LayerHooks):
    """Hooks around the forward pass of one layer of experts, which replace its exchanges in training.

    `legs` are dispatch and combine. None is exact.
    """

    def __init__(self, layer: Any, legs: Sequence[Leg | None], training: TrainingPass, compiled: CompiledCalls) -> None:
        super().__init__(layer, {}, compiled)
        self._legs, self._training = legs, training
        self._module, self._name = expert_exchanges()[type(layer).forward]
        self._theirs = getattr(self._module, self._name)
        self._call = ExitStack()
        """Replacement of the function while the forward pass of the layer runs."""
        self.attach(layer)

    def takes(self, layer: Any, inputs: tuple[Any, ...]) -> bool:
        """Return True: outside of training, what an interrupted call of another layer has left must not be used."""
        return True

    def replaced(self, inputs: tuple[Any, ...]) -> None:
        ours = _Exchanges(self._theirs, self._legs) if self._training.is_training else self._theirs
        self._call.enter_context(replaced(self._module, **{self._name: ours}))

    def _restore(self) -> None:
        super()._restore()
        self._call.close()
