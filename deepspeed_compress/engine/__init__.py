"""DeepSpeed's seams, one file each, and the entry points that attach to them."""

from deepspeed_compress.engine.attach import attach, detach, initialize, install

__all__ = ["attach", "detach", "initialize", "install"]
