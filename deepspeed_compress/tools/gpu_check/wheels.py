"""Packages from a directory of wheels, for one run: nothing of the machine is changed."""

import subprocess
import sys
from pathlib import Path

from deepspeed_compress.errors import CompressError

__all__ = ["COMMANDS", "install_wheels"]

COMMANDS = (
    "pip wheel --no-deps -w {0} deepspeed",
    "pip wheel -w {0} hjson pydantic safetensors einops msgpack ninja packaging psutil py-cpuinfo tqdm rich",
)
"""What fills a directory with all that is needed besides torch, Triton and numpy: DeepSpeed alone would bring torch."""


def install_wheels(directory: Path, target: Path) -> None:
    """Unpack all wheels of `directory` into `target`, to be put on PYTHONPATH. CompressError when that fails."""
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        wanted = " && ".join(COMMANDS).format(directory)
        raise CompressError(f"--wheels {directory}: holds no .whl file; fill it where there is a network: {wanted}")
    options = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--target", str(target))
    command = [sys.executable, "-m", "pip", "install", *options, *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompressError(f"--wheels {directory}: {(done.stderr or done.stdout).strip()[-500:]}")
