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

from deepspeed_compress.backends.deepspeed.activations.sums import DTYPES, gradient_codec
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.config import PipelineActivations
from deepspeed_compress.monitor import Meter
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
        return tensor.dtype in DTYPES and tensor.numel() > 0


@dataclass(frozen=True)
class StageMessages:
    """Messages of one engine, encoded by `codec`."""

    codec: Codec
    meter: Meter

    def send(self, first: _FirstMessage, original: _Transfer, tensor: Tensor, stage: int) -> None:
        """Send `tensor` to `stage`, compressed if it is the first message."""
        if not first.is_this(tensor):
            original(tensor, stage)
            return
        original(self.encode(tensor), stage)

    def receive(self, first: _FirstMessage, original: _Transfer, tensor: Tensor, stage: int) -> None:
        """Receive `tensor` from `stage`, compressed if it is the first message."""
        if not first.is_this(tensor):
            original(tensor, stage)
            return
        payload = self.payload(tensor)
        original(payload, stage)
        self.decode(payload, tensor)

    def encode(self, tensor: Tensor) -> Tensor:
        """Return the message that carries `tensor`."""
        payload = self.payload(tensor)
        with self.meter.phase("compress", tensor.device):
            self.codec.encode(tensor.detach().reshape(-1).to(torch.float32), (), payload, key=0)
        self.meter.count("bytes_pipeline_saved", tensor.nbytes - payload.nbytes)
        return payload

    def decode(self, payload: Tensor, tensor: Tensor) -> None:
        """Overwrite `tensor` with what `payload` carries."""
        with self.meter.phase("decompress", tensor.device):
            values = torch.empty(tensor.numel(), dtype=torch.float32, device=tensor.device)
            self.codec.decode([payload], (), values, 1.0)
            tensor.detach().copy_(values.view_as(tensor))

    def payload(self, tensor: Tensor) -> Tensor:
        """Return a buffer for the message that carries `tensor`."""
        size = self.codec.compressor.payload_bytes(tensor.numel())
        return torch.empty(size, dtype=torch.uint8, device=tensor.device)


def attach_pipeline(engine: Any, settings: PipelineActivations, run: Run, patches: Patches) -> None:
    """Compress the messages of `engine` between its stages, in training.

    `_exec_schedule` looks instructions up in a table of the class, which the engine gets a copy of.
    """
    messages = StageMessages(gradient_codec(settings.bits), run.meter)
    table = dict(engine._INSTRUCTION_MAP)
    for name, kinds, transfer in (
        ("send", (schedule.SendActivation, schedule.SendGrad), messages.send),
        ("recv", (schedule.RecvActivation, schedule.RecvGrad), messages.receive),
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
