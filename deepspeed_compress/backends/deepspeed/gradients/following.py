"""Replacement of an engine's reduction of gradients, in all steps or in those that are not left to the engine."""

from collections.abc import Callable

from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session

Attach = Callable[[Patches], None]
"""Function that replaces methods, and makes the given patches undo that."""


def attach_reduction(session: Session, replace: Attach, count: Attach) -> None:
    """Replace the reduction of gradients. In steps of the engine alone, only count its bytes.

    Args:
        session: the engine's session.
        replace: replaces the reduction.
        count: only counts the bytes of DeepSpeed's own reduction.
    """
    if session.config.auto is not None:
        following = _Following(replace, count)
        session.patches.on_undo(following.undo)
        session.on_step(following)
    else:
        (count if session.alone else replace)(session.patches)


class _Following:
    """Reduction that is replaced or only counted, as each step demands.

    Nothing is pending between steps, so the two may be exchanged there.
    """

    def __init__(self, replace: Attach, count: Attach) -> None:
        self._replace, self._count = replace, count
        self._patches = Patches()
        self._alone: bool | None = None

    def follow(self, alone: bool) -> None:
        """Leave the reduction of the step that begins to the engine if `alone`, or replace it."""
        if alone == self._alone:
            return
        self._patches.undo()
        self._alone = alone
        (self._count if alone else self._replace)(self._patches)

    def check(self) -> None:
        """Check that the reduction can be exchanged; see `Patches.check`."""
        self._patches.check()

    def undo(self) -> None:
        """Restore DeepSpeed's own methods."""
        self._patches.undo()
