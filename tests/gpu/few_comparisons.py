"""Program that compares the fewest kernels of each kind, for tools that slow everything down.

`python -m tests.gpu.few_comparisons` writes a line for each comparison: `PREFIX`, its name, and what is wrong.
"""

from typing import Any

import torch

from tests.gpu.comparisons import Comparison
from tests.gpu.operations import few

PREFIX = "compared "
SIZES = (1, 2049, 5000)


def main() -> None:
    """Compare, and go on after an error."""
    from deepspeed_compress.compression.kernels import gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for row in few():
        print(f"{PREFIX}{row.name}: {wrong(row, gpu, device)}", flush=True)


def wrong(row: Comparison, kernels: Any, device: torch.device) -> str:
    """Return how results differ although equal bits are promised, or the error, or ""."""
    try:
        found = next(filter(None, (row.differs(kernels, device, numel) for numel in SIZES)), "")
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return found if row.promised else ""


if __name__ == "__main__":
    main()
