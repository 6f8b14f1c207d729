"""Weights for rollout workers, which the steps of an engine publish."""

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deepspeed_compress.config.models import Rollout
from deepspeed_compress.errors import ConfigError, install_command
from deepspeed_compress.monitor import VERSIONS, Journal
from deepspeed_compress.session.patches import Patches

if TYPE_CHECKING:
    from deepspeed_compress.rollout import Published, Publisher, Store


class RolloutSteps:
    """Publication of an engine's weights before its first step, and after each step that was applied.

    The initial weights are published late, because a program may load a checkpoint before its first step.
    """

    def __init__(self, publisher: "Publisher") -> None:
        self._publisher = publisher

    def before_step(self, step: int) -> None:
        """Publish the weights after `step` steps, the first ones of this process, unless the program has done so."""
        if not self._publisher.calls:
            self._publisher.publish(step=step)

    def step_ended(self, step: int, applied: bool) -> None:
        """Publish the weights after `step` steps if the last one has changed them."""
        if applied:
            self._publisher.publish(step=step)


class _VersionLog:
    """Log of the versions that the steps of an engine publish, in a file of the run, which rank 0 writes."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def add(self, published: "Published") -> None:
        """Add a version. Those that the program itself publishes belong to no step, and are left out."""
        if published.step is not None and dist.get_rank() == 0:
            self._journal.add(VERSIONS, _figures(published))


def _figures(published: "Published") -> dict[str, float | None]:
    """Return the line of a version, whose keys docs/monitoring.md explains."""
    return {
        "step": published.step,
        "rollout_version": published.version,
        "rollout_bytes": published.change_bytes,
        "rollout_full_bytes": published.full_bytes,
        "rollout_changed": published.changed,
        "rollout_encode_ms": 1e3 * published.encode_seconds,
        "rollout_write_ms": 1e3 * published.write_seconds,
        "rollout_publish_ms": 1e3 * published.seconds,
        "rollout_age_ms": None if published.age is None else 1e3 * published.age,
        "rollout_lag": published.lag,
    }


def attach_rollout(engine: Any, settings: Rollout, journal: Journal, patches: Patches) -> RolloutSteps:
    """Make the publisher of `engine`, which becomes its attribute `rollout`. Collective.

    Raises:
        ConfigError: a package is not installed, or the directory or the address of the store cannot be used.
        ImportError: a package for stores at an address is not installed.
        UnsupportedError: ranks of the engine hold different parts of the model, other than by ZeRO.
    """
    try:
        from deepspeed_compress.rollout import Publisher
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"/deepspeed_compress/rollout needs {error.name}; write: {install_command('rollout')}"
        ) from None
    publisher = Publisher(
        engine,
        _open(settings.directory),
        settings.dtype,
        settings.every,
        settings.full_every,
        settings.keep_full,
        settings.asynchronous,
        settings.lossy_bits,
        _VersionLog(journal).add,
        adapters=settings.adapters,
    )
    patches.replace(engine, "rollout", publisher)
    patches.on_undo(publisher.wait)
    return RolloutSteps(publisher)


def _open(directory: str) -> "Store":
    from deepspeed_compress.rollout import open_store

    try:
        return open_store(directory)
    except (ConfigError, OSError) as error:
        raise ConfigError(
            f"/deepspeed_compress/rollout/directory: {directory!r} cannot be used: {error} (allowed: a directory that "
            'all ranks can write to, or the address of a server of a store; write "/shared/policy" or '
            '"tcp://host:29500")'
        ) from error
