"""A coordinator of islands without sockets, its islands, and a clock."""

import json
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.local_sgd.coordinator.coordinator import Coordinator
from deepspeed_compress.local_sgd.coordinator.records import Saved

TIMEOUT = 5.0
GIVE_UP = 20.0
PATIENCE = GIVE_UP / 2
"""Seconds for which islands wait for an absent one that has the newest anchor."""


def terms(minimum: int = 1) -> dict[str, Any]:
    return {"timeout": TIMEOUT, "minimum": minimum, "outer": "average"}


class CoordinatorHarness:
    """A coordinator without sockets, with the messages to its islands by name, and a clock."""

    def __init__(self, minimum: int = 1, saved: Saved | None = None, came_back: bool = False) -> None:
        self.coordinator = Coordinator(saved or Saved(), came_back)
        self.minimum, self.now = minimum, 0.0
        self.messages: dict[str, list[Mapping[str, Any]]] = {}
        self.heard: dict[str, float] = {}
        """Time of the last message of each island. A server ends the connections of silent ones."""

    def say(self, name: str, kind: str, **fields: Any) -> None:
        self.heard[name] = self.now
        self.coordinator.handle(name, {"kind": kind, **fields}, self.now)
        self.deliver()

    def deliver(self) -> None:
        for name, message in self.coordinator.take_messages():
            self.messages.setdefault(name, []).append(message)

    def lose(self, *names: str) -> None:
        for name in names:
            self.coordinator.disconnect(name, self.now, "lost its connection")
            self.deliver()

    def wait(self, seconds: float, *alive: str) -> None:
        """Advance the clock by `seconds`, with heartbeats of the islands `alive`."""
        for _ in range(round(seconds / 0.5)):
            self.now += 0.5
            for name in alive:
                self.say(name, "beat")
            self.lose(*(one for one in self.coordinator.membership.connected if self.heard[one] < self.now - TIMEOUT))
            self.coordinator.tick(self.now)
            self.deliver()

    def join(self, name: str, **known: Any) -> None:
        about = {"terms": terms(self.minimum), "give_up": GIVE_UP, **known}
        self.say(name, "join", store=f"{name}:1", addresses=[f"{name}:2"], **about)

    def enter(self, *names: str) -> None:
        """Let islands join one after the other, each of which asks for an anchor at once."""
        for name in names:
            self.join(name)
            self.say(name, "sources")

    def come_back(self, name: str, number: int, version: int) -> None:
        """Let an island join that was connected before, with what it knows of the run."""
        self.join(name, number=number, version=version, run=self.coordinator.saved.run)

    def claim(self, name: str, number: int, version: int, run: str | None = None) -> None:
        """Let an island offer its checkpoint, of this run by default."""
        self.say(name, "claim", run=self.coordinator.saved.run if run is None else run, number=number, version=version)

    def ready(self, version: int, *names: str) -> None:
        for name in names:
            self.say(name, "ready", version=version)

    def begin(self, *names: str) -> None:
        for name in names:
            self.join(name)
        for name in names:
            self.say(name, "sources")
        for name in names:
            self.ready(self.last(name, "anchor")["version"], name)

    def commit(self, *names: str) -> None:
        """Let islands arrive and vote for the round, which is committed unless it has others."""
        self.arrive(*names)
        self.vote(*names)

    def exchange(self, *names: str) -> None:
        """Let islands take part in a round that is committed, and train on."""
        self.commit(*names)
        self.ready(self.coordinator.saved.version, *names)

    def arrive(self, *names: str, samples: int = 10) -> None:
        for name in names:
            self.say(name, "arrive", version=self.version(name), samples=samples)

    def version(self, name: str) -> int:
        return self.coordinator.membership.connected[name].version

    def vote(self, *names: str, ok: bool = True) -> None:
        for name in names:
            self.say(name, "vote", round=self.last(name, "round")["id"], ok=ok)

    def last(self, name: str, kind: str) -> Mapping[str, Any]:
        return next(message for message in reversed(self.messages[name]) if message["kind"] == kind)

    def count(self, name: str, kind: str) -> int:
        return sum(message["kind"] == kind for message in self.messages.get(name, []))

    def voting(self) -> list[str]:
        """Return the islands in a round whose outcome is open."""
        ids = {
            name: [max([0, *(one["id"] for one in received if one["kind"] == kind)]) for kind in ("round", "outcome")]
            for name, received in self.messages.items()
        }
        return sorted(name for name, (begun, ended) in ids.items() if begun > ended)

    def asked(self, name: str, kind: str) -> Mapping[str, Any] | None:
        """Return the last answer of `kind` to the island `name`, or None."""
        return next((message for message in reversed(self.messages.get(name, [])) if message["kind"] == kind), None)

    def copied(self) -> "CoordinatorHarness":
        """Return another coordinator that starts from what this one has saved."""
        return CoordinatorHarness(saved=Saved(**json.loads(self.coordinator.to_save())), came_back=True)

    def restart(self) -> None:
        """Start the coordinator again, from what it has saved. All connections end."""
        self.coordinator = self.copied().coordinator

    def anchor(self, name: str) -> tuple[int, list[list[str]]]:
        """Return the version of the last anchor for an island, and its sources."""
        last = self.last(name, "anchor")
        assert last.keys() == {"kind", "version", "sources"}
        return last["version"], last["sources"]

    def partners(self, name: str) -> list[int]:
        return [one["number"] for one in self.last(name, "round")["partners"]]


def begun(*names: str, minimum: int = 1) -> CoordinatorHarness:
    """Return a coordinator with the islands `names`, which start to train."""
    world = CoordinatorHarness(minimum)
    world.begin(*names)
    return world
