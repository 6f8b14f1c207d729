"""Packages from a directory of wheels, installed for one run without changing the machine."""

import subprocess
import sys
from pathlib import Path

from deepspeed_compress.errors import CompressError

COMMANDS = (
    "pip wheel --no-deps -w {0} deepspeed",
    "pip wheel -w {0} einops hjson msgpack ninja packaging psutil py-cpuinfo pydantic pytest rich safetensors tqdm "
    "transformers zstandard",
)
"""Commands that fill a directory with all packages needed besides torch, Triton and numpy.

DeepSpeed is fetched without its dependencies, because they include torch.
"""


def install_wheels(directory: Path, target: Path) -> None:
    """Unpack all wheels of `directory` into `target`, which must then be added to PYTHONPATH.

    Raises:
        CompressError: There are no wheels, or pip fails.
    """
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        wanted = " && ".join(COMMANDS).format(directory)
        raise CompressError(f"--wheels {directory}: holds no .whl file; fill it where there is a network: {wanted}")
    options = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--target", str(target))
    command = [sys.executable, "-m", "pip", "install", *options, *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompressError(f"--wheels {directory}: {(done.stderr or done.stdout).strip()[-500:]}")
