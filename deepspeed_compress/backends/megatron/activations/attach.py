"""Attaches what `activations` says to the model chunks of a rank, and measures it on their links."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.compiled import CompiledCalls
from deepspeed_compress.backends.activations.crossover import Kind, measure_kinds
from deepspeed_compress.backends.announce import tell
from deepspeed_compress.backends.megatron.activations.experts import attach_experts, find_dispatchers
from deepspeed_compress.backends.megatron.activations.pipeline import Stages
from deepspeed_compress.backends.megatron.activations.tensor import attach_tensor
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import Activations
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session


def attach_activations(
    chunks: Sequence[Any], activations: Activations, run: Run, patches: Patches
) -> Sequence[CompiledCalls | Stages]:
    """Compress what `activations` says until `patches` are undone.

    Returns:
        What has to be called before each step of the optimizer.
    """
    tensor, pipeline, experts = activations.tensor, activations.pipeline, activations.experts
    compiled = [] if tensor is None else attach_tensor(chunks, tensor, run, patches)
    compiled += [] if experts is None else attach_experts(chunks, experts, run.meter, patches)
    if pipeline is None:
        return compiled
    stages = Stages(chunks[0], pipeline.bits, run)
    stages.attach(patches)
    return [*compiled, stages]


def measure_activations(chunks: Sequence[Any], activations: Activations, session: Session) -> None:
    """Measure compressed messages, report their times, and record an event for each kind that costs time on its link.

    Collective; waits for the GPU.
    """
    first = chunks[0]
    parameter = next(first.parameters())
    groups: dict[Kind, ProcessGroup] = {"tensor": first.tp_group, "pipeline": first.pp_group}
    for dispatcher in find_dispatchers(chunks):
        groups["experts"] = dispatcher.ep_group
    measured = measure_kinds(activations, groups, parameter.dtype, parameter.device)
    for one in measured:
        if not one.pays:
            session.record(one.event(0))
    if dist.get_rank() == 0 and session.config.monitor.announce:
        tell(partial("; ".join, [str(one) for one in measured]))
