"""Rounds of elastic islands: ranks as threads with a real coordinator, and deaths at every instant."""

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import TCPStore

from deepspeed_compress.collectives.reduction import Groups
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.local_sgd.anchors import AnchorServer, SharedAnchor
from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient, status
from deepspeed_compress.local_sgd.coordinator.messages import AnchorSources
from deepspeed_compress.local_sgd.elastic_exchange import ElasticExchange
from deepspeed_compress.local_sgd.round_peers import make_groups
from deepspeed_compress.local_sgd.strategy import ExchangeResult
from deepspeed_compress.monitor import Meter
from tests.support.coordinators import coordinator
from tests.support.islands import EXACT, INT4, NUMEL, Weights, context_of
from tests.support.transport import until

TIMEOUT = 0.7
"""Seconds for which islands wait for one that has died."""
PATIENT = 60.0
"""Seconds for which islands wait if none dies, on a machine that is busy with other things."""


class Killed(BaseException):
    """Exception that represents the death of a process."""


@dataclass
class Doomed:
    """Client of the coordinator for an island that dies at `instant` of its `round`-th exchange, counted from 1.

    Examples of instants are "before arrive" and "after vote".
    """

    client: CoordinatorClient
    instant: str = ""
    round: int = 0
    taken: int = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.client, name)

    def pass_by(self, instant: str) -> None:
        if instant == self.instant and self.taken == self.round:
            raise Killed

    def arrive(self, samples: int) -> Any:
        self.taken += 1
        self.pass_by("before arrive")
        found = self.client.arrive(samples)
        self.pass_by("after arrive")
        return found

    def vote(self, round_: int, ok: bool) -> Any:
        self.pass_by("before vote")
        outcome = self.client.vote(round_, ok)
        self.pass_by("after vote")
        return outcome

    def groups(self, *args: Any) -> Groups:
        self.pass_by("before groups")
        made = make_groups(*args)
        self.pass_by("after groups")
        return made


INSTANTS = ("before arrive", "after arrive", "before groups", "after groups", "before vote", "after vote")


def section(
    address: str, minimum: int = 1, timeout: float = PATIENT, give_up: float = 2 * PATIENT, **keys: Any
) -> Islands:
    seconds = {"timeout": f"{timeout:g} s", "give_up": f"{give_up:g} s"}
    elastic = {"rendezvous": address, "minimum": minimum, **seconds}
    return Islands.model_validate({"exchange": INT4, "sync_every": 1, **keys, "elastic": elastic})


@dataclass
class Island:
    """An island of one rank, whose `train` moves its weights towards `goal`."""

    settings: Islands
    goal: float
    instant: str = ""
    round: int = 0
    weights: Weights = field(default_factory=lambda: Weights(torch.randn(NUMEL)))
    results: list[ExchangeResult] = field(default_factory=list)
    anchors: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.stores = ResidualStores(transactional=True)
        context = context_of(self.settings, self.weights, self.stores, Meter())
        anchor = SharedAnchor(context, dict)
        self.server = AnchorServer("127.0.0.1", anchor.copy)
        elastic = self.settings.elastic
        assert elastic is not None
        terms = {"timeout": elastic.timeout_seconds, "minimum": elastic.minimum}
        self.client = CoordinatorClient(
            elastic.rendezvous,
            elastic.give_up_seconds,
            terms,
            f"127.0.0.1:{self.store.port}",
            [self.server.address],
            "",
        )
        doomed = Doomed(self.client, self.instant, self.round)
        connections: Any = SimpleNamespace(anchor=anchor, client=doomed)
        self.exchange = ElasticExchange(context, connections, doomed.groups)

    def start(self) -> None:
        """Join, and return once the coordinator waits for this island in every round."""
        self.exchange.start()
        known = {"number": self.exchange.number, "version": self.exchange.version}
        until(lambda: any(known.items() <= one.items() for one in status(self.client._address)["islands"]))

    def train(self, rounds: int, samples: int = 8) -> "Island":
        try:
            if self.exchange.version == 0:
                self.exchange.start()
            for _ in range(rounds):
                self.weights.values.add_(self.goal - self.weights.values, alpha=0.5)
                self.results.append(self.exchange.exchange(samples))
                self.anchors[self.exchange.version] = self.anchor
        except Killed:
            self.end()
        return self

    def end(self) -> None:
        """Close all connections, as the kernel does for a process that died."""
        self.client._closed = True
        connection = self.client._connection
        if connection is not None:
            connection.end()
        self.exchange.peers.disconnect()
        self.server.close()

    @property
    def anchor(self) -> Tensor:
        return self.stores.by_name["anchor"].read(self.weights.segments, torch.device("cpu"))


def at_once(*works: Callable[[], Any], timeout: float = 4 * PATIENT) -> list[Any]:
    """Run `works` in threads and return their results, or raise the first error."""
    results: list[Any] = [None] * len(works)
    errors: list[BaseException] = []

    def do(place: int) -> None:
        try:
            results[place] = works[place]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=do, args=(place,), daemon=True) for place in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "an island hangs"
    return results


@pytest.mark.parametrize("exchange", [EXACT, INT4])
def test_islands_agree_after_every_round(address: str, exchange: dict[str, Any]) -> None:
    settings = section(address, minimum=3, exchange=exchange)
    islands = at_once(*(lambda goal=goal: Island(settings, goal).train(3) for goal in (0.0, 1.0, 5.0)))
    assert sorted(island.exchange.number for island in islands) == [0, 1, 2]
    for one in islands:
        assert [result.kind for result in one.results] == ["exchange"] * 3
        assert torch.equal(one.anchor, islands[0].anchor)
        assert torch.equal(one.weights.values, one.anchor)
    if exchange is EXACT:
        # Each round moves the anchor halfway to the mean of the goals. There were two rounds since the first one.
        first = islands[0].anchors[min(islands[0].anchors)]
        assert torch.allclose((islands[0].anchor - 2.0) * 4, first - 2.0, atol=1e-5)
    for one in islands:
        one.end()


def test_updates_are_weighted_by_samples(address: str) -> None:
    settings = section(address, minimum=2, exchange=EXACT)
    islands = [Island(settings, goal) for goal in (0.0, 8.0)]
    for one in islands:
        one.weights.values.zero_()
    at_once(*(partial(island.train, 1, samples) for island, samples in zip(islands, (30, 10), strict=True)))
    assert torch.allclose(islands[0].anchor, torch.full((NUMEL,), 8.0 / 2 * 10 / 40))


@pytest.mark.parametrize(
    ("instant", "which"),
    [*((instant, 1) for instant in INSTANTS), *((instant, 2) for instant in INSTANTS if "groups" not in instant)],
)
def test_the_others_stay_equal_if_an_island_dies_at_any_instant(address: str, instant: str, which: int) -> None:
    """The first exchange creates groups, and the second one reuses them."""
    settings = section(address, timeout=TIMEOUT)
    islands = [Island(settings, goal) for goal in (0.0, 1.0)]
    doomed = Island(settings, 5.0, instant, which)
    for one in (*islands, doomed):
        one.start()
    at_once(*(partial(one.train, 5) for one in (*islands, doomed)))
    common = islands[0].anchors.keys() & islands[1].anchors.keys()
    assert len(common) >= 3
    assert all(torch.equal(islands[0].anchors[version], islands[1].anchors[version]) for version in common)
    for one in islands:
        assert sum(result.kind == "exchange" for result in one.results) >= 3
        # After a void round, the others do not wait again for the dead island.
        assert sum(result.seconds >= TIMEOUT for result in one.results) <= 1
        one.end()


@pytest.mark.slow
def test_a_link_slower_than_the_timeout_gets_more_time(address: str) -> None:
    """The time limit doubles after each void round."""

    def slow(*args: Any) -> Groups:
        made = make_groups(*args)
        time.sleep(2 * TIMEOUT)
        return made

    islands = [Island(section(address, minimum=2, timeout=TIMEOUT), goal) for goal in (0.0, 1.0)]
    islands[1].exchange.peers._make = slow
    at_once(*(partial(island.train, 6) for island in islands))
    for one in islands:
        assert [result.kind for result in one.results][-2:] == ["exchange", "exchange"]
        assert one.results[0].kind == "void"
        assert torch.equal(one.anchor, islands[0].anchor)
        one.end()


def whole(store: Residuals) -> Tensor:
    values = torch.zeros(NUMEL)
    for (_, begin, numel), part in store.items():
        values[begin : begin + numel] = part
    return values


def test_a_void_round_leaves_no_trace(address: str) -> None:
    settings = section(address, minimum=2, timeout=TIMEOUT)
    islands = [Island(settings, goal) for goal in (0.0, 1.0)]
    at_once(*(partial(island.train, 2) for island in islands))
    doomed = Island(settings, 5.0, "after groups", 1)
    doomed.start()

    def kept(one: Island) -> list[Tensor]:
        """Return all stores as whole vectors, because messages among three islands are cut differently."""
        return [whole(one.stores.by_name[name]) for name in sorted(one.stores.by_name)]

    before = [kept(island) for island in islands]
    at_once(*(partial(one.train, 1) for one in [*islands, doomed]))
    assert [island.results[-1].kind for island in islands] == ["void", "void"]
    for one, former in zip(islands, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept(one), former, strict=True))
        one.end()


def test_a_joining_island_adopts_the_anchor_and_takes_part_in_the_next_exchange(address: str) -> None:
    settings = section(address, outer={"optimizer": "nesterov"})
    first = Island(settings, 1.0).train(3)
    late = Island(settings, 0.0)
    late.start()
    assert torch.equal(late.weights.values, first.anchor)
    momentum = [
        one.stores.by_name["outer_momentum"].read(one.weights.segments, late.weights.device) for one in (first, late)
    ]
    assert torch.equal(*momentum)
    at_once(partial(first.train, 1), partial(late.train, 1))
    assert [one.results[-1].kind for one in (first, late)] == ["exchange", "exchange"]
    assert torch.equal(late.anchor, first.anchor)


def test_an_island_of_another_beginning_adopts_the_anchor_and_its_metadata(address: str) -> None:
    first, other = Island(section(address), 1.0).train(2), Island(section(address), 0.0)
    other.exchange.shared_anchor.run = first.exchange.shared_anchor.run
    result = other.exchange.exchange(8)
    assert result.kind == "renewed"
    assert result.metadata["run"] == first.client.run
    assert torch.equal(other.weights.values, first.anchor)


def test_an_outdated_island_contributes_its_update_and_adopts_the_anchor(address: str) -> None:
    settings = section(address, minimum=2, timeout=TIMEOUT, exchange=EXACT)
    islands = [Island(settings, goal) for goal in (0.0, 1.0, 8.0)]
    for one in islands:
        one.weights.values.zero_()
    at_once(*(island.exchange.start for island in islands))
    at_once(*(partial(island.train, 1) for island in islands[:2]))
    assert islands[0].results[-1].islands == 2

    # The island is too late, but it has sent a message, so the others wait for it again.
    islands[2].train(1)
    assert islands[2].results[-1].kind == "left_out"

    def come_back() -> None:
        while islands[2].results[-1].kind == "left_out":
            time.sleep(0.02)
            islands[2].results.append(islands[2].exchange.exchange(8))

    at_once(*(partial(island.train, 1) for island in islands[:2]), come_back)
    assert [island.results[-1].kind for island in islands] == ["exchange", "exchange", "renewed"]
    assert torch.equal(islands[2].anchor, islands[0].anchor)
    # Island 2 has moved by 4 from its last anchor, the others by -0.125 and 0.375 from their common anchor.
    assert torch.allclose(islands[0].anchor, torch.full((NUMEL,), 0.25 + (4 - 0.125 + 0.375) / 3))


def test_an_island_that_cannot_reach_the_coordinator_raises(address: str) -> None:
    settings = section(address, minimum=2, timeout=0.3, give_up=1.5)
    islands = [Island(settings, goal) for goal in (0.0, 1.0)]
    at_once(*(island.exchange.start for island in islands))
    islands[1].end()
    with pytest.raises(
        IslandError, match=r"/deepspeed_compress/islands/elastic/rendezvous: .* at least 2 islands are needed"
    ):
        islands[0].train(1)


def test_an_island_that_diverged_is_excluded_and_keeps_its_residual(address: str) -> None:
    settings = section(address, minimum=2, exchange={"method": "blockwise", "bits": 8})
    islands = [Island(settings, goal) for goal in (0.0, 1.0)]
    at_once(*(partial(island.train, 3) for island in islands))
    broken, healthy = islands
    former = [values.clone() for _, values in broken.stores.by_name["gradients"].items()]
    broken.weights.values.fill_(float("nan"))
    before = healthy.anchor
    at_once(*(partial(island.train, 1) for island in islands))
    assert torch.isfinite(broken.weights.values).all()
    assert torch.equal(broken.anchor, healthy.anchor)
    after = [values for _, values in broken.stores.by_name["gradients"].items()]
    assert all(torch.equal(a, b) for a, b in zip(after, former, strict=True))
    moved = healthy.anchor - before
    assert float((moved - 0.5 * (1.0 - before)).abs().max()) < 0.02 * float(moved.abs().max())


def test_a_restarted_coordinator_continues(tmp_path: Any) -> None:
    state = tmp_path / "state.json"
    with coordinator(state) as address:
        islands = [Island(section(address, minimum=2), goal) for goal in (0.0, 1.0)]
        at_once(*(partial(island.train, 2) for island in islands))
    with contextlib.ExitStack() as later:

        def serve_again() -> None:
            time.sleep(0.5)
            later.enter_context(coordinator(state, int(address.rpartition(":")[2])))

        at_once(serve_again, *(partial(island.train, 2) for island in islands))
        assert [result.kind for result in islands[0].results] == ["exchange"] * 4
        assert torch.equal(islands[0].anchor, islands[1].anchor)
        assert status(address)["version"] == islands[0].exchange.version


@pytest.mark.parametrize(("outer", "sent"), [("average", {"anchor"}), ("nesterov", {"anchor", "outer_momentum"})])
def test_the_outer_momentum_is_served_only_with_nesterov(address: str, outer: str, sent: set[str]) -> None:
    island = Island(section(address, outer={"optimizer": outer}), 1.0).train(1)
    found = island.exchange.shared_anchor.copy(1)
    assert found is not None
    assert found[2].keys() == sent
    island.end()


def test_an_anchor_that_cannot_be_fetched_raises_with_the_cause(address: str) -> None:
    island = Island(section(address), 1.0).train(1)
    nobody = AnchorSources(version=9, sources=[["127.0.0.1:1"]])
    assert island.exchange.shared_anchor.fetch(nobody, 0, 0) is None
    with pytest.raises(IslandError, match=r"none of 1 islands provided the anchor .*Connection refused"):
        island.exchange._find_sources_again(nobody, deadline=0.0)
    island.end()


@pytest.mark.parametrize("unagreed", [None, {"run": "old", "number": 3, "version": 0}])
def test_islands_with_and_without_an_agreed_anchor_restart_together(address: str, unagreed: Any) -> None:
    """The coordinator gives islands that start again new numbers, which all of them must learn."""
    islands = [Island(section(address, minimum=2), goal) for goal in (0.0, 1.0)]
    at_once(*(island.start for island in islands))
    states = {"run": "old", "number": 5, "version": 7}, unagreed
    for one in islands:
        one.exchange.prepare_load()
    at_once(*(partial(island.exchange.resume, state, 3, 8) for island, state in zip(islands, states, strict=True)))
    assert sorted(island.exchange.number for island in islands) == [0, 1]
    at_once(*(partial(island.train, 2) for island in islands))
    for one in islands:
        assert [result.kind for result in one.results] == ["exchange"] * 2
        assert torch.equal(one.anchor, islands[0].anchor)
        one.end()


def test_the_interval_continues_after_a_resume() -> None:
    """The exchange is due three steps after the last one, two of which were before the checkpoint."""
    with coordinator() as address:
        island = Island(section(address, sync_every=3), 1.0)
        island.start()
        assert [island.exchange.step_ended(samples) for samples in (1, 2)] == [None, None]
        saved = island.exchange.describe()
        island.end()
    with coordinator() as address:
        island = Island(section(address, sync_every=3), 1.0)
        island.start()
        island.exchange.prepare_load()
        island.exchange.resume(saved, 2, 2)
        result = island.exchange.step_ended(3)
        assert result is not None
        assert result.kind == "exchange"
        island.end()


def test_no_anchor_is_served_while_a_checkpoint_is_loaded(address: str) -> None:
    island = Island(section(address, timeout=TIMEOUT), 1.0).train(1)
    assert island.exchange.shared_anchor.copy(1) is not None
    island.exchange.prepare_load()
    assert island.exchange.shared_anchor.copy(1) is None
    island.exchange.resume({"run": "other", "number": 3, "version": 40}, 1, 8)
    assert island.exchange.shared_anchor.copy(1) is not None
    island.end()


def test_an_island_with_other_settings_is_refused(address: str) -> None:
    first = Island(section(address), 0.0)
    with pytest.raises(ConfigError, match="minimum is 2, that of the others 1"):
        Island(section(address, minimum=2), 0.0)
    first.end()
