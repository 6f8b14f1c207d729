"""Exact weights for whoever is about to read them: compressed ones are behind their masters by one compression error.

To bring them up to date is a collective. It is done where all ranks come by contract: `save_checkpoint` and
`load_checkpoint` (`engine.checkpoints.checkpoint`), `save_16bit_model`, `models.save_pretrained`; under Trainer
before each of its checkpoints and when training ends (`integrations`). To read a state dict may be the work of rank 0
alone, and must not wait for others.
"""

from collections.abc import Callable
from typing import Any

from deepspeed_compress.session.patches import Patches

__all__ = ["ExactWeights", "attach_exact"]


class ExactWeights:
    """Brings the weights of `engine` up to date by `bring`, once for each optimizer step."""

    def __init__(self, engine: Any, bring: Callable[[], None]) -> None:
        self._engine = engine
        self._bring = bring
        self._exact_at = engine.global_steps

    @property
    def behind(self) -> bool:
        """Whether weights may be behind their masters; the same on all ranks."""
        return bool(self._engine.global_steps != self._exact_at)

    def synchronise(self) -> None:
        """Weights of all ranks become those of their masters, if they may be behind. All ranks must call it."""
        if self.behind:
            self.renew()

    def renew(self) -> None:
        """As `synchronise`, but whatever has been done before, as after loading."""
        self._bring()
        self._exact_at = self._engine.global_steps


def attach_exact(engine: Any, bring: Callable[[], None], patches: Patches) -> ExactWeights:
    """Exact weights in `save_16bit_model`, which DeepSpeed wants all ranks to call, and for who else asks for them."""
    exact = ExactWeights(engine, bring)
    patches.precede(engine, "save_16bit_model", exact.synchronise)
    return exact
