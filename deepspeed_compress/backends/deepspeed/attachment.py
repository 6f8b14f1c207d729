"""Description of an engine for the parts of its session."""

import functools
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed import byte_counts, comms_log
from deepspeed_compress.backends.deepspeed.engine_facts import engine_kind
from deepspeed_compress.backends.deepspeed.gradients.zero_0 import may_begin_early
from deepspeed_compress.backends.deepspeed.groups import find_separate, make_groups
from deepspeed_compress.backends.deepspeed.node_gradients import may_average_early
from deepspeed_compress.backends.deepspeed.units import IslandUnit, deciding_group, node_unit
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.policy import AllowedChoices
from deepspeed_compress.session.parts import Attachment


def describe(engine: Any, config: CompressConfig, island: IslandUnit | None, parameters: Parameters) -> Attachment:
    """Return the description of the engine and of this rank from which the session's parts are made.

    Args:
        engine: the engine.
        config: the section.
        island: this rank's island, if the ranks of this job were divided into islands; None otherwise.
        parameters: the model's parameters.
    """
    # Without a guard, only loss scalers skip steps: those of DeepSpeed's own optimizers, and torch's.
    scaled = hasattr(engine.optimizer, "overflow") or engine.torch_autocast_z0_gradscaler is not None
    skips = scaled or config.guard is not None
    in_nodes, without_zero = node_unit(engine) is not None, engine_kind(engine) == "zero_0"
    overlaps = may_average_early(engine) if in_nodes else without_zero and may_begin_early(engine)
    return Attachment(
        config,
        engine.config,
        parameters,
        engine.device,
        byte_counts.make_byte_report(engine),
        # Each island writes its own decisions, under the id of one common run.
        writes=dist.get_rank(deciding_group(engine)) == 0,
        make_groups=functools.partial(make_groups, engine, config),
        find_separate=functools.partial(find_separate, engine),
        transactional=skips or overlaps,
        available=_available(engine, config),
        step=engine.global_steps,
        sink=engine.monitor,
        island=None if island is None else island.number,
        others_listen=comms_log.listens,
    )


def _available(engine: Any, config: CompressConfig) -> AllowedChoices:
    """Return the settings that an adaptive policy may choose from.

    Under ZeRO 3 no rank keeps the weights that it gathers, so weight settings are not among them.
    """
    if config.adaptive is None:
        return AllowedChoices()
    low_rank = equal_machines(engine.device, deciding_group(engine))
    return AllowedChoices(low_rank, weights=engine_kind(engine) != "zero_3")


def equal_machines(device: torch.device, group: ProcessGroup | None = None) -> bool:
    """Return True if PyTorch would choose the same kernels on all ranks of `group`, or of the job if None.

    Otherwise, a CompressWarning is issued on all ranks. PowerSGD needs equal kernels, because every rank computes the
    mean of matrices for itself. Collective.
    """
    found = gather_objects(_machine(device), group)
    kinds = sorted(set(map(str, found)))
    if len(kinds) > 1:
        warnings.warn(
            "/deepspeed_compress/adaptive: powersgd is not among the default candidates, because the ranks run on "
            f"different machines ({'; '.join(kinds)}), and powersgd needs the same bits from all ranks",
            CompressWarning,
            stacklevel=2,
        )
    return len(kinds) == 1


def _machine(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else torch.backends.cpu.get_cpu_capability()
    return f"torch {torch.__version__}, {name}, {torch.get_num_threads()} threads"
