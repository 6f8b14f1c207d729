"""Settings of everything that this package sends."""

from deepspeed_compress.config.durations import BitRate
from deepspeed_compress.config.methods import Model

__all__ = ["Communication"]


class Communication(Model):
    """Settings of messages of gradients and weights."""

    max_rate: BitRate | None = None
    """How fast all processes of a host together may send what this package exchanges, such as "200 Mbit/s", so that
    others on the link can work; null as fast as it goes. What DeepSpeed sends by itself is not slowed down."""
