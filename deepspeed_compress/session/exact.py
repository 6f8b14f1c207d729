"""Exact weights before they are read: compressed ones lag behind the fp32 master weights by one compression error.

Bringing them up to date is a collective. It is done in calls that all ranks must make: `save_checkpoint` and
`load_checkpoint` (`checkpointing/deepspeed`), `save_16bit_model`, `models.save_pretrained`; under Trainer before
each of its checkpoints and when training ends (`integrations`). Reading a state dict must not wait for other ranks,
because rank 0 may do it alone.
"""

from collections.abc import Callable
from typing import Any

from deepspeed_compress.monitor import Meter
from deepspeed_compress.session.patches import Patches


class ExactWeights:
    """Updater of an engine's weights.

    Args:
        steps_taken: returns the number of optimizer steps that the engine has taken.
        update: copies the fp32 master weights into the weights of all ranks. Collective.
        meter: counts what `update` sends.
    """

    def __init__(self, steps_taken: Callable[[], int], update: Callable[[], None], meter: Meter) -> None:
        self._steps_taken = steps_taken
        self._update = update
        self._meter = meter
        self._exact_at = steps_taken()

    @property
    def behind(self) -> bool:
        """Return True if weights may lag behind the fp32 master weights; the same on all ranks."""
        return self._steps_taken() != self._exact_at

    def synchronise(self) -> None:
        """Copy the fp32 master weights into the weights of all ranks if they may lag. All ranks must call it."""
        if self.behind:
            self.renew()

    def renew(self) -> None:
        """Do the same as `synchronise`, even if the weights seem exact, as after loading."""
        with self._meter.counting_exact_weights():
            self._update()
        self._exact_at = self._steps_taken()


def attach_exact(engine: Any, update: Callable[[], None], meter: Meter, patches: Patches) -> ExactWeights:
    """Return the engine's `ExactWeights`, called before `save_16bit_model`, which all ranks must call."""
    exact = ExactWeights(lambda: int(engine.global_steps), update, meter)
    patches.precede(engine, "save_16bit_model", exact.synchronise)
    return exact
