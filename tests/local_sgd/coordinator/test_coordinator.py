"""The coordinator of islands as a state machine: membership, commits, and uniqueness of the majority."""

import pytest

from deepspeed_compress.local_sgd.coordinator.records import Holder, Saved
from tests.support.coordinated import PATIENCE, TIMEOUT, CoordinatorHarness, begun, terms


def test_the_first_island_provides_the_anchor_for_the_others() -> None:
    world = CoordinatorHarness(minimum=2)
    world.enter("a")
    world.wait(2.0, "a")
    assert world.count("a", "anchor") == 0
    assert world.count("a", "waiting") == 1
    world.enter("b")
    assert world.last("a", "anchor")["sources"] == []
    assert world.last("b", "anchor")["sources"] == [["a:2"]]
    assert world.last("a", "anchor")["version"] == world.last("b", "anchor")["version"] == 1
    assert [world.last(name, "welcome")["number"] for name in "ab"] == [0, 1]


def test_a_round_begins_when_all_have_arrived_and_is_committed_when_all_have_voted() -> None:
    world = begun("a", "b")
    world.arrive("a")
    assert world.count("a", "round") == 0
    assert world.count("b", "open") == 1
    world.arrive("b", samples=30)
    assert world.last("a", "round") == world.last("b", "round")
    assert world.partners("a") == [0, 1]
    world.vote("a")
    assert world.count("a", "outcome") == 0
    world.vote("b")
    assert world.last("a", "outcome")["committed"]
    assert world.version("a") == world.version("b") == world.coordinator.saved.version == world.last("a", "round")["id"]


def test_no_island_is_awaited_longer_than_the_timeout() -> None:
    world = begun("a", "b", "c")
    world.arrive("a", "b")
    world.wait(TIMEOUT - 0.5, "a", "b", "c")
    assert world.count("a", "round") == 0
    world.wait(0.5, "a", "b", "c")
    assert world.partners("a") == [0, 1]
    world.arrive("c")
    assert world.last("c", "over")
    world.vote("a", "b")
    # Island c is behind now. It joins the next round but does not open it.
    world.arrive("c")
    assert world.count("c", "over") == 2
    world.arrive("a", "c", "b")
    assert world.partners("c") == [0, 1, 2]
    assert [one["version"] for one in world.last("c", "round")["partners"]] == [2, 2, 1]


def test_a_busy_island_is_awaited_once() -> None:
    world = begun("a", "b", "c")
    world.arrive("a", "b")
    world.wait(TIMEOUT, "a", "b", "c")
    world.vote("a", "b")
    world.arrive("a", "b")
    assert world.count("a", "round") == 2
    world.vote("a", "b")
    # Island c has sent a message again, so the coordinator waits for it again.
    world.arrive("c")
    world.arrive("a", "b")
    assert world.count("a", "round") == 2
    world.arrive("c")
    assert world.partners("c") == [0, 1, 2]


def test_an_island_that_is_silent_for_the_timeout_is_lost() -> None:
    world = begun("a", "b", "c")
    world.wait(TIMEOUT + 1, "a", "b")
    world.arrive("a", "b")
    assert world.partners("a") == [0, 1]
    world.come_back("c", 2, 1)
    assert world.last("c", "welcome")["number"] == 2


@pytest.mark.parametrize("voted", [0, 1, 2])
def test_a_death_before_the_vote_makes_the_round_void_for_all(voted: int) -> None:
    world = begun("a", "b", "c")
    world.arrive("a", "b", "c")
    world.vote(*"ab"[:voted])
    world.lose("c")
    assert not world.last("a", "outcome")["committed"]
    assert world.version("a") == 1
    # A repeated question or a different vote gets the same answer.
    world.vote("a", "b")
    assert not world.last("b", "outcome")["committed"]


def test_a_death_after_the_vote_changes_nothing() -> None:
    world = begun("a", "b", "c")
    world.arrive("a", "b", "c")
    world.vote("c")
    world.lose("c")
    world.vote("a", "b")
    assert world.last("a", "outcome")["committed"]
    # Island c returns and asks for the outcome.
    world.come_back("c", 2, 1)
    world.vote("c")
    assert world.last("c", "outcome")["committed"]


def test_the_run_continues_from_the_next_newest_anchor_if_the_newest_is_lost() -> None:
    world = begun("a", "b")
    world.arrive("a")
    world.wait(TIMEOUT, "a", "b")
    world.vote("a")
    assert world.coordinator.saved.version == 2
    world.lose("a")
    world.arrive("b")
    # Island a may only be cut off, so b trains on without an exchange until its patience ends.
    assert world.last("b", "over")
    world.wait(PATIENCE + 0.5, "b")
    world.arrive("b")
    assert world.last("b", "round")["base"] == 1
    assert world.last("b", "round")["id"] == 3


def test_a_round_without_the_newest_anchor_does_not_take_place() -> None:
    world = begun("a", "b", "c")
    world.arrive("a", "c")
    world.wait(TIMEOUT, "a", "b", "c")
    world.vote("a", "c")
    world.arrive("a", "b")
    world.lose("a")
    world.wait(TIMEOUT, "b", "c")
    # Only c has the newest anchor, and c has not arrived.
    assert world.count("b", "round") == 0
    assert world.last("b", "over")


def test_a_restarted_coordinator_waits_for_a_majority_of_the_last_round() -> None:
    """So two coordinators with copies of one state do not both continue."""
    names = "abcde"
    world = begun(*names)
    world.commit(*names)
    few, most = world.copied(), world.copied()
    for other, part in ((few, "ab"), (most, "cde")):
        for name in part:
            other.come_back(name, names.index(name), 2)
        other.arrive(*part)
        other.wait(4 * TIMEOUT, *part)
    assert few.count("a", "round") == 0
    assert "island 3 (unknown host), island 4 (unknown host): not connected" in few.last("a", "waiting")["why"]
    assert most.partners("c") == [2, 3, 4]
    # Earlier outcomes are final.
    most.say("c", "vote", round=2, ok=False)
    assert most.last("c", "outcome") == {"kind": "outcome", "id": 2, "committed": True}


def test_a_loaded_checkpoint_replaces_a_lost_island() -> None:
    members = [0, 1, 2]
    saved = Saved(
        run="x",
        version=14,
        lineage=[12, 13, 14],
        next_round=15,
        next_number=3,
        members=members,
        holders=dict.fromkeys(members, Holder(14)),
    )
    world = CoordinatorHarness(minimum=2, saved=saved, came_back=True)
    for number, name in enumerate("ab"):
        world.join(name)
        world.claim(name, number, 12 + number, "x")
    assert world.anchor("b") == (13, [])
    assert world.anchor("a") == (13, [["b:2"]])


def test_all_islands_start_from_the_newest_checkpoint_under_a_new_coordinator() -> None:
    world = begun("a", "b", "c", minimum=3)
    for name, version in zip("abc", (7, 9, 9), strict=True):
        world.claim(name, 0, version, "former")
    assert [len(world.last(name, "anchor")["sources"]) for name in "abc"] == [2, 0, 0]
    assert {world.last(name, "anchor")["version"] for name in "abc"} == {9}
    world.ready(9, *"abc")
    world.arrive("a", "b", "c")
    assert world.last("a", "round")["id"] > 9


@pytest.mark.parametrize(
    ("saved", "numbers"),
    [((1, 0, 2), [1, 0, 2]), ((2, 0, 1), [2, 0, 1]), ((7, 3, 5), [2, 0, 1]), ((4, 4, 1), [1, 2, 0])],
)
def test_islands_that_start_again_are_in_the_order_of_their_checkpoints(
    saved: tuple[int, ...], numbers: list[int]
) -> None:
    world = begun("a", "b", "c", "d", minimum=3)
    for name, number in zip("abc", saved, strict=True):
        world.claim(name, number, 9, "former")
    assert [world.last(name, "welcome")["number"] for name in "abcd"] == [*numbers, 3]
    world.ready(9, *"abc")
    world.arrive("a", "b", "c")
    assert world.partners("a") == [0, 1, 2]


@pytest.mark.parametrize("has_one", [True, False])
def test_an_island_that_arrives_too_late_for_an_anchor_loads_its_checkpoint(has_one: bool) -> None:
    """Island a starts to load its own checkpoint before b, which was referred to a, has fetched the anchor."""
    world = CoordinatorHarness(minimum=2)
    for name in "ab":
        world.join(name)
    for name in "ab":
        world.say(name, "sources")
    assert world.last("b", "anchor")["sources"] == [["a:2"]]
    world.ready(world.last("a", "anchor")["version"], "a")
    world.claim("a", 0, 7, "former")
    world.say("b", "sources")
    assert world.anchor("b") == (0, [])
    world.ready(0, "b")
    if has_one:
        world.claim("b", 1, 9, "former")
        assert world.anchor("b") == (9, [])
        assert world.anchor("a") == (9, [["b:2"]])
    else:
        # Island b trains. When it requests an exchange, it waits for an island with a checkpoint.
        world.arrive("b")
        world.join("c")
        world.claim("c", 1, 8, "former")
        assert world.anchor("c") == (8, [])
        assert world.anchor("b") == (8, [["c:2"]])


def test_an_island_that_joins_while_others_wait_with_checkpoints_loads_its_own() -> None:
    """No island has an anchor.

    Without this rule, the new one would wait for the others, and they for its checkpoint.
    """
    world = CoordinatorHarness(minimum=2)
    world.join("a")
    world.claim("a", 0, 7, "former")
    assert world.count("a", "anchor") == 0
    world.enter("b")
    assert world.anchor("b") == (0, [])
    # Island c has no checkpoint. It must not start a new run with b, although `minimum` is 2.
    world.enter("c")
    world.ready(0, "c")
    world.arrive("c")
    assert world.count("c", "round") == 0
    world.claim("b", 1, 9, "former")
    assert [world.last(name, "anchor")["version"] for name in "abc"] == [9, 9, 9]
    assert [world.last(name, "anchor")["sources"] for name in "abc"] == [[["b:2"]], [], [["b:2"]]]


def test_a_checkpoint_is_not_an_anchor_if_others_have_continued() -> None:
    world = begun("a")
    world.commit("a")
    world.begin("b")
    world.claim("b", 0, 40)
    assert world.anchor("b") == (2, [["a:2"]])


def test_updates_from_another_beginning_are_not_added() -> None:
    world = begun("a")
    world.claim("a", 0, 9, "former")
    world.ready(9, "a")
    world.join("b", version=1)
    world.arrive("b")
    assert world.last("b", "anchor")["sources"] == [["a:2"]]
    assert world.count("b", "round") == 0


def test_fewer_than_the_minimum_do_not_exchange() -> None:
    world = begun("a", "b", minimum=2)
    world.lose("b")
    world.arrive("a")
    world.wait(2 * TIMEOUT, "a")
    assert world.count("a", "round") == 0
    assert "at least 2 islands are needed (minimum), and there are 1" in world.last("a", "waiting")["why"]
    world.begin("c")
    world.arrive("c")
    assert world.partners("a") == [0, 2]


def test_a_process_can_be_only_one_island() -> None:
    world = CoordinatorHarness()
    world.join("a", process="host:1")
    world.join("b", process="host:1")
    assert "process host:1 already is an island" in world.last("b", "refused")["why"]
    world.join("a", process="host:1")
    assert world.count("a", "refused") == 0
    world.lose("a")
    world.join("c", process="host:1")
    assert world.last("c", "welcome")


def test_a_version_lost_with_its_holders_is_not_in_the_lineage() -> None:
    """The others have continued from an older version, so updates from the lost version must not be added."""
    world = begun("a", "b", "c")
    world.arrive("a", "b")
    world.wait(TIMEOUT, "a", "b", "c")
    world.vote("a", "b")
    assert world.coordinator.saved.lineage == [1, 2]
    world.lose(*"ab")
    world.wait(PATIENCE + 0.5, "c")
    world.commit("c")
    assert world.coordinator.saved.lineage == [1, 3]
    # Island a knows that its round was committed, so it gets the anchor of the others. Island b does not know the
    # outcome, and learns that the round is void.
    world.come_back("a", 0, 2)
    world.say("a", "arrive", version=2, samples=10)
    assert world.anchor("a") == (3, [["c:2"]])
    world.come_back("b", 1, 1)
    world.say("b", "vote", round=2, ok=True)
    assert not world.last("b", "outcome")["committed"]


def test_terms_are_those_of_the_connected_islands() -> None:
    world = begun("a")
    message = {"terms": {**terms(), "outer": "nesterov"}, "store": "b:1", "addresses": []}
    world.say("b", "join", **message)
    assert world.last("b", "refused")["why"] == "outer is 'nesterov', that of the others 'average'"
    world.lose("a")
    world.say("b", "join", **message)
    assert "island 0 (a): not connected" in world.last("b", "refused")["why"]
    # Island a has not exchanged anything, so it is awaited only for its patience.
    world.wait(PATIENCE + 0.5)
    world.say("b", "join", **message)
    assert world.last("b", "welcome")


def test_an_island_of_another_run_is_refused() -> None:
    world = CoordinatorHarness()
    world.join("a", run="other", number=3, version=4)
    assert "the island belongs to run other" in world.last("a", "refused")["why"]
