"""Invalid messages: the coordinator refuses them, and its state does not change."""

import copy
import json
import random
from collections.abc import Mapping
from typing import Any

import pytest

from deepspeed_compress.local_sgd.coordinator.messages import FROM_ISLANDS
from tests.support.coordinated import CoordinatorHarness, begun, terms
from tests.support.mutations import change

SURROGATE = "\ud800"
JOIN = {"terms": terms(), "store": "z:1", "addresses": ["z:2"]}
RIGHT: Mapping[str, Mapping[str, Any]] = {
    "join": {**JOIN, "name": "z", "process": "p", "version": 1, "number": 0, "give_up": 20.0},
    "ready": {"version": 2},
    "claim": {"run": "other", "number": 0, "version": 7},
    "arrive": {"version": 2, "samples": 3},
    "vote": {"round": 2, "ok": True},
    "forget": {"numbers": [0]},
}


def exchanging() -> CoordinatorHarness:
    """Return a world in which a and b have exchanged once, and a waits for the next round."""
    world = begun("a", "b")
    world.commit("a", "b")
    world.arrive("a")
    return world


def state(world: CoordinatorHarness) -> Any:
    """Return the complete state of the coordinator."""
    membership, rounds = world.coordinator.membership, world.coordinator._rounds
    own = [(one.__dict__.keys() - {"known", "_membership"}, one.__dict__) for one in (membership, rounds)]
    parts = [{name: values[name] for name in sorted(names)} for names, values in own]
    return copy.deepcopy([world.coordinator.to_save(), membership.known.__dict__, *parts])


def refused(world: CoordinatorHarness, name: str, message: Mapping[str, Any]) -> bool:
    """Return True if `message` is refused as malformed and the state has not changed."""
    before = state(world)
    try:
        world.coordinator.handle(name, message, world.now + 1.0)
    except ValueError:
        assert state(world) == before
        return True
    return False


@pytest.mark.parametrize("kind", [None, 3, "", "JOIN", "status", [], SURROGATE, "x" * 10_000])
def test_an_unknown_kind_is_refused(kind: object) -> None:
    assert refused(exchanging(), "a", {"kind": kind, "version": 1})
    assert refused(exchanging(), "a", {"version": 1})


@pytest.mark.parametrize(
    ("number", "version", "text"),
    [
        (7, 1, "island 7 with version 1 is not known to run"),
        (0, 99, "island 0 with version 99 is not known to run"),
        (0, 2, "island 0 is already connected from another process"),
    ],
)
def test_an_island_that_cannot_join_learns_the_reason(number: int, version: int, text: str) -> None:
    world = exchanging()
    saved = world.coordinator.to_save()
    world.come_back("c", number, version)
    assert text in world.last("c", "refused")["why"]
    assert world.coordinator.to_save() == saved
    assert "c" not in world.coordinator.membership.connected


def test_a_claim_does_not_break_later_rounds() -> None:
    world = CoordinatorHarness()
    world.join("a")
    world.claim("a", 3, 2**40, "former")
    world.ready(2**40, "a")
    world.commit("a")
    assert world.coordinator.saved.version == 2**40 + 1 < 2**53


@pytest.mark.parametrize("seed", range(8))
def test_mutated_messages_are_refused_without_a_change_or_are_valid(seed: int) -> None:
    rng, world = random.Random(seed), exchanging()
    found = {True: 0, False: 0}
    for _ in range(500):
        kind = rng.choice([*RIGHT])
        fields = copy.deepcopy(dict(RIGHT[kind]))
        for _ in range(rng.choice((1, 1, 2))):
            change(fields, rng)
        found[refused(world, rng.choice("ab"), {"kind": kind, **fields})] += 1
        json.loads(world.coordinator.to_save())
        json.dumps(world.coordinator.take_messages(), allow_nan=False).encode()
        if rng.random() < 0.05:
            world = exchanging()
    assert found[True] > 200
    assert found[False] > 0


def test_a_message_has_the_fields_of_its_kind() -> None:
    for kind, fields in RIGHT.items():
        found = FROM_ISLANDS.read({"kind": kind, **fields, "run": "other"})
        assert type(found).__name__.lower() == kind


@pytest.mark.parametrize(
    ("kind", "field", "wrong"),
    [
        ("claim", "version", 2**60),
        ("claim", "version", 2**53),
        ("claim", "version", -1),
        ("claim", "run", SURROGATE),
        ("claim", "number", -2),
        ("arrive", "samples", -1),
        ("arrive", "samples", float("nan")),
        ("arrive", "samples", True),
        ("arrive", "version", -1),
        ("arrive", "version", 3),
        ("ready", "version", 3),
        ("ready", "version", 2**200),
        ("vote", "round", 99),
        ("vote", "ok", 1),
        ("vote", "ok", "yes"),
        ("join", "process", SURROGATE),
        ("join", "store", "x" * 10_000),
        ("join", "addresses", ["x"] * 100_000),
        ("join", "addresses", ["x" * 10_000]),
        ("join", "addresses", [SURROGATE]),
        ("join", "terms", {**terms(), "timeout": True}),
        ("join", "terms", {**terms(), "timeout": 1e300}),
        ("join", "terms", {**terms(), "minimum": 0}),
        ("join", "terms", {**terms(), "minimum": 1.5}),
        ("join", "give_up", float("nan")),
        ("join", "number", 0),
        ("forget", "numbers", [-1]),
        ("forget", "numbers", "all"),
    ],
)
def test_a_wrong_field_is_refused_and_changes_nothing(kind: str, field: str, wrong: object) -> None:
    message = {"kind": kind, **RIGHT[kind], field: wrong}
    if field != "number":
        message.pop("number", None)
    assert refused(exchanging(), "a", message)
