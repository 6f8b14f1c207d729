"""Compression of the activations of an engine: attachment, measurement on the engine's own groups, and checks."""

from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.activations.crossover import Crossover, Kind, measure_kinds
from deepspeed_compress.backends.deepspeed.activations.attached import compiled_problems
from deepspeed_compress.backends.deepspeed.activations.experts import attach_experts, find_expert_layers
from deepspeed_compress.backends.deepspeed.activations.pipeline import attach_pipeline
from deepspeed_compress.backends.deepspeed.activations.sequence import attach_sequence
from deepspeed_compress.backends.deepspeed.activations.tensor import attach_tensor, find_siblings, is_column, is_row
from deepspeed_compress.backends.deepspeed.engine_facts import shares_layers, tensor_size
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.config import Activations, CompressConfig, TensorActivations
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session


def attach_activations(engine: Any, activations: Activations, run: Run, patches: Patches) -> None:
    """Compress what ranks that hold different parts of the model send to each other, as `activations` says."""
    if activations.tensor is not None:
        attach_tensor(engine, activations.tensor, run, patches)
    if activations.pipeline is not None:
        attach_pipeline(engine, activations.pipeline, run, patches)
    if activations.experts is not None:
        attach_experts(engine, activations.experts, run.meter, patches)
    if activations.sequence is not None:
        attach_sequence(engine, activations.sequence, run, patches)


def measure_activations(engine: Any, activations: Activations, session: Session) -> list[Crossover]:
    """Measure compressed messages, and record an event for each kind that costs time on this link.

    Collective; waits for the GPU.
    """
    # Most messages have the type of DeepSpeed's autocast if it is on, else that of the parameters.
    autocast = engine.torch_autocast_enabled()
    dtype = engine.torch_autocast_dtype() if autocast else next(engine.module.parameters()).dtype
    measured = measure_kinds(activations, _groups(engine, activations), dtype, torch.device(engine.device))
    for one in measured:
        if not one.pays:
            session.log.record(one.event(engine.global_steps))
    return measured


def _groups(engine: Any, activations: Activations) -> dict[Kind, ProcessGroup]:
    """Return the group of every kind of messages that `engine` compresses."""
    groups: dict[Kind, ProcessGroup] = {}
    for layer in filter(is_row, engine.module.modules()):  # a stage may lack split layers
        groups["tensor"] = layer.mp_group
    if activations.pipeline is not None:
        groups["pipeline"] = engine.grid.get_pipe_parallel_group()
    for layer in sorted(find_expert_layers(engine), key=lambda layer: layer.ep_size):
        groups["experts"] = layer.ep_group  # the largest, if there are several
    if activations.sequence is not None:
        groups["sequence"] = engine.seq_parallel_group
    return groups


_PLACE = "/deepspeed_compress/activations/"


def refuse_idle_activations(engine: Any, config: CompressConfig) -> None:
    """Check that `activations` has an effect on `engine`, and that its layers can be taken over.

    Raises:
        UnsupportedError: it has none, or they cannot.
    """
    activations = config.activations
    if activations is None:
        return
    pipeline = isinstance(engine, PipelineEngine) and engine.num_stages > 1
    problems = [] if activations.tensor is None else list(_tensor_problems(engine, activations.tensor))
    if activations.pipeline is not None and not pipeline:
        problems.append(f"{_PLACE}pipeline has no effect on an engine without pipeline stages; remove the key")
    if activations.experts is not None:
        problems += _expert_problems(engine)
    if activations.sequence is not None:
        problems += _sequence_problems(engine)
    if problems:
        raise UnsupportedError("; ".join(problems))


def _tensor_problems(engine: Any, settings: TensorActivations) -> Iterator[str]:
    place, modules = f"{_PLACE}tensor", list(engine.module.modules())
    split = any(is_column(module) or is_row(module) for module in modules)
    if tensor_size(engine) == 1:
        yield f"{place} has no effect, because no ranks share layers; train with tensor parallelism, or remove the key"
    elif not split and not isinstance(engine, PipelineEngine):  # a stage may have no decoder layers
        yield f"{place} has no effect, because AutoTP has split no layer of this model; remove the key"
    elif split and settings.bits is None and all(len(layers) == 1 for _, layers in find_siblings(engine.module)):
        yield f'{place}/merge has no effect, because no layers of this model read one tensor; add "bits": 8'
    if TensorParallel_Layer.tp_overlap_comm:
        yield f"{place}: tensor_parallel.tp_overlap_comm sums gradients in another way; write false"
    yield from compiled_problems(engine, place, "sums")


def _expert_problems(engine: Any) -> Iterator[str]:
    place, layers = f"{_PLACE}experts", find_expert_layers(engine)
    if not layers:
        yield (
            f"{place} has no effect, because no layer has experts on several ranks; spread them (ep_size of MoE, or "
            "expert_parallel.autoep_size), or remove the key"
        )
    elif shares_layers(engine):
        yield (
            f"{place}: experts combined with pipeline, tensor or sequence parallelism, which includes expert slicing, "
            "are not available in this version; use data and expert parallelism alone, or remove the key"
        )
    if any(getattr(layer, "use_tutel", False) for layer in layers):
        yield f"{place}: Tutel's layers (use_tutel) are not available in this version; write use_tutel=False"
    if any(getattr(layer, "comm_backend", "comm") != "comm" for layer in layers):
        yield f'{place}: expert_parallel.comm_backend exchanges by itself; write "comm"'
    yield from compiled_problems(engine, place, "exchanges")


def _sequence_problems(engine: Any) -> Iterator[str]:
    place = f"{_PLACE}sequence"
    if engine.sequence_parallel_size == 1:
        yield f"{place} has no effect, because no ranks share sequences; pass Ulysses' mpu or mesh, or remove the key"
    if isinstance(engine, PipelineEngine):
        yield f"{place} is not available with pipeline stages; remove the key"
    yield from compiled_problems(engine, place, "messages")
