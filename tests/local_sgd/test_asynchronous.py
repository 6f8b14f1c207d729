"""Asynchronous islands of one rank as threads, with a real parameter server that may be killed."""

import contextlib
import os
import resource
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.config import Islands, Outer
from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.local_sgd.asynchronous_exchange import AsynchronousExchange
from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient
from deepspeed_compress.local_sgd.parameter_server import server as server_module
from deepspeed_compress.local_sgd.parameter_server.client import KEPT, PushClient
from deepspeed_compress.local_sgd.parameter_server.messages import PARAMETER_SERVER
from deepspeed_compress.local_sgd.parameter_server.server import CHECK_INTERVAL, Server, Service
from deepspeed_compress.local_sgd.parameter_server.snapshot import Snapshot
from deepspeed_compress.local_sgd.parameter_server.store import tensors_of
from deepspeed_compress.local_sgd.strategy import ExchangeResult, IslandRanks
from deepspeed_compress.monitor import Meter
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection, encode
from deepspeed_compress.transport.credentials import Credentials
from tests.support.coordinators import parameter_server
from tests.support.islands import EXACT, INT4, NUMEL, Weights, context_of
from tests.support.transport import until

SAMPLES = 8


@pytest.fixture
def server() -> Iterator[Server]:
    with parameter_server() as found:
        yield found


def section(port: int, give_up: str = "20 s", max_staleness: int = 64, **keys: Any) -> Islands:
    elastic = {
        "rendezvous": f"127.0.0.1:{port}",
        "timeout": "1 s",
        "give_up": give_up,
        "parameter_server": {"max_staleness": max_staleness},
    }
    return Islands.model_validate({"exchange": EXACT, "sync_every": 1, **keys, "elastic": elastic})


@dataclass
class Island:
    """An island of one rank, whose weights move towards `goal`."""

    settings: Islands
    goal: float = 0.0
    weights: Weights = field(default_factory=lambda: Weights(torch.randn(NUMEL)))
    samples: int = 0
    all: ClassVar[list["Island"]] = []

    def __post_init__(self) -> None:
        self.all.append(self)
        elastic = self.settings.elastic
        assert elastic is not None
        assert elastic.parameter_server is not None
        self.client = PushClient(elastic.rendezvous, elastic.timeout_seconds, elastic.give_up_seconds)
        self.stores = ResidualStores(transactional=True)
        self.meter = Meter()
        context = context_of(self.settings, self.weights, self.stores, self.meter)
        terms = {
            "exchange": self.settings.exchange.model_dump(mode="json"),
            "outer": self.settings.outer.model_dump(mode="json"),
            "ranks": 1,
            "max_staleness": elastic.parameter_server.max_staleness,
        }
        self.exchange = AsynchronousExchange(context, self.client, terms)
        self.exchange.start()

    def move(self) -> None:
        """Take a step of training."""
        self.weights.values.add_(self.goal - self.weights.values, alpha=0.5)
        self.samples += SAMPLES

    def push(self) -> None:
        assert self.exchange.step_ended(self.samples) is None

    def pull(self) -> ExchangeResult:
        result = self.exchange.finish(30)
        assert result is not None, "no answer"
        return result

    def step(self) -> ExchangeResult:
        """Take a step of training, push, and wait for the answer."""
        self.move()
        self.push()
        return self.pull()

    @property
    def residual(self) -> Tensor:
        found = torch.zeros(NUMEL)
        for (_, begin, numel), part in self.stores.by_name["gradients"].items():
            found[begin : begin + numel] = part
        return found


def connected(server: Server) -> list[int]:
    """Return the numbers of the connected islands."""
    client = PushClient(f"127.0.0.1:{server.port}", 1.0, 5.0)
    found, _ = client.ask({"kind": "status"})
    client.close()
    return [one["number"] for one in found["islands"]]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    while Island.all:
        Island.all.pop().client.close()


def test_a_single_island_moves_the_anchor_as_local_sgd_does(server: Server) -> None:
    island = Island(section(server.port), goal=3.0)
    for _ in range(4):
        expected = island.weights.values + 0.5 * (3.0 - island.weights.values)
        result = island.step()
        assert (result.kind, result.weight) == ("exchange", 1.0)
        torch.testing.assert_close(island.weights.values, expected)
        assert torch.equal(island.exchange.anchor(), island.weights.values)


def test_a_single_island_with_momentum_equals_nesterov(server: Server) -> None:
    outer = Outer(optimizer="nesterov", lr=0.7, momentum=0.9)
    island = Island(section(server.port, outer=outer.model_dump(exclude_unset=True)), goal=3.0)
    anchor = torch.nn.Parameter(island.weights.values.clone())
    expected = torch.optim.SGD([anchor], lr=outer.lr, momentum=outer.momentum, nesterov=True)
    for _ in range(5):
        anchor.grad = 0.5 * (anchor.detach() - 3.0)
        expected.step()
        island.step()
        torch.testing.assert_close(island.weights.values, anchor.detach())


def test_simultaneous_pushes_are_averaged(server: Server) -> None:
    """The first push has weight 1.

    The second one has weight 1/2, its share of the samples that the anchor has received.
    """
    first, second = (Island(section(server.port), goal) for goal in (0.0, 8.0))
    begin = first.weights.values.clone()
    assert torch.equal(second.weights.values, begin)
    first.move()
    second.move()
    first.push()
    assert first.pull().weight == 1.0
    second.push()
    assert second.pull().weight == 0.5
    torch.testing.assert_close(second.weights.values, begin + 0.5 * (0.0 - begin) + 0.25 * (8.0 - begin))


def test_an_island_four_times_slower_has_a_fifth_of_the_weight(server: Server) -> None:
    fast, slow = (Island(section(server.port), goal) for goal in (0.0, 8.0))
    weights = [fast.step().weight for _ in range(4)]
    assert weights == [1.0] * 4
    assert slow.step().weight == pytest.approx(1 / 5)
    # The update of the slow island is new to the fast one.
    assert fast.step().weight == pytest.approx(1 / 2)


def test_momentum_waits_for_a_whole_mean(server: Server) -> None:
    """With delayed Nesterov and pushes of weight 1/2, every second push updates the momentum."""
    outer = {"optimizer": "nesterov", "lr": 1.0, "momentum": 0.5}
    islands = [Island(section(server.port, outer=outer)) for _ in range(2)]
    islands[0].step()
    for turn in range(1, 7):
        before = server.service.store.places[0].momentum
        assert islands[turn % 2].step().weight == 0.5
        assert torch.equal(server.service.store.places[0].momentum, before) == (turn % 2 == 1)


def test_updates_made_while_a_push_is_in_flight_are_kept(server: Server) -> None:
    island = Island(section(server.port), goal=2.0)
    island.move()
    island.push()
    sent = island.weights.values.clone()
    island.move()
    now = island.weights.values.clone()
    island.pull()
    torch.testing.assert_close(island.weights.values, now)
    torch.testing.assert_close(island.exchange.anchor(), sent)


def test_a_stale_push_is_dropped_and_the_anchor_is_adopted(server: Server) -> None:
    fast, slow = (Island(section(server.port, max_staleness=3, exchange=INT4), goal) for goal in (0.0, 8.0))
    slow.step()
    kept = slow.residual
    for _ in range(4):
        fast.step()
    before = server.service.store.places[0].anchor.clone()
    result = slow.step()
    assert (result.kind, result.weight) == ("renewed", 0.0)
    assert torch.equal(server.service.store.places[0].anchor, before)
    assert torch.equal(slow.weights.values, before)
    assert torch.equal(slow.residual, kept)
    assert slow.step().kind == "exchange"


def test_error_feedback_conserves_the_sum_of_updates(server: Server) -> None:
    """Change of the anchor plus new residual equals update plus old residual, in both directions."""
    exchange = {**INT4, "error_feedback": {"dtype": "fp32"}}
    island = Island(section(server.port, exchange=exchange), goal=4.0)
    for _ in range(5):
        before, held, kept = (
            server.service.store.places[0].anchor,
            island.exchange.anchor(),
            island.residual if island.samples else 0.0,
        )
        island.move()
        moved = island.weights.values - held
        island.push()
        island.pull()
        anchor = server.service.store.places[0].anchor
        torch.testing.assert_close(anchor - before + island.residual, moved + kept)
    # Values that an answer omits are sent in the next one.
    assert float((island.exchange.anchor() - anchor).abs().max()) < 0.05 * float((anchor - 4.0).abs().max() + 1)
    assert torch.equal(island.exchange.anchor(), server.service.store._anchors_held[0][0])


def test_answers_and_pushes_are_compressed(server: Server) -> None:
    island = Island(section(server.port, exchange=INT4), goal=4.0)
    island.step()
    size = island.meter.bytes_islands
    assert 0 < size < NUMEL
    # Encode the answer again. It has the size of the push.
    store, held = server.service.store, island.exchange.anchor()
    store._anchors_held[0] = {0: held}
    head, body = store.answer(0, 0, "taken", 9)
    assert len(body) == size
    assert "exact" not in head


def test_an_island_that_diverged_is_excluded(server: Server) -> None:
    healthy, broken = (Island(section(server.port), goal) for goal in (0.0, 1.0))
    healthy.step()
    before = healthy.weights.values.clone()
    broken.weights.values.fill_(float("nan"))
    broken.samples += SAMPLES
    broken.push()
    assert broken.pull().kind == "renewed"
    assert torch.equal(broken.weights.values, before)
    assert torch.equal(server.service.store.places[0].anchor, before)


def test_a_dead_island_does_not_delay_the_others(server: Server) -> None:
    islands = [Island(section(server.port), goal) for goal in (0.0, 1.0)]
    for island in islands:
        island.step()
    islands[1].move()
    islands[1].push()
    islands[1].client.close()
    assert all(islands[0].step().seconds < 5 for _ in range(3))
    until(lambda: connected(server) == [0])
    late = Island(section(server.port))
    assert late.exchange.number == 2
    assert torch.equal(late.weights.values, server.service.store.places[0].anchor)


def crashed(state: Path, server: Server) -> Path:
    """Return a copy of the state as it is on disk, from which a server continues that was killed now."""
    copy = state.with_name("crashed")
    copy.write_bytes(state.read_bytes())
    assert server.service._saved is not server.service.store.records, "there are calls to lose"
    return copy


@pytest.fixture
def rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save calls only at the end of a server."""
    monkeypatch.setattr(server_module, "SAVE_INTERVAL", 1e9)


@pytest.mark.usefixtures("rarely")
@pytest.mark.parametrize("exchange", [EXACT, INT4])
def test_pushes_after_the_last_snapshot_are_sent_again_after_a_crash(tmp_path: Path, exchange: dict[str, Any]) -> None:
    """The server then has the bits of one that did not crash."""
    keys, state = {"exchange": exchange, "outer": {"optimizer": "nesterov"}}, tmp_path / "state"
    with parameter_server(state) as server:
        island = Island(section(server.port, **keys), goal=1.0)
        for _ in range(2):
            island.step()
        copy = crashed(state, server)
    assert [head["kind"] for head, _ in island.client._kept] == ["push", "push"]
    with parameter_server(copy, server.port) as again:
        assert again.service.store.records.pushes == 0
        assert island.step().kind == "exchange"
        assert again.service.store.records.pushes == 3
        # The server's record of what the island holds has no part in answers that the island did not read.
        assert torch.equal(island.weights.values, again.service.store.places[0].anchor)
        with contextlib.closing(Service(Snapshot(state), print)) as undisturbed, transport(again) as caller:
            head, body = island.client._kept[-1]
            assert undisturbed.handle(head, body, caller)[0]["kind"] == "taken"
            bits = zip(*(tensors_of(one.store.places).values() for one in (undisturbed, again.service)), strict=True)
            assert all(torch.equal(a, b) for a, b in bits)


@pytest.mark.usefixtures("rarely")
def test_islands_continue_after_a_crash_with_the_pushes_that_they_keep(tmp_path: Path) -> None:
    """An island keeps four calls. What is older is lost, and the island takes the anchor without it."""
    with parameter_server(tmp_path / "state") as server:
        islands = [Island(section(server.port), goal) for goal in (0.0, 1.0)]
        for _ in range(6):
            islands[0].step()
        islands[1].step()
        copy = crashed(tmp_path / "state", server)
    with parameter_server(copy, server.port) as again:
        for island in islands:
            assert island.step().kind == "exchange"
            assert torch.equal(island.weights.values, again.service.store.places[0].anchor)
        assert again.service.store.records.pushes == (KEPT + 1) + 2


def test_a_saved_call_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "SAVE_INTERVAL", 0.0)
    monkeypatch.setattr(server_module, "SAVE_SHARE", 1e9)
    with parameter_server(tmp_path / "state") as server:
        island = Island(section(server.port), goal=1.0)
        for _ in range(3):
            island.step()
            assert island.client._kept == []


def test_training_continues_while_the_server_is_down(tmp_path: Path) -> None:
    with parameter_server(tmp_path / "state") as server:
        island = Island(section(server.port), goal=1.0)
        island.step()
    island.move()
    island.push()
    for _ in range(3):
        island.move()
        assert island.exchange.step_ended(island.samples) is None
    now = island.weights.values.clone()
    with parameter_server(tmp_path / "state", server.port):
        assert island.pull().kind == "exchange"
        torch.testing.assert_close(island.weights.values, now)
        assert island.step().weight == 1.0


def test_a_call_repeated_after_a_lost_answer_has_one_effect(server: Server) -> None:
    """The call is repeated after its connection was lost, possibly to a server that was restarted meanwhile."""
    island = Island(section(server.port), goal=1.0)
    island.move()
    head = island.exchange._head("push", samples=SAMPLES)
    moved = (island.weights.values - island.exchange.anchor()).numpy().tobytes()
    island.client.ask(head, moved)
    version, anchor = server.service.store.records.version, server.service.store.places[0].anchor.clone()
    island.client._requests.hang_up()
    island.push()
    assert island.pull().kind == "exchange"
    assert server.service.store.records.version == version
    server.service._calls.clear()
    island.client._requests.hang_up()
    assert island.client.ask(head, moved)[0]["kind"] == "taken"
    assert torch.equal(server.service.store.places[0].anchor, anchor)


def test_a_push_whose_answer_failed_is_applied_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    island, answer, failed = Island(section(server.port), goal=1.0), server.service.store.answer, []

    def failing(*given: Any) -> Any:
        if not failed:
            failed.append(True)
            raise OSError("no room")
        return answer(*given)

    version = server.service.store.records.version
    monkeypatch.setattr(server.service.store, "answer", failing)
    assert island.step().kind == "exchange"
    assert failed
    assert server.service.store.records.version == version + 1


def test_islands_that_are_not_connected_are_forgotten_when_too_many_join(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MOST_ISLANDS", 2)
    first = Island(section(server.port), goal=1.0)
    first.step()
    for number in range(1, 4):
        late = Island(section(server.port))
        assert late.exchange.number == number
        late.client.close()
        until(lambda: connected(server) == [0])
    assert set(server.service.store.records.islands) == {0, 3}
    assert first.step().kind == "exchange"
    Island(section(server.port))
    with pytest.raises(ConfigError, match=r"2 islands are connected \(allowed: 2\); stop some of them"):
        Island(section(server.port))


def test_a_process_whose_island_was_resumed_by_another_is_refused(server: Server) -> None:
    """Two processes must never act as one island."""
    first = Island(section(server.port), goal=1.0)
    first.step()
    saved = first.exchange.describe()
    first.client._requests.hang_up()
    until(lambda: not connected(server))
    second = Island(section(server.port))
    second.exchange._anchor.write(second.weights.segments, first.exchange.anchor())
    second.exchange.resume(saved, 1, SAMPLES)
    assert second.exchange.number == first.exchange.number
    with pytest.raises(ConfigError, match="island 0 has left, or another process has entered or resumed it"):
        first.step()
    second.samples = SAMPLES
    assert second.step().kind == "exchange"


def test_an_island_that_dies_during_a_call_leaves_no_trace(server: Server) -> None:
    terms = {"exchange": EXACT, "outer": {}, "ranks": 2, "max_staleness": 1}
    client = PushClient(f"127.0.0.1:{server.port}", 1.0, 5.0)
    head, _ = client.ask({"kind": "enter", "terms": terms})
    own = {name: head[name] for name in ("run", "number", "token")}
    answer = client.start({"kind": "fresh", **own, "place": 0, "call": 1})
    until(lambda: bool(server.service._calls))
    client.close()
    assert answer.exception(10) is not None
    until(lambda: not server.service._calls)


class Disagreeing(IslandRanks):
    """Ranks of an island, one of which received a different answer."""

    def all_true(self, value: bool) -> bool:
        return False


def transport(server: Server) -> Connection:
    return connect(f"127.0.0.1:{server.port}", PARAMETER_SERVER, Credentials.find())


def test_ranks_that_received_different_answers_agree(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks ask the server together before one of them adopts an anchor.

    The server was restarted and received an anchor between the calls of two ranks. The rank that got the anchor must
    wait for the other, which proposes its own.
    """
    island, asked = Island(section(server.port)), []
    ask = island.exchange._ask
    monkeypatch.setattr(island.exchange, "_ranks", Disagreeing())
    monkeypatch.setattr(
        island.exchange, "_ask", lambda kind, *given, **more: asked.append(kind) or ask(kind, *given, **more)
    )
    island.exchange._adopt_anchor(claim=None)
    assert asked == ["fresh", "seed"]


def test_pushes_respect_max_rate(server: Server) -> None:
    island, waited = Island(section(server.port, exchange=INT4)), []
    client = PushClient(f"127.0.0.1:{server.port}", 1.0, 5.0, waited.append)
    island.exchange._calls = client
    island.step()
    client.close()
    assert waited == [island.meter.bytes_islands]


def test_an_island_without_an_answer_for_give_up_raises(tmp_path: Path) -> None:
    with parameter_server(tmp_path / "state") as server:
        island = Island(section(server.port, give_up="1 s"))
    island.move()
    island.push()
    with pytest.raises(IslandError, match=r"/deepspeed_compress/islands/elastic/rendezvous: .* give_up, 1 s"):
        island.pull()


def test_a_checkpoint_resumes_where_it_was_saved_or_from_the_newest_anchor(server: Server) -> None:
    island = Island(section(server.port), goal=1.0)
    island.step()
    island.move()
    saved, weights, anchor = island.exchange.describe(), island.weights.values.clone(), island.exchange.anchor()
    island.client.close()
    until(lambda: not connected(server))

    def resumed() -> Island:
        again = Island(section(server.port))
        again.weights.values.copy_(weights)
        again.exchange._anchor.write(again.weights.segments, anchor)
        again.exchange.resume(saved, 2, 2 * SAMPLES)
        again.samples = 2 * SAMPLES
        return again

    again = resumed()
    assert again.exchange.number == island.exchange.number
    assert torch.equal(again.weights.values, weights)
    again.push()
    assert again.pull().weight == 1.0
    # Samples that were pushed after the save are not pushed again.
    later = resumed()
    assert later.exchange.number not in (island.exchange.number, -1)
    assert torch.equal(later.weights.values, server.service.store.places[0].anchor)


def test_a_new_server_starts_from_the_newest_checkpoint() -> None:
    with parameter_server() as server:
        islands = [Island(section(server.port), goal) for goal in (0.0, 1.0)]
        for one in islands:
            one.step()
        saved = [(island.exchange.describe(), island.exchange.anchor()) for island in islands]
    with parameter_server() as server:
        again = [Island(section(server.port)) for _ in saved]
        for one, (described, anchor) in zip(again, saved, strict=True):
            one.exchange._anchor.write(one.weights.segments, anchor)
            one.exchange.resume(described, 1, SAMPLES)
        assert saved[1][0]["version"] > saved[0][0]["version"]
        assert torch.equal(server.service.store.places[0].anchor, saved[1][1])
        assert torch.equal(again[1].weights.values, saved[1][1])
        # The first island trained from an anchor that is no longer valid.
        again[0].samples = SAMPLES
        assert again[0].step().kind == "renewed"
        assert torch.equal(again[0].weights.values, saved[1][1])


def test_islands_with_other_settings_or_services_are_refused(server: Server, address: str) -> None:
    Island(section(server.port))
    with pytest.raises(ConfigError, match=r"max_staleness is 9, that of the others 64"):
        Island(section(server.port, max_staleness=9))
    with pytest.raises(ConfigError, match=r"the server is a parameter server, not a coordinator"):
        CoordinatorClient(f"127.0.0.1:{server.port}", 5.0, {"timeout": 1.0}, "127.0.0.1:1", ["127.0.0.1:1"], "")
    with pytest.raises(ConfigError, match=r"the server is a coordinator, not a parameter server"):
        Island(section(int(address.rpartition(":")[2])))


def test_a_non_finite_push_is_dropped(server: Server) -> None:
    island = Island(section(server.port))
    island.step()
    before = server.service.store.places[0].anchor.clone()
    head = island.exchange._head("push", samples=SAMPLES)
    found, _ = island.client.ask(head, torch.full((NUMEL,), float("inf")).numpy().tobytes())
    assert found["kind"] == "dropped"
    assert torch.equal(server.service.store.places[0].anchor, before)


def two_ranks(server: Server) -> list[PushClient]:
    """Return the clients of an island of two ranks that have made a call together."""
    clients = [PushClient(f"127.0.0.1:{server.port}", 1.0, 60.0) for _ in range(2)]
    head, _ = clients[0].ask(
        {"kind": "enter", "terms": {"exchange": EXACT, "outer": {}, "ranks": 2, "max_staleness": 1}}
    )
    own = {name: head[name] for name in ("run", "number", "token")}
    answers = []
    for place, client in enumerate(clients):
        answers.append(client.start({"kind": "fresh", **own, "place": place, "call": 1}))
        if not place:
            # The first rank waits for the second one. The server checks its connection meanwhile.
            time.sleep(2 * CHECK_INTERVAL)
    assert [one.result(60)[0]["kind"] for one in answers] == ["found", "found"]
    return clients


def test_ranks_wait_for_each_other_with_file_descriptors_above_1023(server: Server) -> None:
    """For file descriptors above 1,023, select(2) fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    with socket.socket() as some, contextlib.ExitStack() as stack:
        while (number := os.dup(some.fileno())) < 1100:
            stack.callback(os.close, number)
        stack.callback(os.close, number)
        for client in two_ranks(server):
            client.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_stopping_a_server_does_not_wait_for_clients() -> None:
    with parameter_server() as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            stack.enter_context(transport(server))
        for client in two_ranks(server):
            stack.callback(client.close)
        half = stack.enter_context(transport(server))
        half._write(memoryview(encode({"kind": "push"}, 0)[:20]))
        begun = time.monotonic()
        server.stop()
        until(lambda: server.service._file is None and server._server._listener.fileno() < 0)
        assert time.monotonic() - begun < 15
