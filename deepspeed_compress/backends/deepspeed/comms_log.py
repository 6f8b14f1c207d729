"""Records of compressed traffic in DeepSpeed's comms logger, so that `deepspeed.comm.log_summary()` includes it.

Compressed messages bypass `deepspeed.comm`, so its logger never sees them. Instead, each measured step
(`monitor.every`) adds one record of each kind.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm

from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.session.session import Session

SEAMS = (
    Seam(
        "deepspeed.utils.comms_logging:CommsLogger.append",
        ("self", "raw_name", "record_name", "latency", "msg_size"),
    ),
)

NAMES: Mapping[str, str] = {"bytes_sent": "deepspeed_compress_gradients", "bytes_weights": "deepspeed_compress_weights"}
"""Names of the records, by the meter's field, for traffic that may replace DeepSpeed's."""

_LEAST_MS = 1e-3
"""Minimum time of a record in milliseconds, because the logger divides by it. GPU clocks resolve no shorter time."""


def listens() -> bool:
    """Return True if DeepSpeed's comms logger is enabled, so that steps must be measured for it."""
    return bool(comm.comms_logger.enabled)


def log_traffic(session: Session, device: torch.device) -> None:
    """Record the step that just ended, if it is measured and the logger is enabled.

    Collective then, across all islands. Sizes are those of the rank that sends the most: the logger's own summary
    reduces over ranks, record by record, and hangs if their sizes differ. The meter times communication as a whole, so
    the two kinds share the time in proportion to their bytes.
    """
    names = _wanted(session, comm.comms_logger) if session.reports else {}
    if not names:
        return
    sizes = _largest([getattr(session.meter, kind) for kind in names], device)
    waited = session.meter.milliseconds()["communicate"]
    for name, size in zip(names.values(), sizes, strict=True):
        if size:
            # Recorded as "send": bytes that leave a rank, divided by the time.
            comm.comms_logger.append("send", name, max(_LEAST_MS, waited * size / sum(sizes)), size)


def _wanted(session: Session, logger: Any) -> dict[str, str]:
    """Return the entries of `NAMES` that are compressed in this run and that the logger is configured to record."""
    config = session.config
    ours = {"bytes_sent": config.gradients.method, "bytes_weights": config.weights.method}
    return {
        kind: name
        for kind, name in NAMES.items()
        if logger.enabled and ours[kind] != "none" and (logger.prof_all or name in logger.prof_ops)
    }


def _largest(sizes: list[int], device: torch.device) -> list[int]:
    """Return the element-wise maximum of `sizes` over all ranks. Collective."""
    found = torch.tensor(sizes, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return found.tolist()
