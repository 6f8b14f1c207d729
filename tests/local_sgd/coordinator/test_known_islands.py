"""Decisions of the coordinator about islands that are known but not connected. Their anchors must not be lost."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.support.coordinated import PATIENCE, TIMEOUT, CoordinatorHarness, begun, terms


def trained(*names: str, minimum: int = 1, rounds: int = 1) -> CoordinatorHarness:
    """Return a world in which the islands `names` have exchanged."""
    world = begun(*names, minimum=minimum)
    for _ in range(rounds):
        world.exchange(*names)
    return world


@pytest.mark.parametrize("restarted", [False, True])
def test_a_new_island_does_not_restart_the_run_while_trained_islands_are_cut_off(restarted: bool) -> None:
    world = trained("a", "b")
    if restarted:
        world.restart()
    else:
        world.lose("a", "b")
    world.enter("c")
    world.wait(TIMEOUT, "c")
    # This island may have a checkpoint to load, so it trains with its own weights, which do not affect the run.
    assert world.anchor("c") == (0, [])
    world.ready(0, "c")
    world.arrive("c")
    world.wait(10 * PATIENCE, "c")
    assert world.count("c", "round") == 0
    why = world.last("c", "waiting")["why"]
    assert why.startswith("island 0 (a), island 1 (b): not connected")
    assert "ds-compress islands forget HOST:PORT 0 1" in why
    world.come_back("a", 0, 2)
    assert world.anchor("c") == (2, [["a:2"]])


def test_an_outdated_island_does_not_continue_while_the_newest_ones_are_cut_off() -> None:
    world = trained("a", "b", "c")
    world.lose("c")
    for _ in range(5):
        world.exchange("a", "b")
    world.lose("a", "b")
    world.come_back("c", 2, 2)
    world.arrive("c")
    world.wait(PATIENCE - 1, "c")
    assert world.last("c", "over")
    world.come_back("a", 0, 7)
    world.arrive("a", "c")
    assert world.last("a", "round")["base"] == 7


@pytest.mark.parametrize("minimum", [1, 2])
def test_islands_that_died_before_any_exchange_are_awaited_for_their_patience(minimum: int) -> None:
    world = begun(*"ab"[:minimum], minimum=minimum)
    world.lose(*"ab"[:minimum])
    new = "cd"[:minimum]
    world.enter(*new)
    assert world.coordinator.saved.version == 1
    world.wait(TIMEOUT, *new)
    world.ready(0, *new)
    world.arrive(*new)
    world.wait(PATIENCE, *new)
    assert world.coordinator.saved.version == 2
    assert world.anchor("c") == (2, [])


@pytest.mark.parametrize("restarted", [False, True])
def test_a_user_can_remove_dead_islands(restarted: bool) -> None:
    world = trained("a", "b")
    world.lose(*"ab")
    if restarted:
        world.restart()
    world.enter("c")
    world.say("", "forget", numbers=[0])
    world.wait(10 * PATIENCE, "c")
    assert world.coordinator.saved.version == 2
    assert [one["number"] for one in world.coordinator.status(0.0)["missing"]] == [1]
    world.say("", "forget", numbers=[1, 2, 77])
    assert world.coordinator.status(0.0)["missing"] == []
    assert [one["number"] for one in world.coordinator.status(0.0)["islands"]] == [2]
    world.ready(0, "c")
    world.arrive("c")
    assert world.last("c", "anchor")["version"] == 3
    # Island a was forgotten but returns. It gets the anchor of the others.
    world.come_back("a", 0, 2)
    world.arrive("a")
    assert world.anchor("a") == (3, [["c:2"]])


def test_terms_follow_the_islands_that_have_not_left() -> None:
    world = trained("a")
    world.lose("a")
    other = {**terms(), "outer": "nesterov"}
    world.join("b", terms=other)
    assert "outer is 'nesterov', that of the others 'average'" in world.last("b", "refused")["why"]
    assert "ds-compress islands forget HOST:PORT 0" in world.last("b", "refused")["why"]
    world.come_back("a", 0, 2)
    assert world.last("a", "welcome")
    world.say("a", "leave")
    world.join("b", terms=other)
    assert world.last("b", "welcome")


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("asks", [False, True])
def test_all_islands_start_from_the_newest_checkpoint_after_a_power_cut(restarted: bool, asks: bool) -> None:
    """Each island requests an anchor when its engine is created, and then loads its checkpoint."""
    world = trained("a", "b", "c", minimum=2, rounds=12)
    world.lose(*"abc")
    if restarted:
        world.restart()
    for number, (name, version) in enumerate([("d", 9), ("e", 12), ("f", 11)]):
        world.join(name)
        if asks:
            world.say(name, "sources")
            world.wait(TIMEOUT, *"def"[: number + 1])
            assert world.last(name, "anchor")["version"] in (0, 12)
            world.ready(world.last(name, "anchor")["version"], name)
        world.claim(name, number, version)
    newest = {name: world.last(name, "anchor") for name in "def"}
    assert {one["version"] for one in newest.values()} == {12}
    assert newest["e"]["sources"] == []
    assert newest["d"]["sources"] == newest["f"]["sources"] == [["e:2"]]
    world.ready(12, *"def")
    world.arrive("d", "e", "f")
    assert world.last("d", "round")["base"] == 12


def test_a_checkpoint_waits_for_trained_islands_that_are_cut_off() -> None:
    world = trained("a", "b", rounds=9)
    world.lose("a", "b")
    world.join("c")
    world.claim("c", 0, 4)
    world.wait(PATIENCE - 1, "c")
    assert world.count("c", "anchor") == 0
    assert "island 1 (b): not connected" in world.last("c", "waiting")["why"]
    world.come_back("b", 1, 10)
    assert world.anchor("c") == (10, [["b:2"]])


def test_a_checkpoint_of_the_lineage_is_used_if_all_other_islands_are_older() -> None:
    """Island c was cut off in the first round; the others were killed after they had saved."""
    world = trained("a", "b", "c")
    world.lose("c")
    for _ in range(8):
        world.exchange("a", "b")
    world.lose(*"ab")
    world.come_back("c", 2, 2)
    for number, (name, version) in enumerate([("d", 9), ("e", 8)]):
        world.join(name)
        world.claim(name, number, version)
    assert world.anchor("d") == (9, [])
    assert world.anchor("e") == (9, [["d:2"]])
    world.ready(9, "d")
    world.arrive("d", "c")
    world.wait(TIMEOUT, *"cde")
    assert world.last("c", "round")["base"] == 9


def test_a_checkpoint_of_another_run_does_not_replace_known_anchors() -> None:
    world = trained("a")
    world.lose("a")
    world.join("c")
    world.claim("c", 0, 400, "other")
    world.wait(10 * PATIENCE, "c")
    assert world.coordinator.saved.version == 2
    world.say("", "forget", numbers=[0])
    assert world.anchor("c") == (400, [])


def test_a_restarted_coordinator_waits_for_the_islands_that_agreed_to_a_new_beginning() -> None:
    world = trained("a", "b", minimum=2, rounds=3)
    world.lose(*"ab")
    for number, name in enumerate("cd"):
        world.join(name)
        world.claim(name, number, 3)
    assert world.last("d", "anchor")["version"] == 3
    world.restart()
    for number, name in enumerate("cd"):
        world.come_back(name, number + 2, 3)
    world.arrive("c", "d")
    assert world.partners("c") == [2, 3]


@dataclass
class Process:
    """Actual state of an island, independent of what the coordinator knows."""

    name: str
    connected: bool = True
    version: int = 0
    messages_read: int = 0
    """Number of messages that the island has read."""


@dataclass
class Chaos:
    """Random schedule of events of islands and of a coordinator that may restart.

    Islands join, lose their connection, die, save, restart, vote and leave. The invariants are checked after every
    event.
    """

    random: random.Random
    world: CoordinatorHarness = field(default_factory=CoordinatorHarness)
    alive: list[Process] = field(default_factory=list)
    checkpoints: list[tuple[int, int]] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    outcomes: dict[int, bool] = field(default_factory=dict)
    count: int = 0

    def act(self) -> None:
        before = json.loads(self.world.coordinator.to_save())
        patient = {one.name for one in self.cut_off()}
        acts = {"come": 2, "load": 1, "cut": 2, "back": 4, "kill": 1, "leave": 1, "arrive": 10, "vote": 10, "save": 3}
        acts |= {"wait": 3, "restart": 1}
        getattr(self, f"do_{self.random.choices([*acts], [*acts.values()])[0]}")()
        self.read()
        self.check(before, patient)

    def connected(self) -> list[Process]:
        return [one for one in self.alive if one.connected]

    def cut_off(self) -> list[Process]:
        return [one for one in self.alive if not one.connected]

    def number(self, one: Process) -> int:
        return int(self.world.last(one.name, "welcome")["number"])

    def pick(self, among: list[Process]) -> Iterator[Process]:
        yield from self.random.sample(among, 1) if among else ()

    def new(self) -> Process:
        self.count += 1
        one = Process(f"i{self.count}")
        self.alive.append(one)
        self.world.join(one.name)
        self.world.say(one.name, "sources")
        return one

    def do_come(self) -> None:
        if len(self.alive) < 5:
            self.new()

    def do_load(self) -> None:
        for number, version in self.random.sample(self.checkpoints, 1) if self.checkpoints else ():
            one, run = self.new(), self.world.coordinator.saved.run
            self.world.wait(TIMEOUT, *(one.name for one in self.connected()))
            self.world.claim(one.name, number, version, run)

    def do_cut(self) -> None:
        for one in self.pick(self.connected()):
            one.connected = False
            self.world.lose(one.name)

    def do_back(self) -> None:
        for one in self.pick(self.cut_off()):
            one.connected = True
            self.back(one)

    def back(self, one: Process) -> None:
        self.world.come_back(one.name, self.number(one), one.version)
        if one.version == 0:
            self.world.say(one.name, "sources")

    def do_kill(self) -> None:
        for one in self.pick(self.alive):
            self.alive.remove(one)
            self.dead.append(one.name)
            self.world.lose(one.name)

    def do_leave(self) -> None:
        for one in self.pick(self.connected()):
            self.alive.remove(one)
            self.world.say(one.name, "leave")

    def do_arrive(self) -> None:
        for one in self.pick([one for one in self.connected() if one.name not in self.world.voting()]):
            self.world.say(one.name, "arrive", version=one.version, samples=5)

    def do_vote(self) -> None:
        voting = [one for one in self.connected() if one.name in self.world.voting()]
        for one in self.pick(voting):
            self.world.vote(one.name, ok=self.random.random() < 0.9)

    def do_save(self) -> None:
        for one in self.pick([one for one in self.alive if one.version]):
            self.checkpoints.append((self.number(one), one.version))

    def do_wait(self) -> None:
        self.world.wait(self.random.choice([0.5, TIMEOUT]), *(one.name for one in self.connected()))

    def do_restart(self) -> None:
        self.world.restart()
        for one in self.connected():
            self.back(one)
            for id_ in [self.world.last(one.name, "round")["id"]] if one.name in self.world.voting() else ():
                self.world.say(one.name, "vote", round=id_, ok=True)

    def read(self) -> None:
        """Let the islands read their messages about anchors and outcomes."""
        for one in self.connected():
            received = self.world.messages[one.name][one.messages_read :]
            one.messages_read += len(received)
            for message in received:
                if message["kind"] == "anchor":
                    one.version = message["version"]
                elif message["kind"] == "outcome":
                    committed = self.outcomes.setdefault(message["id"], message["committed"])
                    assert committed == message["committed"], "a round has one outcome"
                    one.version = message["id"] if committed else one.version
            if any(message["kind"] in ("anchor", "outcome") for message in received):
                self.world.ready(one.version, one.name)

    def check(self, before: dict[str, Any], patient: set[str]) -> None:
        after = self.world.coordinator.saved
        again = after.version != before["version"] and after.lineage == [after.version]
        if again and not before["unproven"]:
            holding = [one.name for one in self.alive if one.version in before["lineage"] and one.name not in patient]
            assert after.claimed is not None or not before["holders"], "nobody begins anew while holders have not left"
            assert not [name for name in holding if after.claimed is None], "trained islands are not dropped"

    def mend(self) -> None:
        """Restore the network, remove dead islands, and let the remaining ones follow the protocol."""
        for one in self.cut_off():
            one.connected = True
            self.back(one)
        if not self.alive:
            self.new()
        missing = [one["number"] for one in self.world.coordinator.status(0.0)["missing"]]
        self.world.say("", "forget", numbers=missing)
        for _ in range(4):
            self.read()
            self.world.vote(*(one.name for one in self.alive if one.name in self.world.voting()))
            self.world.wait(PATIENCE, *(one.name for one in self.alive))
            self.read()
            # An island that is behind opens no round. It arrives when it learns of an open one.
            for one in sorted(self.alive, key=lambda one: -one.version):
                if one.name not in self.world.voting():
                    self.world.say(one.name, "arrive", version=one.version, samples=5)
            self.world.wait(TIMEOUT, *(one.name for one in self.alive))


@pytest.mark.parametrize("seed", range(60))
def test_random_histories_lose_no_trained_weights_and_block_no_island_forever(seed: int) -> None:
    chaos = Chaos(random.Random(seed))
    for _ in range(100):
        chaos.act()
    chaos.mend()
    assert len(chaos.world.voting()) == len(chaos.alive)


def test_a_new_island_waits_for_the_newest_anchor() -> None:
    world = trained("a", "b")
    world.lose("b")
    world.exchange("a")
    world.lose("a")
    world.come_back("b", 1, 2)
    world.enter("c")
    assert world.count("c", "anchor") == 0
    assert "island 0 (a): not connected" in world.last("c", "waiting")["why"]
    world.wait(PATIENCE + 0.5, "b", "c")
    assert [one for one in world.messages["c"] if one["kind"] == "anchor"][-1]["version"] in (0, 2)
    world.say("c", "sources")
    assert world.anchor("c") == (2, [["b:2"]])


def test_islands_that_left_are_not_awaited() -> None:
    world = trained("a", "b")
    world.say("a", "leave")
    world.say("b", "leave")
    world.begin("c")
    assert world.last("c", "anchor")["sources"] == []
    world.arrive("c")
    assert world.partners("c") == [2]


def test_islands_with_the_newest_anchor_do_not_wait_for_a_dead_one() -> None:
    world = trained("a", "b")
    world.lose("a")
    world.arrive("b")
    assert world.partners("b") == [1]
    world.vote("b")
    world.begin("c")
    assert world.last("c", "anchor")["sources"] == [["b:2"]]


def test_an_island_that_died_long_ago_does_not_replace_those_that_continued() -> None:
    world = trained("a", "b")
    world.lose("a")
    world.wait(PATIENCE + 0.5, "b")
    world.exchange("b")
    world.say("b", "leave")
    world.begin("c")
    assert world.last("c", "anchor")["sources"] == []


def test_the_state_file_of_an_earlier_release_restores_the_islands_of_the_last_round() -> None:
    world = trained("a", "b")
    saved = json.loads(world.coordinator.to_save())
    del saved["holders"]
    world.coordinator.to_save = lambda: json.dumps(saved)  # type: ignore[method-assign]
    world.restart()
    world.enter("c")
    assert [one["number"] for one in world.coordinator.status(0.0)["missing"]] == [0, 1]
    world.wait(10 * PATIENCE, "c")
    assert world.coordinator.saved.version == 2
