"""Oldest PyTorch version that works, for every engine."""

from packaging.version import Version

from deepspeed_compress.errors import SeamError

OLDEST_TORCH = Version("2.7")


def check_torch(found: str) -> None:
    """Raise SeamError if PyTorch version `found` is too old. A preview of a release counts as that release."""
    if Version(found).release < OLDEST_TORCH.release:
        raise SeamError(
            f"PyTorch {found} is installed, but deepspeed_compress needs torch >={OLDEST_TORCH}; install it: "
            f"pip install 'torch>={OLDEST_TORCH}'"
        )
