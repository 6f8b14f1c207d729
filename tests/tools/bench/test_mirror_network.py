"""The network of a mirror: messages come back after the time that links need, one after the other."""

import time
from typing import Any

import pytest
import torch

from deepspeed_compress.planner.cluster import Group
from deepspeed_compress.tools.bench.links import UNLIMITED
from deepspeed_compress.tools.bench.mirror_network import HostWire, NetworkMirror, Wires
from deepspeed_compress.tools.bench.options import MirrorOptions

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="messages on the host")


def wires(ranks: int, per_node: int, rate: str) -> Wires:
    found = Wires(MirrorOptions((rate,), per_node), ranks)
    found.set_rate(rate)
    return found


def test_messages_queue_on_the_card() -> None:
    wire, begin = HostWire(), time.monotonic()
    first, second = wire.take(0.05), wire.take(0.05)
    assert first.at > time.monotonic()
    second.wait()
    assert time.monotonic() - begin >= 0.1
    assert first.at <= begin + 0.1
    later = time.monotonic()
    assert wire.take(0.01).at - later == pytest.approx(0.01, abs=0.005)


@pytest.mark.parametrize("kind", ["reduce", "gather", "scatter", "exchange"])
def test_a_message_takes_as_long_as_the_planner_says(kind: str) -> None:
    found = wires(4, 2, "100mbit")
    group: Any = NetworkMirror(0, [0, 1, 2, 3], found)
    begin = time.monotonic()
    work = group.arrive(kind, 1e5)
    expected = getattr(found.links, kind)(1e5, Group(4, 2)).seconds
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
