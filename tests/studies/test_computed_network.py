"""The network of a mirror: messages come back after the time that links need, one after the other."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.collectives.exchange import Link
from deepspeed_compress.planner.cluster import Group
from deepspeed_compress.tools.bench.links import UNLIMITED, bits_per_second
from launch.studies.computed_network import GLOO_CALLS, HostWire, NetworkMirror, Wires, join_gloo

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="messages on the host")


def wires(ranks: int, per_node: int, rate: str, gloo: Iterable[Any] = ()) -> Wires:
    found = Wires(ranks, per_node, HostWire(list(gloo)))
    found.set_rate(bits_per_second(rate))
    return found


@dataclass
class Recorder:
    """Rank of gloo that records the bytes that it sends, receives and adds."""

    number: int
    ranks: int
    sent: float = 0.0
    received: float = 0.0
    added: float = 0.0
    works: list[float] = field(default_factory=list)

    def rank(self) -> int:
        return self.number

    def size(self) -> int:
        return self.ranks

    def _ring(self, buffer: Tensor, rounds: int) -> "Recorder":
        part = buffer.nbytes * (self.ranks - 1) / self.ranks
        self.sent, self.received = self.sent + rounds * part, self.received + rounds * part
        self.added += (rounds - 1) * part
        return self

    def allreduce(self, buffers: list[Tensor]) -> "Recorder":
        return self._ring(buffers[0], 2)

    def _reduce_scatter_base(self, own: Tensor, buffer: Tensor) -> "Recorder":
        return self._ring(buffer, 2)

    def _allgather_base(self, buffer: Tensor, own: Tensor) -> "Recorder":
        assert own.nbytes * self.ranks == buffer.nbytes
        return self._ring(buffer, 1)

    def send(self, buffers: list[Tensor], peer: int, tag: int) -> "Recorder":
        assert peer != self.number
        self.sent += buffers[0].nbytes
        return self

    def recv(self, buffers: list[Tensor], peer: int, tag: int) -> "Recorder":
        assert peer != self.number
        self.received += buffers[0].nbytes
        return self

    def wait(self) -> None:
        self.works.append(time.monotonic())


def test_messages_queue_on_the_card() -> None:
    wire, begin = HostWire(), time.monotonic()
    first, second = wire.take(0.05, "reduce", 1.0), wire.take(0.05, "gather", 1.0)
    assert first.at > time.monotonic()
    second.wait()
    assert time.monotonic() - begin >= 0.1
    assert first.at <= begin + 0.1
    later = time.monotonic()
    assert wire.take(0.01, "reduce", 1.0).at - later == pytest.approx(0.01, abs=0.005)


@pytest.mark.parametrize("ranks", [[Recorder(0, 2), Recorder(1, 2)], [Recorder(1, 4)]], ids=["a pair", "one of four"])
@pytest.mark.parametrize(("kind", "rounds"), [("reduce", 2), ("scatter", 2), ("gather", 1), ("exchange", 1)])
def test_gloo_sends_and_adds_as_many_bytes_as_the_rank(kind: str, rounds: int, ranks: list[Recorder]) -> None:
    found = [Recorder(one.number, one.ranks) for one in ranks]
    group: Any = NetworkMirror(0, list(range(8)), wires(8, 1, "1gbit", found))
    group.arrive(kind, 8 * 12_000).wait()
    others = 7 * 12_000
    assert sum(one.sent for one in found) == rounds * others
    assert sum(one.received for one in found) == rounds * others
    assert sum(one.added for one in found) == (rounds - 1) * others
    assert all(one.works for one in found)


def test_gloo_works_within_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    pair = join_gloo()
    assert [(one.rank(), one.size()) for one in pair] == [(0, 2), (1, 2)]
    wire = HostWire(pair)
    for size in (4.0, 3_000_000.0, 400.0):
        arrivals = [wire.take(0.0, kind, size) for kind in GLOO_CALLS]
        assert [len(arrival.works) for arrival in arrivals] == [2, 2, 2, 4]
        assert all(arrival.wait() for arrival in arrivals)


def test_a_rank_alone_sends_nothing() -> None:
    found = Recorder(0, 2)
    group: Any = NetworkMirror(0, [0], wires(8, 1, "1gbit", [found, Recorder(1, 2)]))
    group.arrive("reduce", 1000.0).wait()
    assert found.sent == 0


def test_two_ranks_gather_at_a_smaller_share_of_the_rate() -> None:
    seconds = [
        [
            wires(hosts, 1, "100mbit").message(kind, 1e8 * hosts / (hosts - 1), Group(hosts, 1)).seconds
            for hosts in (2, 4)
        ]
        for kind in ("gather", "reduce")
    ]
    assert seconds[0][0] > 1.2 * seconds[0][1]
    assert seconds[1] == pytest.approx([2 * 8 / 0.96] * 2, rel=0.01)


def test_under_gloo_what_the_package_gathers_is_sent_to_each_rank() -> None:
    gloo = [Recorder(0, 2), Recorder(1, 2)]
    group: Any = NetworkMirror(0, list(range(8)), wires(8, 1, UNLIMITED, gloo))
    messages = torch.zeros(8 * 4000, dtype=torch.uint8)
    messages[:4000] = 7
    Link(group).all_gather_split(messages, [4000] * 8, 0).finish()
    assert messages.eq(7).all()
    assert sum(one.sent for one in gloo) == 7 * 4000
    assert sum(one.added for one in gloo) == 0


@pytest.mark.parametrize("kind", ["reduce", "gather", "scatter", "exchange"])
def test_a_message_takes_as_long_as_the_planner_says(kind: str) -> None:
    found = wires(4, 2, "100mbit")
    group: Any = NetworkMirror(0, [0, 1, 2, 3], found)
    begin = time.monotonic()
    work = group.arrive(kind, 1e5)
    expected = found.message(kind, 1e5, Group(4, 2)).seconds
    assert work.at - begin == pytest.approx(expected, rel=0.2, abs=2e-3)
    work.wait()
    assert time.monotonic() - begin >= expected


def test_groups_of_a_node_do_not_use_the_network() -> None:
    found = wires(4, 2, "1mbit")
    inside: Any = NetworkMirror(0, [0, 1], found)
    begin = time.monotonic()
    inside.allreduce([torch.ones(1000)]).wait()
    assert time.monotonic() - begin < 0.02
    between: Any = NetworkMirror(0, [0, 2], found)
    between.allreduce([torch.ones(1000)]).wait()
    assert time.monotonic() - begin > 0.03


def test_what_a_rank_keeps_of_an_exchange_takes_no_time() -> None:
    group: Any = NetworkMirror(0, [0, 1], wires(2, 1, "1mbit"))
    x = torch.zeros(100_000, dtype=torch.uint8)
    begin = time.monotonic()
    group.alltoall_base(x.clone(), x, [99_999, 1], [99_999, 1]).wait()
    assert time.monotonic() - begin < 0.1


def test_without_a_rate_only_delays_are_left() -> None:
    group: Any = NetworkMirror(0, [0, 1], wires(2, 1, UNLIMITED))
    begin = time.monotonic()
    group.allreduce([torch.ones(1_000_000)]).wait()
    assert time.monotonic() - begin < 0.1
