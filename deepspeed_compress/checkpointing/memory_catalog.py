"""Catalog of the checkpoints in memory that are still needed. Equal on all ranks without further communication."""

from collections.abc import Sequence
from dataclasses import dataclass, field

_KEPT = 2
"""Number of complete checkpoints to keep, since one may turn out to be damaged."""


@dataclass
class MemoryCatalog:
    """Numbers and tags of the checkpoints that were saved in memory, and of those that were also sent to other hosts.

    Attributes:
        copies: True if checkpoints are sent.
        written: all ranks have finished writing everything up to this number.
        copied: all ranks have finished sending everything up to this number.
    """

    copies: bool
    written: int = 0
    copied: int = 0
    _saved: list[tuple[int, str]] = field(default_factory=list)
    _sent: list[tuple[int, str]] = field(default_factory=list)
    _failed: dict[bool, tuple[int, bool]] = field(default_factory=dict)
    """Number of the last failure to write (False) and to send (True), and whether it was news."""

    def begin(self, number: int, tag: str) -> bool:
        """Register the checkpoint `number`, and return True if it should also be sent.

        It is not sent while another one is being sent.
        """
        self._saved.append((number, tag))
        send = self.copies and not self.sending
        if send:
            self._sent.append((number, tag))
        return send

    def ranks_agreed(self, written: int, copied: int) -> None:
        """Note an agreement of all ranks on what is written and copied."""
        self.written, self.copied = written, copied

    @property
    def sending(self) -> bool:
        """Return True if a copy is in progress, as far as all ranks know."""
        return any(number > self.copied for number, _ in self._sent)

    def mark_failed(self, number: int, of_copy: bool) -> bool:
        """Remove the checkpoint `number`, whose writing or, if `of_copy`, sending failed. Return True if this is news.

        A checkpoint that was not written is not sent either. A failure is not news if another one preceded it and no
        checkpoint was complete in between.
        """
        self._sent = [one for one in self._sent if one[0] != number]
        if not of_copy:
            self._saved = [one for one in self._saved if one[0] != number]
        before, news = self._failed.get(of_copy, (0, True))
        if number != before:
            ended, found = (self.copied, self._sent) if of_copy else (self.written, self._saved)
            news = not before or any(before < one <= ended for one, _ in found)
        self._failed[of_copy] = (number, news)
        return news

    def restart_from(self, tag: str | None) -> None:
        """Restart from the checkpoint `tag`, which is complete in memory; None if training resumes from elsewhere."""
        self._saved = [] if tag is None else [(0, tag)]
        self._sent = list(self._saved) if self.copies else []

    def tags_to_keep(self) -> frozenset[str]:
        """Return the tags to keep.

        These are the newest two complete ones, the newest one whose copies have all arrived, and all that are in
        progress.
        """
        self._saved = _newest(self._saved, self.written, _KEPT)
        self._sent = _newest(self._sent, self.copied, 1)
        return frozenset(tag for _, tag in (*self._saved, *self._sent))


def _newest(found: Sequence[tuple[int, str]], ended: int, count: int) -> list[tuple[int, str]]:
    done = [one for one in found if one[0] <= ended]
    return done[-count:] + [one for one in found if one[0] > ended]
