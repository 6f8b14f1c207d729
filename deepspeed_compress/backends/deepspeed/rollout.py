"""Weights for rollout workers, which the steps of an engine publish."""

from functools import partial
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from deepspeed_compress.config.models import Rollout
from deepspeed_compress.errors import ConfigError, install_command
from deepspeed_compress.monitor import VERSIONS, Journal
from deepspeed_compress.session.patches import Patches

if TYPE_CHECKING:
    from deepspeed_compress.rollout import Published, Publisher, Store


def _log(journal: Journal, published: "Published") -> None:
    """Log a version, whose keys docs/monitoring.md explains, in a file of the run, which rank 0 writes.

    Versions that the program itself publishes belong to no step, and are left out.
    """
    if published.step is None or dist.get_rank() != 0:
        return
    figures = {
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
    journal.add(VERSIONS, figures)


def attach_rollout(engine: Any, settings: Rollout, journal: Journal, patches: Patches) -> "Publisher":
    """Make and return the publisher of `engine`, which becomes its attribute `rollout`. Collective.

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
        partial(_log, journal),
        adapters=settings.adapters,
    )
    patches.replace(engine, "rollout", publisher)
    patches.on_undo(publisher.wait)
    return publisher


def _open(directory: str) -> "Store":
    from deepspeed_compress.rollout import open_store

    try:
        return open_store(directory)
    except (ConfigError, OSError) as error:
        raise ConfigError(
            f"/deepspeed_compress/rollout/directory: {directory!r} cannot be used: {error}; write a directory of all "
            'ranks, such as "/shared/policy", or the address of a server of a store, such as "tcp://host:29500"'
        ) from error
