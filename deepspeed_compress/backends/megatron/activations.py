"""Compressed activations of Megatron's model chunks: messages between pipeline stages, and exchanges of experts.

Megatron's schedules make a `P2PCommunicator` in each step, so the method of this class that transfers tensors is
replaced, for communicators with the configuration of the model. While it runs, so are the functions that it calls to
start transfers.

`MoEAlltoAllTokenDispatcher` sends tokens to the experts by one method, and their results back by another one. Both look
the exchange up in their module, where it is replaced while one of them runs. Probabilities and counts of tokens stay
exact.
"""

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, partialmethod
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.crossover import Kind, measure_kinds
from deepspeed_compress.backends.activations.hooks import CompiledCalls, TrainingPass, compiled_problem, is_compiled
from deepspeed_compress.backends.activations.messages import ActivationMessages, gradient_codec
from deepspeed_compress.backends.activations.tokens import Leg, exchange_rows, is_smaller, make_leg
from deepspeed_compress.backends.announce import tell
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import SECTION, Activations, ExpertActivations
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.monitor import Meter
from deepspeed_compress.session.patches import Patches, replaced
from deepspeed_compress.session.session import Session

_PLACE = f"/{SECTION}/activations"
_EXPERTS = f"{_PLACE}/experts"


def attach_activations(
    chunks: Sequence[Any], activations: Activations, run: Run, patches: Patches
) -> list[Callable[[], None]]:
    """Compress what `activations` says until `patches` are undone.

    Returns:
        What has to be called before each step of the optimizer.
    """
    before: list[Callable[[], None]] = []
    if activations.experts is not None:
        before += _attach_experts(chunks, activations.experts, run.meter, patches)
    if activations.pipeline is not None:
        stages = _Stages(chunks[0], activations.pipeline.bits, run)
        original = vars(P2PCommunicator)[_METHOD]
        patches.replace(P2PCommunicator, _METHOD, partialmethod(_communicate, stages, original))
        before.append(stages.before_step)
    return before


def measure_activations(chunks: Sequence[Any], activations: Activations, session: Session) -> None:
    """Measure compressed messages, report their times, and record an event for each kind that costs time on its link.

    Collective; waits for the GPU.
    """
    parameter = next(chunks[0].parameters())
    groups: dict[Kind, ProcessGroup] = {"pipeline": chunks[0].pp_group}
    for dispatcher in _find_dispatchers(chunks):
        groups["experts"] = dispatcher.ep_group
    measured = measure_kinds(activations, groups, parameter.dtype, parameter.device)
    for one in measured:
        if not one.pays:
            session.log.record(one.event(0))
    if dist.get_rank() == 0 and session.config.monitor.announce:
        tell(partial("; ".join, [str(one) for one in measured]))


_EXCHANGED = ("group", "input_", "output_split_sizes_", "input_split_sizes")
"""Parameters of the function `all_to_all` of Megatron's module, which exchanges rows."""


def _find_dispatchers(chunks: Sequence[nn.Module]) -> list[Any]:
    """Return the dispatchers of the layers of `chunks` whose experts are spread over ranks."""
    layers = (module for chunk in chunks for module in chunk.modules() if isinstance(module, BaseMoELayer))
    return [layer.token_dispatcher for layer in layers if layer.ep_group.size() > 1]


def _attach_experts(
    chunks: Sequence[nn.Module], settings: ExpertActivations, meter: Meter, patches: Patches
) -> list[Callable[[], None]]:
    """Compress the exchanges of the experts of `chunks`, until `patches` are undone.

    Returns:
        What has to be called before each step of the optimizer.
    """
    before: list[Callable[[], None]] = []
    ways = {"token_dispatch": settings.dispatch, "token_combine": settings.combine}
    legs = {method: make_leg(way.bits, meter) for method, way in ways.items() if way is not None}
    for chunk in chunks:
        training, compiled = TrainingPass(chunk), CompiledCalls(weakref.ref(chunk), _EXPERTS, "exchanges")
        patches.on_undo(training.detach)
        for dispatcher in _find_dispatchers([chunk]):
            for method, leg in legs.items():
                patches.replace(dispatcher, method, _Way(getattr(dispatcher, method), leg, training, compiled))
        before.append(compiled.before_step)
    return before


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


_METHOD = "_communicate"
"""Method of a communicator that transfers tensors."""
_STARTS = ("_p2p_ops", "_batched_p2p_ops")
"""Functions of Megatron's module that start transfers."""
_SENT = ("tensor_send_prev", "tensor_send_next")
_RECEIVED = ("tensor_recv_prev", "tensor_recv_next")
_TRANSFERRED = (*_SENT, *_RECEIVED)
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


class _Stages:
    """Messages of the model of `chunk` between its stages, compressed in passes with gradients."""

    def __init__(self, chunk: nn.Module, bits: int, run: Run) -> None:
        # Megatron's class keeps this object, and may outlive the model.
        self._chunk, self._meter = weakref.ref(chunk), run.meter
        self._messages = ActivationMessages(gradient_codec(bits), run.meter)
        self._used = False

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

    def compressing(self, communicator: Any) -> AbstractContextManager[None]:
        """Compress transfers that start inside this block, if `communicator` is one of the model's in training."""
        if not torch.is_grad_enabled() or communicator.config is not getattr(self._chunk(), "config", None):
            return nullcontext()
        self._used = True
        ours = {name: partial(self._start, getattr(p2p_communication, name)) for name in _STARTS}
        return replaced(p2p_communication, **ours)

    def _start(self, original: Callable[..., Any], **options: Any) -> Any:
        """Start transfers of payloads in place of tensors, and return handles as Megatron's function `original` does.

        Every stage knows the shapes and types of what it receives, so nothing has to be agreed on.
        """
        given = {name: options[name] for name in _TRANSFERRED if options[name] is not None}
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


def _communicate(communicator: Any, stages: _Stages, original: Any, **options: Any) -> Any:
    """Transfer tensors by the method `original` of `communicator`, compressed if it is one of the model's."""
    with stages.compressing(communicator):
        return original.__get__(communicator)(**options)


_COMMUNICATED = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs")


def find_changed_seams() -> Iterator[str]:
    """Yield the functions that `activations` replaces, and that this version of Megatron calls in another way."""
    method = vars(P2PCommunicator)[_METHOD]
    if not isinstance(method, partialmethod) and set(inspect.signature(method).parameters) != {"self", *_COMMUNICATED}:
        yield f"P2PCommunicator.{_METHOD}"
    if tuple(inspect.signature(token_dispatcher.all_to_all).parameters) != _EXCHANGED:
        yield "token_dispatcher.all_to_all"
    for name in _STARTS:
        if not set(_TRANSFERRED) <= set(inspect.signature(getattr(p2p_communication, name)).parameters):
            yield f"p2p_communication.{name}"


def find_activation_limits(chunks: Sequence[Any], activations: Activations | None) -> Iterator[str]:
    """Yield what is wrong with `activations` for these model chunks."""
    if activations is None:
        return
    if activations.tensor is not None:
        yield (
            f"{_PLACE}/tensor works only with DeepSpeed, because Transformer Engine's layers sum by themselves; remove "
            "the key"
        )
    if activations.pipeline is not None and chunks[0].pp_group.size() == 1:
        yield f"{_PLACE}/pipeline has no effect, because there is one stage; remove the key"
    if activations.pipeline is not None and chunks[0].config.use_ring_exchange_p2p:
        yield f"{_PLACE}/pipeline: use_ring_exchange_p2p transfers by other means; write use_ring_exchange_p2p=False"
    if activations.experts is not None:
        yield from _limits_of_experts(chunks)
    if activations.sequence is not None:
        yield f"{_PLACE}/sequence works only with DeepSpeed, since it compresses Ulysses' all-to-alls; remove the key"


def _limits_of_experts(chunks: Sequence[Any]) -> Iterator[str]:
    """Yield what is wrong with layers whose experts are spread over ranks."""
    dispatchers = _find_dispatchers(chunks)
    others = {type(one).__name__ for one in dispatchers if not isinstance(one, MoEAlltoAllTokenDispatcher)}
    for name in sorted(others):
        remedy = 'write moe_token_dispatcher_type="alltoall", or remove the key'
        yield f"{_EXPERTS}: {name} exchanges tokens by other means; {remedy}"
    if not dispatchers and chunks[0].pp_group.size() == 1:
        yield f"{_EXPERTS} has no effect, because no ranks share experts (expert_model_parallel_size); remove the key"
    if dispatchers and any(is_compiled(module) for chunk in chunks for module in chunk.modules()):
        yield compiled_problem(_EXPERTS, "exchanges", "do not compile the model")
