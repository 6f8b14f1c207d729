"""Decisions for all agents of a job, made in one place, as a pure state machine without sockets or a clock.

An agent sends `join`, `beat` (state of its ranks), `failed` (a rank has failed), `done` (all of its ranks have ended
successfully), `stopped` (all ranks that it had to stop are gone), and `end` (a user asks to end the job). It receives
`start`, `stop`, `pass` (a signal for its ranks), `over`, `refused`, and `unknown`.

Messages carry the number of the start that they refer to; those with another number are outdated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.launcher.failures import EARLY, HOPELESS, PERMANENT, Failure, hopeless, lost_slot
from deepspeed_compress.launcher.messages import Message
from deepspeed_compress.launcher.placement import Host, Placement, place

__all__ = ["LOST_AFTER", "Supervisor", "Terms"]

LOST_AFTER = 10.0
"""Seconds of silence after which a host is considered lost.

Agents that receive nothing for half of this time end their ranks.
"""
FAILED, SIGNALLED = 1, 128
"""Exit code of a failed job, and the offset that is added to the number of a signal that ended it."""


@dataclass(frozen=True)
class Terms:
    """Parameters of a job.

    Attributes:
        job: identifier of the job; agents of another one are refused.
        hosts: number of hosts.
        ranks: number of ranks on each host.
        restarts: largest number of restarts.
        hang: seconds without a sign of life from any rank after which they are restarted.
        wait: seconds to wait for hosts.
    """

    job: str
    hosts: int
    ranks: int
    restarts: int
    hang: float
    wait: float


@dataclass
class _Member:
    """Connected agent.

    `silent` is the seconds since the last sign of life of its ranks; None until each of them has given one.
    """

    address: str
    slots: tuple[int, ...]
    port: int
    heard: float
    silent: float | None = None
    done: bool = False
    stopped: bool = False


@dataclass
class _State:
    """State of a job.

    Attributes:
        phase: "waiting" for hosts, "running", "stopping", or "over".
        start: number of the current start.
        restarts: number of restarts so far.
        placement: hosts and slots of the ranks.
        since: time since which the job waits for hosts.
        signal: signal that asked the job to end; 0 for none.
        steps: largest number of steps of any start, as counted by the ranks.
        step_seen: True if this start has made a step.
        code: exit code of the job, once it is over.
        why: reason for its end, once it is over.
        failures: failures of all starts.
    """

    phase: str = "waiting"
    start: int = 0
    restarts: int = 0
    placement: Placement | None = None
    since: float | None = None
    signal: int = 0
    steps: int = 0
    step_seen: bool = False
    code: int = 0
    why: str = ""
    failures: list[Failure] = field(default_factory=list)


class Supervisor:
    """State machine of a job.

    Pass it messages (`handle`), lost connections (`disconnect`) and the time (`tick`), in seconds of any clock; then
    send the messages that `take_messages` returns.

    Args:
        terms: parameters of the job.
        why_not: returns why so many ranks may not train; "" if they may.
        tell: receives log lines.
    """

    def __init__(self, terms: Terms, why_not: Callable[[int], str], tell: Callable[[str], None]) -> None:
        self._terms, self._why_not, self._tell = terms, why_not, tell
        self._members: dict[str, _Member] = {}
        self._state = _State()
        self._outbox: list[tuple[str, Message]] = []
        self._heard: Mapping[str, Callable[[str, Message, float], None]] = {
            "join": self._join,
            "beat": self._beat,
            "failed": self._failed,
            "done": self._done,
            "stopped": self._stopped,
            "end": self._end,
        }

    def take_messages(self) -> list[tuple[str, Message]]:
        """Return the messages to send, in order, each with the name of its agent."""
        found, self._outbox = self._outbox, []
        return found

    def to_save(self) -> str:
        """Return "", because no state outlives the job."""
        return ""

    def status(self, now: float) -> dict[str, Any]:
        """Return a summary: the phase of the job, and the connected hosts."""
        hosts = [
            {"address": one.address, "slots": list(one.slots), "silent": round(now - one.heard, 1)}
            for one in self._members.values()
        ]
        state = self._state
        return {"phase": state.phase, "restarts": state.restarts, "steps": state.steps, "hosts": hosts}

    def handle(self, name: str, message: Message, now: float) -> None:
        """Handle `message` of the agent `name`. Raises ValueError if its kind is unknown."""
        handler = self._heard.get(message["kind"])
        if handler is None:
            raise ValueError(f"unknown message {message['kind']!r}")
        if name in self._members:
            self._members[name].heard = now
        elif message["kind"] != "join":
            # It was declared lost in the meantime, and has to join again.
            self._say(name, {"kind": "unknown"})
            return
        handler(name, message, now)
        self._settle(now)

    def disconnect(self, name: str, now: float) -> None:
        """Handle the end of the connection to `name`."""
        member = self._members.pop(name, None)
        if member is not None:
            if self._runs(name) and not member.done:
                self._stop(Failure(f"host {member.address} cannot be reached"))
            self._settle(now)

    def tick(self, now: float) -> None:
        for name in [name for name, one in self._members.items() if now - one.heard > LOST_AFTER]:
            self.disconnect(name, now)
        if self._state.phase == "running" and self._silent(now) > self._terms.hang:
            self._stop(Failure(f"no rank has given a sign of life for {self._terms.hang:g} s"))
        self._settle(now)

    # Messages of agents.

    def _join(self, name: str, message: Message, now: float) -> None:
        if message["job"] != self._terms.job:
            # The name of the job is not revealed: knowing it is enough to join.
            self._say(name, {"kind": "refused", "why": "it is of another job"})
            return
        if name in self._members:
            # An agent joins once, and under a new name after it has lost its connection.
            return
        self._members[name] = _Member(message["address"], tuple(message["slots"]), message["port"], now)
        if self._state.phase == "over":
            # It was considered lost when the job ended, and would wait forever.
            self._say_over(name)

    def _beat(self, name: str, message: Message, now: float) -> None:
        member = self._members[name]
        if message["start"] == self._state.start:
            member.silent = message["silent"]
            self._count(message["steps"])

    def _count(self, steps: int) -> None:
        self._state.steps = max(self._state.steps, steps)
        self._state.step_seen |= steps > 0

    def _failed(self, name: str, message: Message, now: float) -> None:
        if message["start"] == self._state.start and self._runs(name):
            self._count(message["steps"])
            why = f"rank {message['rank']} on {self._members[name].address} {message['how']}"
            self._stop(Failure(why, (name, message["slot"]), message["code"]))
        elif message["start"] == self._state.start and self._state.phase == "stopping" and message["code"] is None:
            # Another rank that was killed may be the reason why the first reported one has raised.
            self._state.failures[-1].code = None

    def _done(self, name: str, message: Message, now: float) -> None:
        if message["start"] == self._state.start:
            self._members[name].done = True

    def _stopped(self, name: str, message: Message, now: float) -> None:
        if message["start"] == self._state.start:
            self._count(message["steps"])
            self._members[name].stopped, self._members[name].port = True, message["port"]

    def _end(self, name: str, message: Message, now: float) -> None:
        if not self._state.signal:
            self._state.signal = message["number"]
            self._tell(f"asked to end; after {self._state.steps} steps")
            self._say_to_placed({"kind": "pass", "number": message["number"]})

    # Decisions.

    def _settle(self, now: float) -> None:
        """Do everything that has become due."""
        state, placed = self._state, self._placed()
        if state.phase == "running" and placed and all(one.done for one in placed.values()):
            self._finish(SIGNALLED + state.signal if state.signal else 0, "")
        if state.phase == "stopping" and all(one.stopped for one in placed.values()):
            failure = state.failures[-1]
            failure.early, failure.steps, failure.hosts = not state.step_seen, state.steps, tuple(self._hosts())
            self._begin_again(now)
        if state.phase == "waiting":
            self._start_if_possible(now)

    def _begin_again(self, now: float) -> None:
        state, failure = self._state, self._state.failures[-1]
        if state.signal:
            self._finish(SIGNALLED + state.signal, "")
        elif state.restarts == self._terms.restarts:
            self._finish(FAILED, f"{failure.why}, and all {state.restarts} restarts are used")
        elif not self._give_up_slot() and hopeless(state.failures):
            row = f"as {HOPELESS} starts in a row have without a new step: "
            text = f"{'' if failure.code == PERMANENT else row}no restart cures that; see its output above"
            self._finish(FAILED, f"{failure.why}, {text}")
        else:
            state.restarts += 1
            state.phase, state.since = "waiting", now

    def _start_if_possible(self, now: float) -> None:
        state, terms = self._state, self._terms
        if state.signal:
            self._finish(SIGNALLED + state.signal, "")
            return
        state.since = now if state.since is None else state.since
        placement = self._place(self._hosts())
        if placement is not None:
            self._start(placement)
        elif now - state.since > terms.wait:
            self._finish(FAILED, self._why_waiting())

    def _why_waiting(self) -> str:
        terms, there = self._terms, sum(min(len(one.slots), self._terms.ranks) for one in self._members.values())
        missing = f"{there} of {terms.hosts * terms.ranks} ranks have a place after {terms.wait:g} s (--wait)"
        reason = self._why_not(there) if self._state.start else ""
        return f"{missing}, and fewer cannot train: {reason}" if reason else missing

    def _place(self, hosts: list[Host]) -> Placement | None:
        """Place all ranks on the first start, and as many as may train on later ones."""
        state, terms = self._state, self._terms
        fits = (lambda ranks: not self._why_not(ranks)) if state.start else (lambda ranks: False)
        return place(hosts, terms.hosts, terms.ranks, fits, state.placement)

    def _start(self, placement: Placement) -> None:
        state = self._state
        state.start, state.phase, state.placement = state.start + 1, "running", placement
        state.step_seen, state.since = False, None
        addresses = [self._members[host.name].address for host in placement.hosts]
        common = {
            "kind": "start",
            "start": state.start,
            "restart": state.restarts,
            "world": placement.world,
            "hosts": addresses,
            "port": self._members[placement.hosts[0].name].port,
            "resume": state.steps > 0,
        }
        for node, host in enumerate(placement.hosts):
            member = self._members[host.name]
            member.done, member.stopped, member.silent = False, False, None
            first = placement.first_rank(node)
            self._say(host.name, {**common, "node": node, "first": first, "slots": list(host.slots)})
        if state.restarts:
            self._tell(f"restart {state.restarts} of {self._terms.restarts}, with {placement.world} ranks")

    def _stop(self, failure: Failure) -> None:
        state = self._state
        state.phase = "stopping"
        state.failures.append(failure)
        self._tell(f"{failure.why}; after {state.steps} steps")
        self._say_to_placed({"kind": "stop"})

    def _give_up_slot(self) -> bool:
        """Drop a slot in which start after start has failed before its first step, if the ranks fit elsewhere.

        Returns True if a slot was dropped.
        """
        slot = lost_slot(self._state.failures)
        if slot is None or slot[0] not in self._members:
            return False
        without = {host.name: host for host in self._hosts()}
        without[slot[0]] = Host(slot[0], tuple(one for one in without[slot[0]].slots if one != slot[1]))
        if self._place(list(without.values())) is None:
            return False
        member = self._members[slot[0]]
        member.slots = without[slot[0]].slots
        self._tell(f"slot {slot[1]} of {member.address} is left out: {EARLY} starts in a row have failed there")
        return True

    def _finish(self, code: int, why: str) -> None:
        if not code and not self._state.steps:
            self._tell("warning: --hang has watched nothing: no engine with the section has made a step")
        self._state.phase, self._state.code, self._state.why = "over", code, why
        for name in self._members:
            self._say_over(name)

    def _hosts(self) -> list[Host]:
        return [Host(name, one.slots) for name, one in self._members.items()]

    def _runs(self, name: str) -> bool:
        return self._state.phase == "running" and name in self._placed_names()

    def _placed_names(self) -> list[str]:
        placement = self._state.placement
        return [] if placement is None else [host.name for host in placement.hosts]

    def _placed(self) -> dict[str, _Member]:
        """Return the connected members that have ranks of this start."""
        return {name: self._members[name] for name in self._placed_names() if name in self._members}

    def _silent(self, now: float) -> float:
        """Return the seconds since the last sign of life of any rank; 0 until each rank has given one."""
        silent = [None if one.silent is None else now - one.heard + one.silent for one in self._placed().values()]
        return min((one for one in silent if one is not None), default=0.0) if None not in silent else 0.0

    def _say(self, name: str, message: Message) -> None:
        self._outbox.append((name, message))

    def _say_over(self, name: str) -> None:
        self._say(name, {"kind": "over", "code": self._state.code, "why": self._state.why})

    def _say_to_placed(self, message: Message) -> None:
        for name in self._placed():
            self._say(name, {**message, "start": self._state.start})
