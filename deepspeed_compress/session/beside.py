"""Parts that work next to a session: figures of all ranks, checkpoints, and exchanges with other islands."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed_compress.checkpointing.snapshot import Call
from deepspeed_compress.session.observer import Losses
from deepspeed_compress.session.probing import Prober

__all__ = ["Exchanges", "Saving", "Watch"]


@dataclass(frozen=True)
class Watch:
    """Figures of all ranks that an observing policy needs.

    Attributes:
        losses: mean losses of all ranks.
        largest: returns the largest value of all ranks, from this rank's. Collective.
        prober: measurements of candidates; None if the policy does not adapt.
    """

    losses: Losses
    largest: Callable[[float], float]
    prober: Prober | None = None


class Saving(Protocol):
    """Checkpoints that are written in the background."""

    @property
    def held(self) -> Callable[[], AbstractContextManager[None]]:
        """Context in which the files of the checkpoint that is being saved get their names."""

    def set_client_state(self, client_state: Callable[[], dict[str, Any]]) -> None:
        """Save what `client_state` returns as the `client_state` of checkpoints that are saved automatically."""

    def add(self, call: Call) -> None:
        """Have `call` write files of the checkpoint that is being saved."""

    def newest_step(self, directory: str) -> int | None:
        """Return the step of the newest checkpoint in `directory`; None without any. Collective."""

    def before_step(self) -> None:
        """Prepare for a change of the fp32 master weights."""

    def step_ended(self, step: int, applied: bool) -> None:
        """Update after each optimizer step."""

    def wait(self) -> None:
        """Wait until everything that was saved is written. Collective; raises StateError as `on_error` says."""

    def leave_by(self, leave: Callable[[], None]) -> None:
        """Call `leave` on all ranks after SIGTERM has arrived."""

    def listen(self, tell: Callable[[bool], None]) -> None:
        """Save on SIGTERM from now on, and report to `tell` whether it does, now and whenever that changes."""


class Exchanges(Protocol):
    """Exchanges with other islands."""

    @property
    def number(self) -> int:
        """Return the unique number of this island. Numbers are never reused."""

    def step_ended(self, step: int) -> None:
        """Update after optimizer step `step` (1-based). Collective."""
