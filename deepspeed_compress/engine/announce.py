"""One line at the start: what is compressed, how, and what it is expected to send and to keep."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from deepspeed_compress.communication.reduction import Parameters
from deepspeed_compress.config import CompressedWeights, brief, find_missing
from deepspeed_compress.config.numbers import size
from deepspeed_compress.engine.expected import LATE, mean_cost, one_bucket, uncompressed
from deepspeed_compress.engine.groups import reduction_group
from deepspeed_compress.engine.limits import has_optimizer
from deepspeed_compress.engine.session import Session
from deepspeed_compress.engine.traffic import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from deepspeed_compress.errors import CompressWarning

__all__ = ["announce", "announcement", "warn_of_uncompressed"]


def announce(engine: Any, session: Session, parameters: Parameters, kind: str) -> None:
    """Write the line to standard error, on rank 0, unless `monitor.announce` is false. `kind`: as of `engine_kind`."""
    if engine.global_rank != 0 or not session.config.monitor.announce:
        return
    try:
        text = announcement(engine, session, parameters, kind)
        print(f"deepspeed_compress: {text}", file=sys.stderr, flush=True)
    except Exception as error:  # what only tells must not stop one rank, for which the others would wait
        warnings.warn(f"what is compressed cannot be told: {error!r}", CompressWarning, stacklevel=2)


def warn_of_uncompressed(engine: Any, ds_config: Mapping[str, Any]) -> None:
    """CompressWarning, on rank 0, that `engine` trains without compression, as `ds_config` has no section."""
    problem = find_missing(ds_config)
    if problem is not None and engine.global_rank == 0 and has_optimizer(engine):
        meant = 'Or say that it is meant, by "gradients": {"method": "none"} in it'
        text = f"an engine is not compressed: {problem} {meant}"
        warnings.warn(text, CompressWarning, stacklevel=3)


def announcement(engine: Any, session: Session, parameters: Parameters, kind: str) -> str:
    """The line: settings, what is exempt, megabytes that rank 0 sends in a step with and without, and keeps."""
    config, group = session.config, reduction_group(engine)
    methods = f"gradients {brief(config.gradients)}, weights {brief(config.weights)}"
    where = f"ZeRO {engine.zero_optimization_stage()}, {group.size()} data-parallel ranks"
    parts = [f"{methods}; {where}"]
    if group.size() == 1:
        return f"{parts[0]}; nothing is sent, and so nothing compressed"
    if config.gradients.method != "none":
        parts += _gradients(engine, session, parameters, kind)
    if isinstance(config.weights, CompressedWeights):
        parts.append(_weights(engine, config.weights, parameters, kind))
    if len(parts) == 1:
        return f"{parts[0]}; nothing is compressed"
    if config.schedule.warmup_steps:
        parts.append(f"the first {config.schedule.warmup_steps} steps are uncompressed")
    return "; ".join(parts) + ' ("monitor": {"announce": false} leaves this line out)'


def _gradients(engine: Any, session: Session, parameters: Parameters, kind: str) -> list[str]:
    group, everywhere = reduction_group(engine), kind == "zero_0"
    sizes = [(name, parameters.numel(name)) for name in parameters.shapes]
    partition = one_bucket(sizes, group.size(), apart=kind == "zero_3")
    total = sum(numel for _, numel in sizes)
    raw = uncompressed(session.chosen_reducer(LATE), partition)
    found = mean_cost(session, partition, everywhere)
    # ZeRO 2 and 3 reduce in every micro-step; of ZeRO 3 alone, and not on gloo, DeepSpeed reduces to the owners.
    times = engine.gradient_accumulation_steps() if engine.zero_optimization_stage() >= 2 else 1
    ring = ring_reduce_scatter if kind == "zero_3" and dist.get_backend(group) != "gloo" else ring_all_reduce
    alone = times * ring(total * parameters.dtype.itemsize, group.size())
    share = 1 - sum(parameters.numel(name) for name in raw) / max(1, total)
    return [
        f"{len(sizes) - len(raw)} of {len(sizes)} parameters are compressed ({share:.1%} of the elements), "
        f"{len(raw)} exempt",
        f"rank 0 sends about {size(times * found.sent)} of gradients a step, uncompressed {size(alone)}",
        f"residuals take up to {size(found.kept)}",
    ]


def _weights(engine: Any, weights: CompressedWeights, parameters: Parameters, kind: str) -> str:
    ranks, itemsize = reduction_group(engine).size(), engine.get_data_types()[0].itemsize
    numels = {name: parameters.numel(name) for name in parameters.shapes}
    raw = [numels[name] for name in parameters.uncompressed(weights.min_numel) & numels.keys()]
    coded = weights.compressor().payload_bytes(sum(numels.values()) - sum(raw))
    sent = ring_all_gather(coded + sum(raw) * itemsize, ranks)
    alone = ring_all_gather(sum(numels.values()) * itemsize, ranks)
    when = "each time they are gathered" if kind == "zero_3" else "a step"
    return f"about {size(sent)} of weights {when}, uncompressed {size(alone)}"
