"""Compressed messages between pipeline stages.

Megatron's schedules make a `P2PCommunicator` in each step, so the method of this class that transfers tensors is
replaced, for communicators with the configuration of the model. While it runs, so are the functions that it calls to
start transfers.
"""

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any

import torch
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor, nn

from deepspeed_compress.backends.activations.messages import ActivationMessages, gradient_codec
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import Patches, replaced

METHOD = "_communicate"
"""Method of a communicator that transfers tensors."""
STARTS = ("_p2p_ops", "_batched_p2p_ops")
"""Functions of Megatron's module that start transfers."""
_SENT = ("tensor_send_prev", "tensor_send_next")
_RECEIVED = ("tensor_recv_prev", "tensor_recv_next")
PARAMETERS = (*_SENT, *_RECEIVED)
"""Parameters of these functions that are tensors, or None."""


@dataclass(frozen=True)
class _Pending:
    """Handle of a compressed message, which keeps its `payload` alive.

    Attributes:
        messages: encoder of the messages.
        payload: the bytes.
        tensor: the tensor into which they are decoded; None for a message that is sent.
        handles: Megatron's handles to wait for before.
    """

    messages: ActivationMessages
    payload: Tensor
    tensor: Tensor | None
    handles: Sequence[Any] = ()

    def wait(self) -> None:
        for handle in self.handles:
            handle.wait()
        if self.tensor is not None:
            self.messages.decode(self.tensor, self.payload)


class Stages:
    """Messages of the model of `chunk` between its stages, compressed in passes with gradients."""

    def __init__(self, chunk: nn.Module, bits: int, run: Run) -> None:
        # Megatron's class keeps this object, and may outlive the model.
        self._chunk, self._meter = weakref.ref(chunk), run.meter
        self._messages = ActivationMessages(gradient_codec(bits), run.meter)
        self._used = False

    def attach(self, patches: Patches) -> None:
        """Compress messages until `patches` are undone."""
        original = vars(P2PCommunicator)[METHOD]
        patches.replace(P2PCommunicator, METHOD, partialmethod(_communicate, self, original))

    def before_step(self) -> None:
        """Check that messages were compressed.

        Raises:
            UnsupportedError: there were none, so the setting has no effect.
        """
        if not self._used:
            raise UnsupportedError(
                f"/{SECTION}/activations/pipeline has no effect: no message between stages was sent with the "
                "configuration of the model; pass this to the P2PCommunicator of the schedule, or remove the key"
            )

    def takes(self, communicator: Any) -> bool:
        """Return True if messages of `communicator` are compressed now."""
        return torch.is_grad_enabled() and communicator.config is getattr(self._chunk(), "config", None)

    def compressed(self) -> AbstractContextManager[None]:
        """Compress the transfers that start inside this block."""
        self._used = True
        ours = {name: partial(self._start, getattr(p2p_communication, name)) for name in STARTS}
        return replaced(p2p_communication, **ours)

    def _start(self, original: Callable[..., Any], **options: Any) -> Any:
        """Start transfers of payloads in place of tensors, and return handles as Megatron's function `original` does.

        Every stage knows the shapes and types of what it receives, so nothing has to be agreed on.
        """
        given = {name: options[name] for name in PARAMETERS if options[name] is not None}
        tensors = {name: tensor for name, tensor in given.items() if self._messages.carries(tensor)}
        payloads = {name: self._payload(name, tensor) for name, tensor in tensors.items()}
        handles = original(**{**options, **payloads})
        into = {name: tensors[name] if name in _RECEIVED else None for name in payloads}
        pending = {name: _Pending(self._messages, payload, into[name]) for name, payload in payloads.items()}
        if isinstance(handles, dict):
            # Megatron names the handle of a tensor like its parameter, without "tensor_".
            named = {name.removeprefix("tensor_"): one for name, one in pending.items()}
            return {**handles, **{name: replace(one, handles=[handles[name]]) for name, one in named.items()}}
        return [*handles, *pending.values()]  # Megatron waits for all of them, in this order

    def _payload(self, name: str, tensor: Tensor) -> Tensor:
        """Return the message that carries `tensor`, or a buffer for the one that is received."""
        if name in _RECEIVED:
            return self._messages.payload(tensor)
        payload = self._messages.encode(tensor)
        self._meter.count("bytes_pipeline", payload.nbytes)
        return payload


def _communicate(communicator: Any, stages: Stages, original: Any, **options: Any) -> Any:
    """Transfer tensors by the method `original` of `communicator`, compressed if it is one of the model's."""
    method = original.__get__(communicator)
    if not stages.takes(communicator):
        return method(**options)
    with stages.compressed():
        return method(**options)
