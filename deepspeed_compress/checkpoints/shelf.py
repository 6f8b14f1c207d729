"""Which checkpoints in memory are still of use, known alike on all ranks without asking each other once more."""

from collections.abc import Sequence
from dataclasses import dataclass, field

__all__ = ["Shelf"]

_KEPT = 2
"""Newest ones that all ranks have written: one may turn out to be damaged."""


@dataclass
class Shelf:
    """Numbers and tags of what was saved in memory, and which of them were sent to other hosts too.

    `written`, `copied`: all ranks have ended everything up to these numbers. What has failed on a rank is forgotten on
    all. `copies`: whether anything is sent.
    """

    copies: bool
    written: int = 0
    copied: int = 0
    _saved: list[tuple[int, str]] = field(default_factory=list)
    _sent: list[tuple[int, str]] = field(default_factory=list)
    _failed: dict[bool, tuple[int, bool]] = field(default_factory=dict)
    """The last that failed to be written, and to be sent, and whether it was news."""

    def begin(self, number: int, tag: str) -> bool:
        """The one with `number` is saved now. Whether it is sent too: not while another one is on its way."""
        self._saved.append((number, tag))
        send = self.copies and not self.sending
        if send:
            self._sent.append((number, tag))
        return send

    @property
    def sending(self) -> bool:
        """Whether a copy is on its way, as far as all ranks know."""
        return any(number > self.copied for number, _ in self._sent)

    def forget(self, number: int, of_copy: bool) -> bool:
        """It is not whole, or its copies are not. What was not written is not sent either. Whether that is news: others
        may have failed before, and none was whole since."""
        self._sent = [one for one in self._sent if one[0] != number]
        if not of_copy:
            self._saved = [one for one in self._saved if one[0] != number]
        before, news = self._failed.get(of_copy, (0, True))
        if number != before:
            ended, found = (self.copied, self._sent) if of_copy else (self.written, self._saved)
            news = not before or any(before < one <= ended for one, _ in found)
        self._failed[of_copy] = (number, news)
        return news

    def begin_anew(self, tag: str | None) -> None:
        """Training goes on from `tag`, whole in memory; None: from somewhere else."""
        self._saved = [] if tag is None else [(0, tag)]
        self._sent = list(self._saved) if self.copies else []

    def of_use(self) -> frozenset[str]:
        """The tags that stay: the newest two that are whole, the newest of which all copies have arrived, and all that
        are not at their end."""
        self._saved = _newest(self._saved, self.written, _KEPT)
        self._sent = _newest(self._sent, self.copied, 1)
        return frozenset(tag for _, tag in (*self._saved, *self._sent))


def _newest(found: Sequence[tuple[int, str]], ended: int, count: int) -> list[tuple[int, str]]:
    done = [one for one in found if one[0] <= ended]
    return done[-count:] + [one for one in found if one[0] > ended]
