"""Compressed messages between pipeline stages.

A stage sends a tuple of tensors: hidden states first, and then what later stages need, such as masks. Only the first
floating-point tensor is compressed, and its gradient on the way back. Both ends see the same tensors in the same order,
so nothing has to be agreed on.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.pipe import p2p, schedule
from torch import Tensor

from deepspeed_compress.backends.activations.messages import StageMessages
from deepspeed_compress.backends.activations.sums import gradient_codec
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import PipelineActivations
from deepspeed_compress.session.patches import Patches

_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine."
SEAMS = (
    *(Seam(f"{_ENGINE}_exec_{way}", ("self", "buffer_id")) for way in ("send_activations", "send_grads")),
    *(Seam(f"{_ENGINE}_exec_{way}", ("self", "buffer_id")) for way in ("recv_activations", "recv_grads")),
    Seam("deepspeed.runtime.pipe.p2p:send", ("tensor", "dest_stage", "async_op")),
    Seam("deepspeed.runtime.pipe.p2p:recv", ("tensor", "src_stage", "async_op")),
)

_Transfer = Callable[[Tensor, int], Any]
"""`p2p.send` or `p2p.recv`: transfers a tensor to or from a stage."""


class _FirstMessage:
    """The first floating-point message of one instruction. Shapes are sent before it, as integers."""

    def __init__(self) -> None:
        self._passed = False

    def is_this(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is the message, in a type that can be compressed. Call it once for each message."""
        if self._passed or not tensor.is_floating_point():
            return False
        self._passed = True
        return StageMessages.carries(tensor)


@dataclass(frozen=True)
class _Transfers:
    """Transfers of one engine, of which those of first messages are compressed."""

    messages: StageMessages

    def send(self, first: _FirstMessage, original: _Transfer, tensor: Tensor, stage: int) -> None:
        """Send `tensor` to `stage`, compressed if it is the first message."""
        original(self.messages.encode(tensor) if first.is_this(tensor) else tensor, stage)

    def receive(self, first: _FirstMessage, original: _Transfer, tensor: Tensor, stage: int) -> None:
        """Receive `tensor` from `stage`, compressed if it is the first message."""
        if not first.is_this(tensor):
            original(tensor, stage)
            return
        payload = self.messages.payload(tensor)
        original(payload, stage)
        self.messages.decode(payload, tensor)


def attach_pipeline(engine: Any, settings: PipelineActivations, run: Run, patches: Patches) -> None:
    """Compress the messages of `engine` between its stages, in training.

    `_exec_schedule` looks instructions up in a table of the class, which the engine gets a copy of.
    """
    transfers = _Transfers(StageMessages(gradient_codec(settings.bits), run.meter))
    table = dict(engine._INSTRUCTION_MAP)
    for name, kinds, transfer in (
        ("send", (schedule.SendActivation, schedule.SendGrad), transfers.send),
        ("recv", (schedule.RecvActivation, schedule.RecvGrad), transfers.receive),
    ):
        table |= {kind: partial(_run, name, transfer, table[kind]) for kind in kinds}
    patches.replace(engine, "_INSTRUCTION_MAP", table)


def _run(name: str, transfer: Callable[..., None], original: Callable[..., Any], engine: Any, **arguments: Any) -> None:
    """Run the instruction `original` of `engine`, in training with `transfer` in place of `name` of p2p."""
    if not torch.is_grad_enabled():
        original(engine, **arguments)
        return
    with _replaced(name, partial(transfer, _FirstMessage(), getattr(p2p, name))):
        original(engine, **arguments)


@contextmanager
def _replaced(name: str, transfer: _Transfer) -> Iterator[None]:
    theirs = getattr(p2p, name)
    setattr(p2p, name, transfer)
    try:
        yield
    finally:
        setattr(p2p, name, theirs)
