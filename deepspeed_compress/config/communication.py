"""Settings of everything that this package sends."""

from deepspeed_compress.config.durations import BitRate
from deepspeed_compress.config.methods import Model


class Communication(Model):
    """Settings of the messages with gradients and weights."""

    max_rate: BitRate | None = None
    """Largest rate at which all processes of a host together send the messages of this package, so that others can use
    the link; null has no limit. Messages of DeepSpeed itself are not limited."""
