"""All-to-alls of sequence parallelism (Ulysses, arXiv:2309.14509), compressed in the training passes of an engine.

Attention gathers the sequence and splits the heads by all-to-alls of query, key and value, and does the reverse with
its output; the backward pass does the same with gradients. DeepSpeed's `DistributedAttention`, its FPDT, and
`UlyssesSPAttentionHF` all call one method of DeepSpeed's communication backend. It is replaced while engines are
attached, and compresses messages to the sequence-parallel group of the engine whose pass runs.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from deepspeed.comm import comm
from torch import nn
from torch.utils.hooks import RemovableHandle

from deepspeed_compress.backends.activations.hooks import CompiledCalls, find_parts
from deepspeed_compress.backends.activations.messages import (
    DTYPES,
    ActivationMessages,
    AllToAllCall,
    CompressedAllToAll,
    PendingAllToAll,
    activation_codec,
)
from deepspeed_compress.backends.deepspeed.activations.attached import forbid_compiling
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import SECTION
from deepspeed_compress.config.models import SequenceActivations
from deepspeed_compress.errors import SeamError, UnsupportedError
from deepspeed_compress.session.patches import Patches

_METHOD = "all_to_all_single"
SEAMS = (
    Seam(f"deepspeed.comm.torch:TorchBackend.{_METHOD}"),
    Seam("deepspeed.runtime.engine:DeepSpeedEngine.backward"),
)


@dataclass
class _EngineExchange:
    """All-to-all of one engine, and whether it has been used, or called from a compiled graph."""

    exchange: CompressedAllToAll
    compiled: CompiledCalls
    used: bool = False

    def takes(self, call: AllToAllCall) -> bool:
        """Return True if `call` is one of attention, in a type that can be compressed.

        Groups are compared by name, since a group may have several Python objects.
        """
        name = getattr(call.group, "group_name", None)
        return call.input.dtype in DTYPES and bool(name == self.exchange.group.group_name)


@dataclass
class _AllToAll:
    """Replacement of the backend's method `original`, for all `engines` that are attached.

    Attributes:
        forward: the exchange of the engine whose forward pass runs, in training; else None.
        backward: the exchange of the engine whose backward pass has begun last; None after its optimizer step.
    """

    original: Callable[..., Any]
    engines: int = 0
    forward: _EngineExchange | None = None
    backward: _EngineExchange | None = None
    patches: Patches = field(default_factory=Patches)
    """The replacement in the backend."""

    def __call__(self, *args: Any, **options: Any) -> PendingAllToAll | Any:
        call, current = AllToAllCall(*args, **options), self._current()
        if current is None or not current.takes(call):
            return self.original(*args, **options)
        if torch.compiler.is_compiling():
            current.compiled.note()
            return self.original(*args, **options)
        current.used = True
        pending = current.exchange.start(call)
        return pending if call.async_op else pending.wait()

    def _current(self) -> _EngineExchange | None:
        """Return the exchange of the pass that runs; None outside of training."""
        in_backward = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        return self.backward if self.forward is None and in_backward else self.forward

    def leave(self, own: _EngineExchange) -> None:
        """End the passes of an engine, by its exchange."""
        if self.forward is own:
            self.forward = None
        if self.backward is own:
            self.backward = None


@dataclass
class _Passes:
    """Passes of one engine, during which its all-to-alls are compressed: forward with gradients, and backward.

    A program may call parts of the model by themselves, which begin a pass if gradients are on. Reentrant checkpoints
    recompute layers in the backward pass.
    """

    switch: _AllToAll
    own: _EngineExchange
    model: weakref.ref[nn.Module]
    parts: weakref.WeakSet[nn.Module]
    _outer: list[_EngineExchange | None] = field(default_factory=list)
    """Exchanges of the passes around a forward pass that runs."""

    def begin_forward(self, module: nn.Module, inputs: Any) -> None:
        """Enter a forward pass of `module`, which is a copy if it is none of the `parts`."""
        self._outer.append(self.switch.forward)
        if module not in self.parts:
            self.switch.forward = None
        elif torch.is_grad_enabled():
            self.switch.forward = self.own
        elif module is self.model():
            self.switch.forward = None

    def end_forward(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Leave the forward pass."""
        self.switch.forward = self._outer.pop()

    def backward(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Run the engine's method `backward`."""
        outer, self.switch.backward = self.switch.backward, self.own
        try:
            return original(*args, **options)
        finally:
            self.switch.backward = outer

    def begin_backward(self) -> None:
        """Enter a backward pass through the engine's outputs, which the program may have started on a tensor."""
        self.switch.forward, self.switch.backward = None, self.own

    def before_step(self) -> None:
        """Leave all passes.

        Raises:
            UnsupportedError: there was no all-to-all, so the setting has no effect.
        """
        self._outer.clear()
        self.switch.leave(self.own)
        self.own.compiled.before_step()
        if not self.own.used:
            raise UnsupportedError(
                f"/{SECTION}/activations/sequence has no effect: no attention has exchanged anything over the engine's "
                "sequence-parallel group; use DistributedAttention or UlyssesSPAttentionHF with it, or remove the key"
            )

    def __deepcopy__(self, memo: Any) -> "_Passes":
        """Return this object, which copies of the model carry in their hooks."""
        return self


def attach_sequence(engine: Any, settings: SequenceActivations, run: Run, patches: Patches) -> None:
    """Compress the all-to-alls of attention until the engine is destroyed, collected, or detached from."""
    switch = _join(comm.cdb)
    messages = ActivationMessages(activation_codec(settings.bits), run.meter, "bytes_sequence_saved")
    exchange = CompressedAllToAll(engine.seq_parallel_group, messages)
    parts, model = find_parts(engine.module), weakref.ref(engine.module)
    compiled = forbid_compiling(engine, "/deepspeed_compress/activations/sequence", "messages", patches)
    passes = _Passes(switch, _EngineExchange(exchange, compiled), model, weakref.WeakSet(parts))
    handles: list[RemovableHandle] = []
    for part in parts:
        before = part.register_forward_pre_hook(passes.begin_forward, prepend=True)
        handles += [before, part.register_forward_hook(passes.end_forward, always_call=True)]
    patches.end_with(engine, _leave, passes, handles)
    patches.wrap(engine, "backward", passes.backward)
    patches.precede(engine, "_backward_prologue", passes.begin_backward)
    patches.precede(engine, "_take_model_step", passes.before_step)


def _join(backend: Any) -> _AllToAll:
    """Return the replacement of the backend's method, installed if necessary, with one more engine."""
    switch = getattr(backend, _METHOD)
    if not isinstance(switch, _AllToAll):
        switch = _AllToAll(switch)
        switch.patches.replace(backend, _METHOD, switch)
    switch.engines += 1
    return switch


def _leave(passes: _Passes, handles: list[Any]) -> None:
    """Undo `attach_sequence`. After the last engine, the backend gets its own method back, if ours is there still."""
    while handles:
        handles.pop().remove()
    switch = passes.switch
    switch.engines -= 1
    switch.leave(passes.own)
    if not switch.engines:
        with suppress(SeamError):
            switch.patches.undo()
