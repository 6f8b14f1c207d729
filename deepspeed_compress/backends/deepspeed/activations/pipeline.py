"""Compressed messages between pipeline stages.

A stage sends a tuple of tensors: hidden states first, and then what later stages need, such as masks. Only the first
floating-point tensor is compressed, and its gradient on the way back. Both ends see the same tensors in the same order,
so nothing has to be agreed on.

With tensor parallelism, each rank sends and receives a part of the hidden states, and the ranks of the stage gather the
parts. These gathers are compressed, too. A part that has been received has the same codes when it is encoded again, so
gathering it costs no precision.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from deepspeed import comm
from deepspeed.runtime.pipe import p2p, schedule
from deepspeed.runtime.utils import PartitionedTensor
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.messages import ActivationMessages, gradient_codec
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import SECTION
from deepspeed_compress.config.models import PipelineActivations
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import Patches, replaced

_ENGINE = "deepspeed.runtime.pipe.engine:PipelineEngine."
SEAMS = (
    *(Seam(f"{_ENGINE}_exec_{way}", "self buffer_id") for way in ("send_activations", "send_grads")),
    *(Seam(f"{_ENGINE}_exec_{way}", "self buffer_id") for way in ("recv_activations", "recv_grads")),
    *(Seam(f"{_ENGINE}_exec_{way}_pass", "self buffer_id") for way in ("forward", "backward")),
    Seam(f"{_ENGINE}_exec_reduce_tied_grads", "self"),
    Seam("deepspeed.runtime.utils:PartitionedTensor.full", "self device"),
    Seam("deepspeed.runtime.pipe.p2p:send", "tensor dest_stage async_op"),
    Seam("deepspeed.runtime.pipe.p2p:recv", "tensor src_stage async_op"),
)

_Transfer = Callable[[Tensor, int], Any]
"""`p2p.send` or `p2p.recv`: transfers a tensor to or from a stage."""
_Gather = Callable[[PartitionedTensor, Any], Tensor]
"""`PartitionedTensor.full`: gathers a tensor from the parts of a stage's ranks, onto a device."""


class _FirstMessage:
    """The first floating-point message of one instruction. Shapes are sent before it, as integers."""

    def __init__(self) -> None:
        self._passed = False

    def is_this(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is the message, in a type that can be compressed. Call it once for each message."""
        if self._passed or not tensor.is_floating_point():
            return False
        self._passed = True
        return ActivationMessages.carries(tensor)


@dataclass(frozen=True)
class _Transfers:
    """Transfers of one engine, of which those of first messages are compressed, and gathers inside a stage.

    Attributes:
        messages: Encodes what one stage sends to another.
        parts: Encodes what the ranks of a stage send to each other.
        group: The ranks of a stage.
    """

    messages: ActivationMessages
    parts: ActivationMessages
    group: ProcessGroup

    def sender(self, original: _Transfer) -> _Transfer:
        """Return the replacement of `p2p.send` for one instruction."""
        return partial(self._send, _FirstMessage(), original)

    def receiver(self, original: _Transfer) -> _Transfer:
        """Return the replacement of `p2p.recv` for one instruction."""
        return partial(self._receive, _FirstMessage(), original)

    def gatherer(self, original: _Gather) -> _Gather:
        """Return the replacement of the method `PartitionedTensor.full`.

        It compresses the parts of this engine, if all of them have the same size and a known type.
        """

        def full(part: PartitionedTensor, device: Any = None) -> Tensor:
            even = math.prod(part.full_size()) == part.num_parts * part.local_data.numel()
            ours = part.group is self.group and even and self.parts.carries(part.local_data)
            return self._gather(part) if ours else original(part, device)

        return full

    def _send(self, first: _FirstMessage, original: _Transfer, tensor: Tensor, stage: int) -> None:
        """Send `tensor` to `stage`, compressed if it is the first message."""
        original(self.messages.encode(tensor) if first.is_this(tensor) else tensor, stage)

    def _receive(self, first: _FirstMessage, original: _Transfer, tensor: Tensor, stage: int) -> None:
        """Receive `tensor` from `stage`, compressed if it is the first message."""
        if not first.is_this(tensor):
            original(tensor, stage)
            return
        payload = self.messages.payload(tensor)
        original(payload, stage)
        self.messages.decode(tensor, payload)

    def _gather(self, part: PartitionedTensor) -> Tensor:
        """Return the tensor of which every rank of the stage holds a part, with the same bits on all of them."""
        mine, ranks = part.local_data, part.num_parts
        whole = torch.empty(part.full_size(), dtype=mine.dtype, device=mine.device)
        payload = self.parts.encode(mine, receivers=ranks - 1)
        payloads = payload.new_empty(ranks * payload.numel())
        comm.all_gather_into_tensor(payloads, payload, group=part.group)
        for one, values in zip(payloads.chunk(ranks), whole.view(ranks, -1), strict=True):
            self.parts.decode(values, one)
        return whole


def _run_replacing(
    owner: Any,
    name: str,
    make: Callable[[Any], Callable[..., Any]],
    instruction: Callable[..., Any],
    engine: Any,
    **arguments: Any,
) -> None:
    """Run an instruction of `engine`; in training, with `owner.name` replaced by what `make` returns for it."""
    if not torch.is_grad_enabled():
        instruction(engine, **arguments)
        return
    with replaced(owner, **{name: make(getattr(owner, name))}):
        instruction(engine, **arguments)


class _FirstBatch:
    """Check of the first tensors that a stage passes on in training. It waits for the GPU, once."""

    def __init__(self) -> None:
        self._is_mask: bool | None = None
        self._agreed = False

    def send(self, instruction: Callable[..., Any], engine: Any, buffer_id: int) -> None:
        """Run the instruction of `engine` that sends what it has in a buffer, and note whether a mask comes first."""
        if self._is_mask is None and torch.is_grad_enabled():
            outputs = engine.pipe_buffers["outputs"][buffer_id]
            floats = [output for output in outputs if output.is_floating_point()] if isinstance(outputs, tuple) else []
            self._is_mask = len(floats) > 1 and bool((floats[0] <= torch.finfo(floats[0].dtype).min).any())
        instruction(engine, buffer_id=buffer_id)

    def end(self, instruction: Callable[..., Any], engine: Any) -> None:
        """Run the first instruction of `engine` after all messages of a batch, which every stage reaches.

        A stage that raised alone before would leave the others waiting for its messages.

        Raises:
            UnsupportedError: a mask comes before the hidden states. Its lowest numbers would spoil those beside them.
                Raised on all ranks.
        """
        if not self._agreed and any(gather_objects(self._is_mask)):
            raise UnsupportedError(
                f"/{SECTION}/activations/pipeline: the first floating-point tensor that a stage passes on is a mask, "
                "with -inf or the lowest number, and would be compressed; pass hidden states first, or remove the key"
            )
        self._agreed = True
        instruction(engine)


def attach_pipeline(engine: Any, settings: PipelineActivations, run: Run, patches: Patches) -> None:
    """Compress the messages of `engine` between its stages, in training.

    `_exec_schedule` looks instructions up in a table of the class, which the engine gets a copy of.
    """
    codec, meter = gradient_codec(settings.bits), run.meter
    parts = ActivationMessages(codec, meter, "bytes_tensor_saved")
    transfers = _Transfers(ActivationMessages(codec, meter), parts, engine.grid.get_slice_parallel_group())
    table = dict(engine._INSTRUCTION_MAP)
    for owner, name, make, kinds in (
        (p2p, "send", transfers.sender, (schedule.SendActivation, schedule.SendGrad)),
        (p2p, "recv", transfers.receiver, (schedule.RecvActivation, schedule.RecvGrad)),
        (PartitionedTensor, "full", transfers.gatherer, (schedule.ForwardPass, schedule.BackwardPass)),
    ):
        table |= {kind: partial(_run_replacing, owner, name, make, table[kind]) for kind in kinds}
    first = _FirstBatch()
    table[schedule.SendActivation] = partial(first.send, table[schedule.SendActivation])
    table[schedule.ReduceTiedGrads] = partial(first.end, table[schedule.ReduceTiedGrads])
    patches.replace(engine, "_INSTRUCTION_MAP", table)
