"""Process groups of the islands in a round, which are reused as long as the participants stay the same."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import cast

from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo, Store, TCPStore
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.reduction import Groups
from deepspeed_compress.local_sgd.coordinator.messages import Round
from deepspeed_compress.local_sgd.exchange import Peers
from deepspeed_compress.local_sgd.strategy import ExchangeContext

MakeGroups = Callable[[Round, int, int, float], Groups]
"""Function that creates the groups of a round; see `make_groups`."""


def group_of_one() -> ProcessGroup:
    """Return a process group of one rank, which sends nothing."""
    return _gloo(HashStore(), 0, 1, 1.0)


def make_groups(round_: Round, place: int, number: int, timeout: float) -> Groups:
    """Return the groups of the ranks at `place` in the islands of `round_`.

    Raises:
        RuntimeError: a rank is missing for `timeout` seconds.
    """
    rank, size = round_.place(number), len(round_.partners)
    if size == 1:
        return Groups(group_of_one())
    host, _, port = round_.partners[0].store.rpartition(":")
    store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))
    up, down = (
        _gloo(PrefixStore(f"{round_.fresh}/{place}/{way}", store), rank, size, timeout) for way in ("up", "down")
    )
    return Groups(up, downward=down)


def _gloo(store: Store, rank: int, size: int, timeout: float) -> ProcessGroup:
    """Return a group that torch.distributed does not register, so that it may end at any time.

    It supports everything that exchanges use.
    """
    return cast(ProcessGroup, ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout)))


class RoundPeers:
    """The ranks of equal place in the islands of the current round.

    A slow link may need longer for one message than the islands' liveness timeout, which is not known in advance. A
    void round doubles the timeout of messages, up to `give_up`. A committed round sets it to twice the time that the
    round took.

    Args:
        context: the settings, the master weights and the residual stores of this rank.
        make: creates the groups of a round.
    """

    def __init__(self, context: ExchangeContext, make: MakeGroups) -> None:
        self._context, self._make = context, make
        self._timeout = context.elastic.timeout_seconds
        self._peers: Peers | None = None
        self._last: tuple[tuple[int, ...], int] = (), 0
        """Numbers of the islands for which `_peers` were made, and the round in which they were last used."""

    def connect(self, round_: Round, place: int, number: int) -> Peers:
        """Return the last round's group if all islands took part in it, else a new one. All decide alike.

        Args:
            round_: the round.
            place: place of this rank in its island.
            number: number of this island.

        Raises:
            RuntimeError: a rank is missing for too long.
        """
        numbers = tuple(partner.number for partner in round_.partners)
        same = all(partner.version == round_.base for partner in round_.partners)
        if self._peers is None or not same or self._last != (numbers, round_.base):
            self._peers = None
            groups, context = self._make(round_, place, number, self._timeout), self._context
            reduction = replace(context.reduction, groups=groups)
            self._peers = Peers(context.settings, context.master_weights.segments, reduction)
        self._last = numbers, round_.id
        return self._peers

    def round_ended(self, committed: bool, took: float) -> None:
        """Keep the group of a committed round, and adapt the timeout to the seconds that the round took."""
        elastic, longer = self._context.elastic, 2 * took if committed else 2 * self._timeout
        if not committed:
            self.disconnect()
        self._timeout = min(max(elastic.timeout_seconds, longer), elastic.give_up_seconds)

    def disconnect(self) -> None:
        """Drop the group: the next round creates a new one."""
        self._peers = None
