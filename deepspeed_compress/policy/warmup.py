"""Dense start: the first steps are sent uncompressed, while gradients are large and change direction quickly."""

from dataclasses import dataclass

__all__ = ["DenseWarmUp"]


@dataclass(frozen=True)
class DenseWarmUp:
    """Optimizer steps 0 to `steps` - 1 go uncompressed (skipped steps count: they are steps of DeepSpeed)."""

    steps: int = 0

    def dense(self, step: int) -> bool:
        return step < self.steps
