"""Packages from a directory of wheels, for one run: nothing of the machine is changed."""

import subprocess
import sys
from pathlib import Path

from deepspeed_compress.errors import CompressError

__all__ = ["WANTED", "install_wheels"]

WANTED = (
    *("deepspeed", "hjson", "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "typing-extensions"),
    *("einops", "msgpack", "ninja", "packaging", "psutil", "py-cpuinfo", "tqdm"),
    *("rich", "markdown-it-py", "mdurl", "pygments", "safetensors"),
)
"""What DeepSpeed, the section and the table need besides torch and numpy; less where the machine has some of them."""


def install_wheels(directory: Path, target: Path) -> None:
    """Unpack all wheels of `directory` into `target`, to be put on PYTHONPATH. CompressError when that fails."""
    wheels = sorted(directory.glob("*.whl"))
    if not wheels:
        raise CompressError(
            f"--wheels {directory}: holds no .whl file; fill it where there is a network: "
            f"pip wheel --no-deps -w {directory} {' '.join(WANTED)}"
        )
    options = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--target", str(target))
    command = [sys.executable, "-m", "pip", "install", *options, *map(str, wheels)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CompressError(f"--wheels {directory}: {(done.stderr or done.stdout).strip()[-500:]}")
