"""Our traffic in DeepSpeed's comms logger, so that `deepspeed.comm.log_summary()` tells of it beside its own.

Our messages do not go through `deepspeed.comm`, so its logger never sees them. A measured step (`monitor.every`) adds
one record of each kind instead.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm

from deepspeed_compress.engine.seams import Seam
from deepspeed_compress.session.session import Session

__all__ = ["NAMES", "SEAMS", "listens", "log_traffic"]

SEAMS = (
    Seam(
        "deepspeed.utils.comms_logging:CommsLogger.append",
        ("self", "raw_name", "record_name", "latency", "msg_size"),
    ),
)

NAMES: Mapping[str, str] = MappingProxyType(
    {"bytes_sent": "deepspeed_compress_gradients", "bytes_weights": "deepspeed_compress_weights"}
)
"""Names of the records by fields of the meter: of what we may send in DeepSpeed's place."""

_LEAST_MS = 1e-3
"""The logger divides by the time; clocks of GPUs tell no less than this."""


def listens() -> bool:
    """Whether DeepSpeed's logger wants to know, so that steps are measured for it."""
    return bool(comm.comms_logger.enabled)


def log_traffic(session: Session, device: torch.device) -> None:
    """Record the step that has just ended, if it is measured and the logger listens. Collective then, in all islands.

    Sizes are those of the rank that sends most: the logger's own summary reduces over the ranks, record by record, and
    hangs when their sizes differ. The meter times communication as a whole; two kinds share it by their bytes.
    """
    names = _wanted(session, comm.comms_logger) if session.reports else {}
    if not names:
        return
    sizes = _largest([getattr(session.meter, kind) for kind in names], device)
    waited = session.meter.milliseconds()["communicate"]
    for name, size in zip(names.values(), sizes, strict=True):
        if size:
            # Counted like "send": the bytes that leave a rank, over the time.
            comm.comms_logger.append("send", name, max(_LEAST_MS, waited * size / sum(sizes)), size)


def _wanted(session: Session, logger: Any) -> dict[str, str]:
    """Those of `NAMES` that are ours in this run, and that the logger is set to take."""
    config = session.config
    ours = {"bytes_sent": config.gradients.method, "bytes_weights": config.weights.method}
    return {
        kind: name
        for kind, name in NAMES.items()
        if logger.enabled and ours[kind] != "none" and (logger.prof_all or name in logger.prof_ops)
    }


def _largest(sizes: list[int], device: torch.device) -> list[int]:
    """Of all ranks, one by one."""
    found = torch.tensor(sizes, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
