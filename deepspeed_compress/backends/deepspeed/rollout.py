"""Weights for rollout workers, which the steps of an engine publish."""

from typing import TYPE_CHECKING, Any

from deepspeed_compress.config import Rollout
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.session.patches import Patches

if TYPE_CHECKING:
    from deepspeed_compress.rollout import Publisher


class RolloutSteps:
    """Publication of an engine's weights before its first step, and after each step that was applied.

    The initial weights are published late, because a program may load a checkpoint before its first step.
    """

    def __init__(self, publisher: "Publisher") -> None:
        self._publisher = publisher

    def before_step(self) -> None:
        """Publish the initial weights, unless the program has done so."""
        if not self._publisher.calls:
            self._publisher.publish()

    def step_ended(self, applied: bool) -> None:
        """Publish the weights if the step has changed them."""
        if applied:
            self._publisher.publish()


def attach_rollout(engine: Any, settings: Rollout, patches: Patches) -> RolloutSteps:
    """Make the publisher of `engine`, which becomes its attribute `rollout`. Collective.

    Raises:
        ConfigError: a package is not installed, or the address of a store is malformed.
        ImportError: a package for stores at an address is not installed.
        UnsupportedError: ranks of the engine hold different parts of the model, other than by ZeRO.
    """
    try:
        from deepspeed_compress.rollout import Publisher, open_store
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'/deepspeed_compress/rollout needs {error.name}; write: pip install "deepspeed-compress[rollout]"'
        ) from None
    publisher = Publisher(
        engine,
        open_store(settings.directory),
        settings.dtype,
        settings.every,
        settings.full_every,
        settings.keep_full,
        settings.asynchronous,
        settings.lossy_bits,
    )
    patches.replace(engine, "rollout", publisher)
    patches.on_undo(publisher.wait)
    return RolloutSteps(publisher)
