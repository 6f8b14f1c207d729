"""Program that compares the fewest kernels of each kind, for tools that slow everything down.

`python -m tests.gpu.few_comparisons` writes a line for each comparison: `PREFIX`, its name, and what differs.
"""

import torch

from tests.gpu.operations import few

PREFIX = "compared "
SIZES = (1, 2049, 5000)


def main() -> None:
    from deepspeed_compress.compression.kernels import gpu

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for row in few():
        found = (row.differs(gpu, device, numel) for numel in SIZES)
        print(f"{PREFIX}{row.name}: {next(filter(None, found), '')}", flush=True)


if __name__ == "__main__":
    main()
