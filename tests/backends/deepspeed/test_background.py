"""The thread that carries out the second half of all-reduces."""

from typing import Any

import pytest

from deepspeed_compress.backends.deepspeed.gradients.background import MeansThread


class Pending:
    """Stand-in for a pending all-reduce, which notes in `sent` that its means are sent."""

    def __init__(self, sent: list["Pending"], error: Exception | None = None) -> None:
        self._sent, self._error = sent, error

    def send_back(self) -> None:
        if self._error is not None:
            raise self._error
        self._sent.append(self)


def run(pending: list[Any]) -> None:
    thread = MeansThread()
    for one in pending:
        thread.add(one)
    thread.finish()


def test_means_are_sent_in_order() -> None:
    sent: list[Pending] = []
    pending = [Pending(sent) for _ in range(5)]
    run(pending)
    assert sent == pending


def test_a_lost_peer_is_reported_to_training() -> None:
    sent: list[Pending] = []
    with pytest.raises(RuntimeError, match="connection closed"):
        run([Pending(sent), Pending(sent, RuntimeError("connection closed")), Pending(sent)])
    assert len(sent) == 1
