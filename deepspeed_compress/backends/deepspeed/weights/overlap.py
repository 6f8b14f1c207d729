"""Overlap of the weight gather of ZeRO 1 and 2 with the next forward.

The optimizer's `step` sends the weights and returns. A module's own weights must arrive before it runs. All weights
must arrive before anything else that can be intercepted reads or writes them: state dicts, checkpoints, exact weights,
the next `step`, `offload_states`, `destroy`, `detach`. Waiting requires no action of other ranks, because everything
awaited has already been sent. On a GPU, the current stream waits, and the host does not.

A module waits for its own weights and those of its submodules. A module that contains lists of modules waits only for
its own, because models call those layer by layer. A weight may also be read without a call of the module that owns it:
entries of `nn.ParameterList`, which is never called (PEFT adapters), or `F.linear(x, self.child.weight)`. While the
model's forward runs, `_Reads` therefore inspects the arguments of every torch function, and waits for each weight that
it finds. All weights are awaited when forward ends, or if a part of the model is called outside the model's forward.

A program that reads a weight between `step` and forward, without calling a module first, cannot be detected. The
overlap is therefore opt-in.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deepspeed_compress.backends.activations.hooks import is_compiled
from deepspeed_compress.collectives.gather import DifferenceGather, PendingWeights
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import Patches

_LISTS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_Needs = tuple[tuple[int, int], ...]
"""(parameter group, last round) pairs that must have arrived."""


class ArrivingWeights:
    """Weights of one engine that are being gathered, from the end of a step until they are needed.

    Args:
        engine: the engine.
        gathers: the gathers of the parameter groups, in order.
        patches: removes the hooks when undone.

    Raises:
        UnsupportedError: waiting module by module would be unsound.
    """

    def __init__(self, engine: Any, gathers: Iterable[DifferenceGather], patches: Patches) -> None:
        _check(engine)
        self._module: nn.Module = engine.module
        self._under_way: dict[int, PendingWeights] = {}
        self._waited: Any = None
        """Stream of a GPU that has waited last for weights under way, and has added them."""
        # Groups of one rank, as those of experts may be, are not sent.
        sent = [(group, gather) for group, gather in enumerate(gathers) if gather.group.size() > 1]
        rounds = {name: (group, last) for group, gather in sent for name, last in gather.last_rounds().items()}
        # Frozen parameters are in no optimizer, so they are never sent.
        arrival = {id(parameter): rounds[name] for parameter, name in engine.param_names.items() if name in rounds}
        self._reads = _Reads({identity: (place,) for identity, place in arrival.items()}, self._wait)
        self._forward_runs = False
        for handle in self._hooks(arrival):
            patches.on_undo(handle.remove)
        patches.precede(engine, "offload_states", self.finish)
        patches.precede(engine, "destroy", self.finish)
        patches.precede(engine.optimizer, "refresh_fp32_params", self.finish)
        patches.on_undo(self.finish)

    def begin(self, buffers: Iterable[tuple[int, DifferenceGather, Tensor, Tensor]]) -> None:
        """Send the weights of each group: (group, gather, held weights, master weights).

        Small groups go first. They hold biases and norms from the whole model, which would otherwise wait for all
        matrices.
        """
        tag, self._waited = 0, None
        for group, gather, held, master in sorted(buffers, key=lambda buffer: (buffer[2].numel(), buffer[0])):
            self._under_way[group] = gather.begin(held, master, tag)
            tag += gather.rounds

    def finish(self) -> None:
        """Wait until all weights have arrived."""
        self._join()
        for pending in self._under_way.values():
            pending.finish()
        self._under_way.clear()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ArrivingWeights":
        """Return this object, after giving the copied module all weights.

        A module is copied together with its hooks. Parameters that were copied before the weights arrived are updated.
        """
        self.finish()
        for parameter in self._module.parameters():
            if id(parameter) in memo:
                memo[id(parameter)].data.copy_(parameter.data)
        return self

    def _hooks(self, arrival: Mapping[int, tuple[int, int]]) -> Iterator[Any]:
        """Register the hooks of all modules, and yield their handles."""
        for module in self._module.modules():
            needs = _needs(module, arrival)
            if needs:
                yield module.register_forward_pre_hook(_uncompiled(partial(self._before_forward, needs)), prepend=True)
            yield module.register_state_dict_pre_hook(self._before_state)  # type: ignore[no-untyped-call]
            yield module.register_load_state_dict_pre_hook(self._before_state)  # type: ignore[no-untyped-call]
        # Registered after the hooks of the modules, so that `prepend` puts this one first.
        yield self._module.register_forward_pre_hook(_uncompiled(self._begin_forward), prepend=True)
        yield self._module.register_forward_hook(_uncompiled(self._end_forward), always_call=True)

    def _before_forward(self, needs: _Needs, module: nn.Module, inputs: Any) -> None:
        if self._under_way and not self._forward_runs:
            self.finish()
        self._wait(needs)

    def _wait(self, needs: _Needs) -> None:
        if self._under_way:
            self._join()
            for group, last in needs:
                self._under_way[group].wait_for(last)

    def _join(self) -> None:
        """Let the current stream of a GPU wait for weights that another stream of the model has added."""
        stream = get_accelerator().current_stream()
        if self._waited not in (None, stream):
            stream.wait_stream(self._waited)
        self._waited = stream

    def _begin_forward(self, module: nn.Module, inputs: Any) -> None:
        if not self._under_way or self._forward_runs:
            return
        if any(isinstance(one, torch.jit.ScriptModule) or is_compiled(one) for one in module.modules()):
            # Reads in compiled code cannot be intercepted.
            self.finish()
            return
        self._forward_runs = True
        self._reads.__enter__()  # type: ignore[no-untyped-call]

    def _end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if self._forward_runs:
            self._forward_runs = False
            self._reads.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.finish()

    def _before_state(self, *_: Any) -> None:
        self.finish()


def _uncompiled(hook: Callable[..., None]) -> Callable[..., None]:
    """Return `hook` such that torch.compile does not trace it.

    This imports the compiler of PyTorch, so it is called when an engine is attached, not when this module is imported.
    """
    return torch.compiler.disable(hook)  # type: ignore[no-any-return,no-untyped-call]


class _Reads(TorchFunctionMode):
    """Torch function mode that calls `wait` for every parameter that a torch function is about to read.

    `needs` maps the `id` of each parameter to what must have arrived.
    """

    def __init__(self, needs: Mapping[int, _Needs], wait: Callable[[_Needs], None]) -> None:
        super().__init__()
        self._needs, self._wait = needs, wait

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for argument in (*args, *(kwargs.values() if kwargs else ())):
            for one in argument if isinstance(argument, list | tuple) else (argument,):
                if id(one) in self._needs:
                    self._wait(self._needs[id(one)])
        return func(*args, **(kwargs or {}))


def _needs(module: nn.Module, arrival: Mapping[int, tuple[int, int]]) -> _Needs:
    """Return what must arrive before `module` runs, from the group and round of each parameter, by its `id`."""
    layered = any(isinstance(part, _LISTS) for part in module.modules())
    found: dict[int, int] = {}
    for parameter in module.parameters(recurse=not layered):
        if id(parameter) in arrival:
            group, last = arrival[id(parameter)]
            found[group] = max(last, found.get(group, 0))
    return tuple(found.items())


def _check(engine: Any) -> None:
    scripted = [name for name, one in engine.module.named_modules() if isinstance(one, torch.jit.ScriptModule)]
    if scripted:
        raise UnsupportedError(
            f"/deepspeed_compress/weights/overlap: true cannot be combined with {scripted[0]}, which is a "
            "torch.jit.ScriptModule: what it reads cannot be intercepted (allowed: false); write false"
        )
    if isinstance(engine, PipelineEngine):
        raise UnsupportedError(
            "/deepspeed_compress/weights/overlap: true cannot be combined with a pipeline, whose tied layers compute "
            "without being called; write false"
        )
