"""Check that all ranks compute equal bits from equal bits: on equal processors, with the same number of threads."""

import warnings

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.errors import CompressWarning


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
