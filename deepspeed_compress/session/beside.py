"""What stands beside a session, and is none of its work: figures of all ranks, checkpoints and other islands."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed_compress.checkpoints.snapshot import Call
from deepspeed_compress.session.observer import Losses
from deepspeed_compress.session.probing import Prober

__all__ = ["Exchanges", "Saving", "Watch"]


@dataclass(frozen=True)
class Watch:
    """What a policy that observes needs of all ranks: their losses; from a figure of this one the largest of all; and,
    where it adapts, the measurements of candidates."""

    losses: Losses
    largest: Callable[[float], float]
    prober: Prober | None = None


class Saving(Protocol):
    """Checkpoints that are written beside training."""

    client_state: Callable[[], dict[str, Any]]
    """Gives what the program adds to checkpoints that are saved without being asked for: their `client_state`."""

    @property
    def held(self) -> Callable[[], AbstractContextManager[None]]:
        """While files of the checkpoint that is being saved get their names."""

    def add(self, call: Call) -> None:
        """Have `call` write files of the checkpoint that is being saved."""

    def newest_step(self, directory: str) -> int | None:
        """Return the step of the newest checkpoint in `directory`; None without any. Collective."""

    def before_step(self) -> None:
        """Before masters change."""

    def step_ended(self, step: int, applied: bool) -> None:
        """After each optimizer step."""

    def wait(self) -> None:
        """Until all that was saved is written. Collective; raises StateError as `on_error` says."""

    def leave_by(self, leave: Callable[[], None]) -> None:
        """Have `leave` called on all ranks when SIGTERM has come."""

    def listen(self, tell: Callable[[bool], None]) -> None:
        """Have SIGTERM save from now on, and tell whether it does, now and when that changes."""


class Exchanges(Protocol):
    """Exchanges with other islands."""

    @property
    def number(self) -> int:
        """Of this island among all that ever were."""

    def step_ended(self, step: int) -> None:
        """After optimizer step `step`, from 1. Collective."""
