"""The parameter server without sockets: refusals, and the file that it starts from."""

import copy
import errno
import json
import random
import re
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deepspeed_compress.errors import StateError
from deepspeed_compress.local_sgd.parameter_server import snapshot
from deepspeed_compress.local_sgd.parameter_server.messages import FROM_ISLANDS
from deepspeed_compress.local_sgd.parameter_server.server import Answer, Service
from deepspeed_compress.local_sgd.parameter_server.snapshot import Snapshot
from deepspeed_compress.local_sgd.parameter_server.store import Records, tensors_of
from tests.support.mutations import change, damage
from tests.support.processes import join_threads, start_threads

SAMPLED = pytest.mark.sampled(4)

NUMEL = 96
HALF = NUMEL // 2
LAYOUT = {
    "layout": [["w", 0, HALF], ["v", 0, NUMEL - HALF]],
    "shapes": {"w": [4, HALF // 4], "v": [NUMEL - HALF]},
}
EXACT = {"method": "none"}
TOPK = {
    "method": "topk",
    "density": 0.1,
    "block_size": 64,
    "min_numel": 0,
    "values": {"method": "blockwise", "bits": 2},
}
LARGEST_FLOAT = torch.finfo(torch.float32).max


def restarted(path: Path, report: Callable[[str], None] = print) -> closing[Service]:
    """Return a server that starts from the files at `path`."""
    return closing(Service(Snapshot(path), report))


class Connected:
    """Connection of a rank that stays open."""

    def has_hung_up(self) -> bool:
        return False


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Yield a directory, in memory if possible, because each call is synced to disk."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as found:
        yield Path(found)


def terms(exchange: Mapping[str, Any] = TOPK, ranks: int = 1, **outer: Any) -> dict[str, Any]:
    return {"exchange": dict(exchange), "outer": outer, "ranks": ranks, "max_staleness": 64}


class Rank:
    """Rank of an island that calls the service directly, from its own thread if the island has two ranks."""

    def __init__(self, service: Service, given: Mapping[str, Any]) -> None:
        self.service, self.calls = service, 0
        answer, _ = service.handle({"kind": "enter", "terms": given}, b"", Connected())
        assert answer["kind"] == "welcome", answer
        self.own = {name: answer[name] for name in ("run", "number", "token")}

    def head(self, kind: str, **more: Any) -> dict[str, Any]:
        return {"kind": kind, **self.own, "place": 0, "call": self.calls + 1, "step": self.calls, **more}

    def ask(self, kind: str, body: bytes = b"", **more: Any) -> Answer:
        found = self.service.handle(self.head(kind, **more), bytearray(body), Connected())
        assert found[0]["kind"] != "refused", found[0]
        self.calls += 1
        return found

    def seed(self, weights: Tensor) -> Answer:
        return self.ask("seed", weights.numpy().tobytes(), claim=0, **LAYOUT)

    def push(self, moved: Tensor, samples: int = 8) -> Answer:
        return self.ask("push", self.encoded(moved), samples=samples)

    def encoded(self, moved: Tensor) -> bytes:
        messages = self.service.store.places[0].messages
        return bytes(messages.encode(moved, self.calls + 1, 0, remember=False).view(torch.uint8).numpy().tobytes())


def moved(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def state(service: Service) -> tuple[Records, list[Tensor]]:
    return service.store.records, list(tensors_of(service.store.places).values())


def same(before: tuple[Records, list[Tensor]], after: tuple[Records, list[Tensor]]) -> bool:
    return before[0] == after[0] and all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def mutated(head: Mapping[str, Any], body: bytes, rng: random.Random) -> tuple[dict[str, Any], bytes]:
    """Return a head with a change, and a body that may be damaged. The transport lets only texts pass as kinds."""
    found = copy.deepcopy({name: value for name, value in head.items() if name != "kind"})
    if rng.random() < 0.7:
        change(found, rng)
    return {**found, "kind": head["kind"]}, damage(body, rng) if rng.random() < 0.6 else body


def sent(head: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the head as it arrives; None if it cannot be represented in JSON."""
    try:
        return json.loads(json.dumps(head))
    except ValueError:
        return None


@SAMPLED
@pytest.mark.parametrize("exchange", [EXACT, TOPK, {"method": "blockwise", "bits": 4}, {"method": "randomk"}])
@pytest.mark.parametrize("kind", ["enter", "resume", "leave", "fresh", "seed", "push"])
def test_a_mutated_call_is_refused_or_applied_and_can_be_saved(
    directory: Path, kind: str, exchange: dict[str, Any]
) -> None:
    chosen = random.Random(f"{kind} {exchange}")
    service = Service(Snapshot(directory / "state"), lambda text: None)
    rank = Rank(service, terms(exchange, optimizer="nesterov"))
    if kind != "seed":
        rank.seed(moved(0))
        rank.push(moved(1))
    refused = applied = 0
    for number in range(60 if kind == "seed" else 170):
        head, body = _call(rank, kind, number, exchange)
        head, body = mutated(head, body, chosen)
        received = sent(head)
        if received is None:
            continue
        before = state(service)
        answer, _ = service.handle(received, bytearray(body), Connected())
        if answer["kind"] == "refused":
            refused += 1
            assert same(before, state(service)), (received, answer)
        else:
            applied += 1
        rank.calls = max(rank.calls, getattr(service.store.records.islands.get(rank.own["number"]), "call", 0))
        assert all(bool(torch.isfinite(one).all()) for one in tensors_of(service.store.places).values())
        if kind == "leave" and not service.store.records.islands[rank.own["number"]].token:
            rank = Rank(service, terms(exchange, optimizer="nesterov"))
        if kind == "seed" and service.store.records.version > 2**60:
            break
    assert refused
    held = state(service)
    copied = _copied(service, directory)
    printed: list[str] = []
    again = Service(Snapshot(copied), printed.append)
    assert same(held, state(again))
    assert printed == []
    # A well-behaved island continues to work.
    honest = Rank(again, terms(exchange, optimizer="nesterov"))
    if not again.store.records.version:
        honest.seed(moved(0))
    assert honest.ask("fresh")[0]["kind"] == "exact"
    answer, _ = honest.push(moved(2))
    # Finite values from the random calls may be close to the largest fp32 number.
    assert answer["kind"] == "taken" or "become non-finite" in answer["reason"]
    again.close()
    service.close()


def _call(rank: Rank, kind: str, number: int, exchange: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    store = rank.service.store
    if kind == "enter":
        return {"kind": kind, "terms": terms(exchange, optimizer="nesterov")}, b""
    if kind == "leave":
        return {"kind": kind, **rank.own}, b""
    if kind == "resume":
        island = store.records.islands[rank.own["number"]]
        saved = {"run": store.records.run, "number": rank.own["number"], "call": island.call, "version": island.version}
        return {"kind": kind, "saved": saved}, b""
    if kind == "fresh":
        return rank.head(kind), b""
    if kind == "push":
        return rank.head(kind, samples=8), rank.encoded(moved(number))
    return rank.head(kind, claim=number, **LAYOUT), moved(number).numpy().tobytes()


def _copied(service: Service, directory: Path) -> Path:
    """Save the state, and return a copy, which another server may hold."""
    service._save_calls()
    (directory / "copy").write_bytes((directory / "state").read_bytes())
    return directory / "copy"


def test_an_index_beyond_the_tensor_is_refused(directory: Path) -> None:
    """An index has six bits for the 64 elements of a block, and the last block has 32 elements."""
    service = Service(Snapshot(directory / "state"), lambda text: None)
    rank = Rank(service, terms())
    rank.seed(moved(0))
    before = state(service)
    answer, _ = service.handle(
        rank.head("push", samples=8), bytearray(b"\xff" * len(rank.encoded(moved(1)))), Connected()
    )
    assert answer["kind"] == "refused"
    assert "index" in answer["why"]
    assert same(before, state(service))
    assert rank.push(moved(1))[0]["kind"] == "taken"
    with restarted(_copied(service, directory)) as again:
        assert same(state(service), state(again))
    service.close()


def no_room(tensors: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
    path.write_bytes(b"a part")
    raise SafetensorError("no space left on device")


def no_descriptor(path: Any, *args: Any, **options: Any) -> Any:
    raise OSError(errno.EMFILE, "Too many open files")


@pytest.mark.parametrize(
    ("replaced", "failing"), [(f"{snapshot.__name__}.save_file", no_room), ("os.open", no_descriptor)]
)
def test_a_full_disk_stops_no_island(
    directory: Path, monkeypatch: pytest.MonkeyPatch, replaced: str, failing: Callable[..., Any]
) -> None:
    reports: list[str] = []
    service = Service(Snapshot(directory / "state"), reports.append)
    rank = Rank(service, terms())
    rank.seed(moved(0))
    saved, held = (directory / "state").read_bytes(), service._saved
    monkeypatch.setattr("deepspeed_compress.local_sgd.parameter_server.server.SAVE_INTERVAL", 0.0)
    service._next_save = 0.0
    with monkeypatch.context() as full:
        full.setattr(replaced, failing)
        for seed in range(8):
            assert rank.push(moved(seed))[0]["saved"] == held.islands[0].call
        with pytest.raises(OSError, match=r"no space|Too many"):
            Rank(service, terms())
        assert not list(directory.glob("*.tmp"))
        assert (directory / "state").read_bytes() == saved
    assert [report.partition(" (")[0] for report in reports if "cannot" in report] == [
        "islands keep their calls, because the state cannot be written"
    ]
    assert list(service.store.records.islands) == [0], "an island that could not be saved has not entered"
    service._next_save = 0.0
    assert rank.push(moved(9))[0]["saved"] == rank.calls
    with restarted(_copied(service, directory)) as again:
        assert same(state(service), state(again))
    service.close()


@pytest.mark.parametrize("outer", [{}, {"optimizer": "nesterov", "lr": 1.0, "momentum": 0.9}])
def test_finite_pushes_that_make_the_anchor_infinite_are_dropped_with_a_reason(outer: dict[str, Any]) -> None:
    service = Service(None, lambda text: None)
    rank = Rank(service, terms(EXACT, **outer))
    rank.seed(torch.zeros(NUMEL))
    huge = torch.full((NUMEL,), 0.6 * LARGEST_FLOAT)
    answers = [rank.push(huge)[0] for _ in range(3)]
    dropped = [answer for answer in answers if answer["kind"] == "dropped"]
    assert dropped
    assert {one["reason"] for one in dropped} == {"the anchor would become non-finite"}
    assert all(bool(torch.isfinite(one).all()) for one in tensors_of(service.store.places).values())
    assert rank.push(moved(1))[0]["kind"] == "taken"


def test_a_difference_beyond_fp32_is_answered_with_the_whole_anchor() -> None:
    """Both anchors are finite."""
    service = Service(None, lambda text: None)
    # Only the fast island pushes.
    exchange = {"method": "blockwise", "bits": 8}
    fast, slow = Rank(service, terms(exchange)), Rank(service, terms(exchange))
    low, high = torch.full((NUMEL,), -0.9 * LARGEST_FLOAT), torch.full((NUMEL,), 0.6 * LARGEST_FLOAT)
    fast.seed(low)
    slow.ask("fresh")
    for _ in range(3):
        fast.push(high)
    anchor = service.store.places[0].anchor
    assert float(anchor[0]) > 0.5 * LARGEST_FLOAT
    head, body = slow.push(torch.zeros(NUMEL))
    assert head["kind"] == "taken"
    assert head["exact"]
    assert bytes(body) == anchor.numpy().tobytes()


def test_non_finite_weights_are_refused_as_a_seed() -> None:
    service = Service(None, lambda text: None)
    rank = Rank(service, terms())
    with pytest.raises(AssertionError, match="not finite"):
        rank.seed(torch.full((NUMEL,), float("nan")))
    rank.seed(moved(0))
    assert service.store.records.version == 1


@pytest.mark.parametrize(
    "given",
    [
        *({**terms(), "ranks": ranks} for ranks in (True, 0, -1, 1.0, "1", 2**17, 2**63, 10**4299, None, [])),
        *({**terms(), "max_staleness": most} for most in (True, 0, "64", 10**4299, None)),
        *({**terms(), "exchange": exchange} for exchange in (None, 5, {"method": "powersgd"}, {"method": []})),
        *(None, 5, "terms", [], {}, [["ranks", 1]]),
    ],
)
def test_invalid_terms_are_refused(given: Any) -> None:
    service = Service(None, lambda text: None)
    answer, _ = service.handle({"kind": "enter", "terms": given}, b"", Connected())
    assert answer["kind"] == "refused"
    assert service.store.records.terms is None
    Rank(service, terms())
    answer, _ = service.handle({"kind": "enter", "terms": given}, b"", Connected())
    assert answer["kind"] == "refused"


def test_inconsistent_parts_refuse_the_call_of_all_ranks(directory: Path) -> None:
    """Different shapes from two ranks are detected when both parts have arrived."""
    service = Service(Snapshot(directory / "state"), lambda text: None)
    rank = Rank(service, terms(ranks=2))
    heads = [
        rank.head("seed", place=place, claim=0, layout=[["w", 0, 4]], shapes={"w": [4 + place]}) for place in (0, 1)
    ]
    answers: list[Answer] = []
    calls = (partial(service.handle, head, bytearray(16), Connected()) for head in heads)
    join_threads(start_threads(*(lambda call=call: answers.append(call()) for call in calls)))
    assert [head["kind"] for head, _ in answers] == ["refused"] * 2
    assert "shapes" in answers[0][0]["why"]
    assert service.store.records.version == 0
    with restarted(_copied(service, directory)) as again:
        assert same(state(service), state(again))
    service.close()


def trained(directory: Path) -> Path:
    """Return the file of a server that has received pushes."""
    service = Service(Snapshot(directory / "state"), lambda text: None)
    rank = Rank(service, terms(optimizer="nesterov"))
    rank.seed(moved(0))
    for seed in range(3):
        rank.push(moved(seed))
    path = _copied(service, directory)
    service.close()
    return path


def _about(path: Path) -> dict[str, str]:
    raw = path.read_bytes()
    found: dict[str, str] = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]
    return found


def tensors_with(change: Callable[[dict[str, Tensor]], object]) -> Callable[[Path], None]:
    """Write a file with changed tensors."""

    def damage(path: Path) -> None:
        tensors, about = load_file(path), _about(path)
        change(tensors)
        save_file(tensors, path, about)

    return damage


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": lambda path: path.write_bytes(b"") and None,
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]) and None,
    "huge head": lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:]) and None,
    "deep": lambda path: save_file({}, path, {"records": "[" * 100_000}),
    "no records": lambda path: save_file({}, path, {"other": "1"}),
    "one tensor less": tensors_with(lambda tensors: tensors.pop("momentum/0")),
    "short tensor": tensors_with(lambda tensors: tensors.update({"anchor/0": torch.zeros(NUMEL - 1)})),
    "other type": tensors_with(lambda tensors: tensors.update({"anchor/0": torch.zeros(NUMEL, dtype=torch.int64)})),
    "not finite": tensors_with(lambda tensors: tensors["waiting/0"].fill_(float("inf"))),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_by_name(directory: Path, damage: str) -> None:
    path = trained(directory)
    DAMAGES[damage](path)
    with pytest.raises(StateError, match=r"copy is damaged or does not belong to a parameter server"):
        Service(Snapshot(path), print)
    # The file is released.
    Snapshot(path).close()


MISSING = object()


PUSH = {"kind": "push", "run": "a", "number": 0, "place": 0, "call": 1, "samples": 8, "token": "secret"}
SEED = {**PUSH, "kind": "seed", "claim": 0, "shapes": {"weight": [1]}}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({**PUSH, "place": MISSING}, "push: place is missing"),
        ({**PUSH, "place": "0"}, "push: place is '0': Input should be a valid integer"),
        (SEED | {"layout": [["weight", 0]]}, "seed: layout.0.2 is missing"),
    ],
)
def test_a_field_that_does_not_fit_is_named_without_the_rest_of_the_call(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=re.escape(problem)) as raised:
        FROM_ISLANDS.read({name: value for name, value in given.items() if value is not MISSING})
    assert "secret" not in "".join(traceback.format_exception(raised.value))


def records_with(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Write a file with changed records."""

    def damage(path: Path) -> None:
        tensors, about = load_file(path), _about(path)
        records = json.loads(about["records"])
        change(records)
        save_file(tensors, path, {**about, "records": json.dumps(records)})

    return damage


def test_records_of_wrong_types_are_refused_by_name(directory: Path) -> None:
    path = trained(directory)
    whole, rng, refused = path.read_bytes(), random.Random(7), []
    for _ in range(400):
        path.write_bytes(whole)
        try:
            records_with(lambda records: change(records, rng))(path)
        except ValueError:
            # JSON cannot represent this value.
            continue
        try:
            Service(Snapshot(path), print).close()
        except StateError as error:
            refused.append(f"{error}")
    assert len(refused) > 200
    assert all("copy is damaged" in line for line in refused)
