"""Interfaces of what works next to a session: checkpoints in the background, and exchanges with other islands."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from deepspeed_compress.compression.state import Contents


class BackgroundCheckpoints(Protocol):
    """Checkpoints that are written in the background."""

    def set_client_state(self, client_state: Callable[[], dict[str, Any]]) -> None:
        """Save what `client_state` returns as the `client_state` of checkpoints that are saved automatically."""

    def write_state(self, contents: Contents, file: Path) -> None:
        """Have a state written with the checkpoint that is being saved, as `compression.state.write` does."""

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


class StepFollower(Protocol):
    """Part of an engine that works in another way if the engine is left alone in a step."""

    def follow(self, alone: bool) -> None:
        """Prepare for the step that begins, in which the engine is left alone if `alone`."""

    def check(self) -> None:
        """Check that the next step may be of the other kind. Raises SeamError if other code prevents it."""


class IslandExchanges(Protocol):
    """Exchanges with other islands."""

    @property
    def number(self) -> int:
        """Return the unique number of this island. Numbers are never reused."""

    def step_ended(self, step: int) -> None:
        """Update after optimizer step `step` (1-based). Collective."""
