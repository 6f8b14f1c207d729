"""Weights of ZeRO 1 and 2 that are on their way while the next forward begins, on CPU.

The optimizer's `step` sends them and returns. Before a module runs its own weights must have arrived, and before
anybody else who can be seen reads or writes weights all must have: state dicts, checkpoints, exact weights, the next
`step`, `offload_states`, `destroy`, `detach`. To wait needs no other rank: what is waited for has been sent.

A program that reads `parameter.data` between `step` and forward cannot be seen, nor can a module that computes with
weights of another one which has not been called yet. So this is only done when asked for, and a module waits for all
below it unless it holds lists of modules, which are what models call layer by layer: attention that takes the matrix of
its output layer without calling it finds it.
"""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn

from deepspeed_compress.communication.gather import DifferenceGather, PendingWeights
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import Patches

__all__ = ["ArrivingWeights"]

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_Needs = tuple[tuple[int, int], ...]
"""(parameter group, last round): what must have arrived."""


class ArrivingWeights:
    """The weights of one engine, from the end of a step until they are needed.

    `gathers`: those of the parameter groups. Raises UnsupportedError where waiting module by module is not sound.
    """

    def __init__(self, engine: Any, gathers: Iterable[DifferenceGather], patches: Patches) -> None:
        _check(engine)
        self._module: nn.Module = engine.module
        self._under_way: dict[int, PendingWeights] = {}
        rounds = {
            name: (group, last) for group, gather in enumerate(gathers) for name, last in gather.last_rounds().items()
        }
        for module in engine.module.modules():
            needs = _needs(module, engine.param_names, rounds)
            for handle in self._hooks(module, needs):
                patches.on_undo(handle.remove)
        for owner, name in (
            (engine, "offload_states"),
            (engine, "destroy"),
            (engine.optimizer, "refresh_fp32_params"),
        ):
            patches.precede(owner, name, self.finish)
        patches.on_undo(self.finish)

    def begin(self, buffers: Iterable[tuple[int, DifferenceGather, Tensor, Tensor]]) -> None:
        """Send (group, gather, held weights, masters). Small groups first: they are biases and norms, all through the
        model, and would wait for all matrices."""
        tag = 0
        for group, gather, held, master in sorted(buffers, key=lambda one: (one[2].numel(), one[0])):
            self._under_way[group] = gather.begin(held, master, tag)
            tag += gather.rounds

    def finish(self) -> None:
        """Until all weights are here."""
        for pending in self._under_way.values():
            pending.finish()
        self._under_way.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ArrivingWeights":
        """A module is copied with its hooks, and the copy has all weights, also those that were copied before them."""
        self.finish()
        for parameter in self._module.parameters():
            if id(parameter) in memo:
                memo[id(parameter)].data.copy_(parameter.data)
        return self

    def _hooks(self, module: nn.Module, needs: _Needs) -> Iterator[Any]:
        if needs:
            yield module.register_forward_pre_hook(partial(self._before_forward, needs), prepend=True)
        yield module.register_state_dict_pre_hook(self._before_state)  # type: ignore[no-untyped-call]
        yield module.register_load_state_dict_pre_hook(self._before_state)  # type: ignore[no-untyped-call]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _before_forward(self, needs: _Needs, module: nn.Module, inputs: Any) -> None:
        if self._under_way:
            for group, last in needs:
                self._under_way[group].wait_for(last)

    def _before_state(self, *_: Any) -> None:
        self.finish()


def _needs(module: nn.Module, names: Mapping[Tensor, str], rounds: Mapping[str, tuple[int, int]]) -> _Needs:
    layered = any(isinstance(part, _LISTS) for part in module.modules())
    found: dict[int, int] = {}
    for parameter in module.parameters(recurse=not layered):
        # What is frozen is in no optimizer, and sent by nobody.
        if parameter in names and names[parameter] in rounds:
            group, last = rounds[names[parameter]]
            found[group] = max(last, found.get(group, 0))
    return tuple(found.items())


def _check(engine: Any) -> None:
    reasons = (
        (isinstance(engine, PipelineEngine), "a pipeline, whose tied layers compute without being called"),
        (torch.device(engine.device).type != "cpu", "a GPU, where it has not been shown which stream waits for which"),
    )
    for applies, why in reasons:
        if applies:
            raise UnsupportedError(f"/deepspeed_compress/weights/overlap: true cannot be right with {why}; write false")
