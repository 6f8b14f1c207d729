"""Compression of activations in the model chunks of a rank: attachment, measurement, and checks of what cannot work."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial, partialmethod
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.crossover import Kind, measure_kinds
from deepspeed_compress.backends.activations.hooks import compiled_problem, is_compiled
from deepspeed_compress.backends.announce import tell
from deepspeed_compress.backends.megatron.activations.experts import EXPERTS, attach_experts, find_dispatchers
from deepspeed_compress.backends.megatron.activations.experts import PARAMETERS as EXCHANGE_PARAMETERS
from deepspeed_compress.backends.megatron.activations.pipeline import METHOD, PARAMETERS, STARTS, Stages
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import SECTION, Activations
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session


def attach_activations(
    chunks: Sequence[Any], activations: Activations, run: Run, patches: Patches
) -> Iterator[Callable[[], None]]:
    """Compress what `activations` says until `patches` are undone.

    Yields:
        What has to be called before each step of the optimizer.
    """
    if activations.experts is not None:
        yield from attach_experts(chunks, activations.experts, run.meter, patches)
    if activations.pipeline is not None:
        stages = Stages(chunks[0], activations.pipeline.bits, run)
        stages.attach(patches)
        yield stages.before_step


def measure_activations(chunks: Sequence[Any], activations: Activations, session: Session) -> None:
    """Measure compressed messages, report their times, and record an event for each kind that costs time on its link.

    Collective; waits for the GPU.
    """
    parameter = next(chunks[0].parameters())
    groups: dict[Kind, ProcessGroup] = {"pipeline": chunks[0].pp_group}
    for dispatcher in find_dispatchers(chunks):
        groups["experts"] = dispatcher.ep_group
    measured = measure_kinds(activations, groups, parameter.dtype, parameter.device)
    for one in measured:
        if not one.pays:
            session.record(one.event(0))
    if dist.get_rank() == 0 and session.config.monitor.announce:
        tell(partial("; ".join, [str(one) for one in measured]))


_PLACE = f"/{SECTION}/activations"
_COMMUNICATED = ("tensor_send_next", "tensor_send_prev", "recv_prev", "recv_next", "tensor_shape", "wait_on_reqs")


def find_changed_seams() -> Iterator[str]:
    """Yield the functions that `activations` replaces, and that this version of Megatron calls in another way."""
    method = vars(P2PCommunicator)[METHOD]
    if not isinstance(method, partialmethod) and set(inspect.signature(method).parameters) != {"self", *_COMMUNICATED}:
        yield f"P2PCommunicator.{METHOD}"
    if tuple(inspect.signature(token_dispatcher.all_to_all).parameters) != EXCHANGE_PARAMETERS:
        yield "token_dispatcher.all_to_all"
    for name in STARTS:
        if not set(PARAMETERS) <= set(inspect.signature(getattr(p2p_communication, name)).parameters):
            yield f"p2p_communication.{name}"


def find_activation_limits(chunks: Sequence[Any], activations: Activations | None) -> Iterator[str]:
    """Yield what is wrong with `activations` for these model chunks."""
    if activations is None:
        return
    if activations.tensor is not None:
        yield (
            f"{_PLACE}/tensor works only with DeepSpeed: layers of Transformer Engine, which most models of Megatron "
            "have, sum by themselves; remove the key"
        )
    if activations.pipeline is not None:
        yield from _limits_of_pipeline(chunks[0])
    if activations.experts is not None:
        yield from _limits_of_experts(chunks)
    if activations.sequence is not None:
        yield (
            f"{_PLACE}/sequence works only with DeepSpeed: it compresses Ulysses' all-to-alls, and Megatron's context "
            "parallelism exchanges by other means; remove the key"
        )


def _limits_of_experts(chunks: Sequence[Any]) -> Iterator[str]:
    """Yield what is wrong with layers whose experts are spread over ranks."""
    dispatchers = find_dispatchers(chunks)
    others = sorted(
        {
            type(dispatcher).__name__
            for dispatcher in dispatchers
            if not isinstance(dispatcher, MoEAlltoAllTokenDispatcher)
        }
    )
    if others:
        yield (
            f"{EXPERTS}: {', '.join(others)} exchanges tokens by other means; write "
            'moe_token_dispatcher_type="alltoall", or remove the key'
        )
    if not dispatchers and chunks[0].pp_group.size() == 1:
        yield (
            f"{EXPERTS} has no effect, because no ranks share experts (expert_model_parallel_size 1, or no layer of "
            "experts); remove the key"
        )
    if dispatchers and any(is_compiled(module) for chunk in chunks for module in chunk.modules()):
        yield compiled_problem(EXPERTS, "exchanges", "do not compile the model")


def _limits_of_pipeline(chunk: Any) -> Iterator[str]:
    place = f"{_PLACE}/pipeline"
    if chunk.pp_group.size() == 1:
        yield f"{place} has no effect, because there is one stage (pipeline_model_parallel_size 1); remove the key"
    if chunk.config.use_ring_exchange_p2p:
        yield f"{place}: use_ring_exchange_p2p transfers by other means; write use_ring_exchange_p2p=False"
