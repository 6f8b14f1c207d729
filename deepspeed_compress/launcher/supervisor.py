"""Supervisor that decides for all agents of a job. It is a pure state machine without sockets or a clock.

An agent sends `join`, `beat` (the state of its ranks), `failed` (a rank has failed), `done` (all of its ranks have
ended successfully), `stopped` (all ranks that it had to stop have ended), and `end` (a user asks to end the job). It
receives `start`, `stop`, `pass` (a signal to forward to its ranks), `over`, and `refused`.

Messages contain the number of the start that they refer to. Messages of earlier starts are ignored.
"""

from collections.abc import Callable, Mapping
from typing import Any

from deepspeed_compress.launcher.messages import FROM_AGENTS, SUPERVISOR, Message
from deepspeed_compress.launcher.placement import EARLY_FAILURES, ConnectedAgent, Failure, JobOptions, JobState, place

LOST_AFTER = 10.0
"""Seconds of silence after which a host is considered lost.

Agents that receive nothing for half of this time end their ranks.
"""
FAILED, SIGNALLED = 1, 128
"""Exit code of a failed job, and the offset that is added to the number of a signal that ended it."""


class Supervisor:
    """State machine of a job.

    Pass it messages (`handle`), lost connections (`disconnect`) and the time (`tick`), in seconds of any clock; then
    send the messages that `take_messages` returns.

    Args:
        options: parameters of the job.
        size_problem: returns why this total number of ranks cannot train; "" if it can.
        log: receives log lines.

    Attributes:
        service: name of the service.
        messages: messages that agents may send.
        requests: kinds of messages that may be sent without joining: none.
    """

    service, messages, requests = SUPERVISOR, FROM_AGENTS, frozenset[str]()

    def __init__(self, options: JobOptions, size_problem: Callable[[int], str], log: Callable[[str], None]) -> None:
        self._options, self._size_problem, self._log = options, size_problem, log
        self._agents: dict[str, ConnectedAgent] = {}
        self._state = JobState()
        self._outbox: list[tuple[str, Message]] = []
        self._handlers: Mapping[str, Callable[[str, Message, float], None]] = {
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
        hosts = [{"address": agent.address, "silent": round(now - agent.heard, 1)} for agent in self._agents.values()]
        state = self._state
        return {"phase": state.phase, "restarts": state.restarts, "steps": state.steps, "hosts": hosts}

    def handle(self, name: str, message: Message, now: float) -> None:
        """Handle `message` of the agent `name`, which `FROM_AGENTS` has accepted."""
        if name in self._agents:
            self._agents[name].heard = now
        elif message["kind"] != "join":
            # It was refused.
            return
        self._handlers[message["kind"]](name, message, now)
        self._advance(now)

    @property
    def timeout(self) -> float:
        """Return the seconds of silence after which a host is lost."""
        return LOST_AFTER

    def disconnect(self, name: str, now: float, why: str) -> None:
        """Handle the end of the connection to `name`, and its reason."""
        agent = self._agents.pop(name, None)
        if agent is not None:
            if self._is_running(name) and not agent.done:
                self._stop(Failure(f"host {agent.address} cannot be reached: it {why}"))
            self._advance(now)

    def tick(self, now: float) -> None:
        """Handle the time: ranks that hang, and hosts that do not come."""
        self._stop_if_hanging(now)
        self._advance(now)

    def _stop_if_hanging(self, now: float) -> None:
        """Stop ranks that hang: the newest heartbeat of any of them is older than `--hang`.

        Nothing counts as a hang until each rank has sent a heartbeat.
        """
        agents, hang = self._placed().values(), self._options.hang
        silent = [now - agent.heard + agent.silent for agent in agents if agent.silent is not None]
        if self._state.phase == "running" and len(silent) == len(agents) and min(silent, default=0.0) > hang:
            self._stop(Failure(f"no heartbeat from any rank for {hang:g} s (--hang)"))

    # Messages of agents.

    def _join(self, name: str, message: Message, now: float) -> None:
        if message["job"] != self._options.id:
            # The name of the job is not revealed, because knowing it is enough to join.
            self._send(name, {"kind": "refused", "why": "another job uses this address"})
            return
        if name in self._agents:
            # An agent joins once per connection, each time under a new name.
            return
        self._agents[name] = ConnectedAgent(message["address"], message["port"], now)
        if self._state.phase == "over":
            # It was considered lost when the job ended, and would wait forever for this message.
            self._send_over(name)

    def _beat(self, name: str, message: Message, now: float) -> None:
        agent = self._agents[name]
        if message["start"] == self._state.start:
            agent.silent = message["silent"]
            self._count(message["steps"])

    def _count(self, steps: int) -> None:
        self._state.steps = max(self._state.steps, steps)
        self._state.step_seen |= steps > 0

    def _failed(self, name: str, message: Message, now: float) -> None:
        if message["start"] == self._state.start and self._is_running(name):
            self._count(message["steps"])
            why = f"rank {message['rank']} on {self._agents[name].address} {message['how']}"
            self._stop(Failure(why, name, message["permanent"]))

    def _done(self, name: str, message: Message, now: float) -> None:
        if message["start"] == self._state.start:
            self._agents[name].done = True

    def _stopped(self, name: str, message: Message, now: float) -> None:
        if message["start"] == self._state.start:
            self._count(message["steps"])
            self._agents[name].stopped, self._agents[name].port = True, message["port"]
            if message.get("error") and self._state.phase == "stopping":
                failure = self._state.failures[-1]
                error = message.get("error_time") or 0.0, f"on {self._agents[name].address}, {message['error']}"
                failure.first_error = min(error, failure.first_error or error)

    def _end(self, name: str, message: Message, now: float) -> None:
        if not self._state.signal:
            self._state.signal = message["number"]
            self._log(f"a signal has asked the job to end, after {self._state.steps} steps")
            self._send_to_placed({"kind": "pass", "number": message["number"]})

    # Decisions.

    def _advance(self, now: float) -> None:
        """Make all transitions that are possible now."""
        state, placed = self._state, self._placed()
        if state.phase == "running" and placed and all(one.done for one in placed.values()):
            self._finish(SIGNALLED + state.signal if state.signal else 0, "")
        if state.phase == "stopping" and all(one.stopped for one in placed.values()):
            failure = state.failures[-1]
            failure.early = not state.step_seen
            if failure.first_error is not None:
                self._log(f"the first error: {failure.first_error[1]}")
            self._restart(now)
        if state.phase == "waiting":
            self._start_if_possible(now)

    def _restart(self, now: float) -> None:
        state, failure = self._state, self._state.failures[-1]
        if state.signal:
            self._finish(SIGNALLED + state.signal, "")
        elif state.restarts == self._options.restarts:
            self._finish(FAILED, f"{failure.why}, and no restart is left (--restarts {state.restarts})")
        elif failure.permanent:
            self._finish(FAILED, f"{failure.why}; a restart cannot help; see the output above")
        else:
            self._drop_failing_host()
            state.restarts += 1
            state.phase, state.since = "waiting", now

    def _start_if_possible(self, now: float) -> None:
        state, options = self._state, self._options
        if state.signal:
            self._finish(SIGNALLED + state.signal, "")
            return
        state.since = now if state.since is None else state.since
        hosts = self._hosts()
        placement = place(hosts, options.hosts, self._may_train, state.placement)
        if placement:
            self._start(placement)
        elif now - state.since > options.wait:
            missing = f"after {options.wait:g} s (--wait), only {len(hosts)} of {options.hosts} hosts are there"
            reason = self._size_problem(len(hosts) * options.ranks) if state.start else ""
            self._finish(FAILED, f"{missing}, and fewer ranks cannot train: {reason}" if reason else missing)

    def _may_train(self, count: int) -> bool:
        """Return True if fewer hosts, `count`, may train: after the first start, the same batches."""
        return self._state.start > 0 and not self._size_problem(count * self._options.ranks)

    def _start(self, placement: tuple[str, ...]) -> None:
        state = self._state
        state.start, state.phase, state.placement = state.start + 1, "running", placement
        state.step_seen, state.since = False, None
        world = len(placement) * self._options.ranks
        common = {
            "kind": "start",
            "start": state.start,
            "restart": state.restarts,
            "world": world,
            "hosts": [self._agents[name].address for name in placement],
            "port": self._agents[placement[0]].port,
            "resume": state.steps > 0,
        }
        for node, name in enumerate(placement):
            agent = self._agents[name]
            agent.done, agent.stopped, agent.silent = False, False, None
            self._send(name, {**common, "node": node})
        if state.restarts:
            self._log(f"restart {state.restarts} of {self._options.restarts}, with {world} ranks")

    def _stop(self, failure: Failure) -> None:
        state = self._state
        state.phase = "stopping"
        state.failures.append(failure)
        self._log(f"{failure.why}, after {state.steps} steps")
        self._send_to_placed({"kind": "stop"})

    def _drop_failing_host(self) -> None:
        """Drop a host on which the last starts have all failed before their first step, if a spare one replaces it."""
        last = self._state.failures[-EARLY_FAILURES:]
        same = len(last) == EARLY_FAILURES and all(one.early and one.host == last[0].host for one in last)
        agent = self._agents.get(last[0].host or "") if same else None
        if agent is not None and len(self._hosts()) > self._options.hosts:
            agent.dropped = True
            self._log(f"host {agent.address} is not used any more: {EARLY_FAILURES} starts in a row failed there")

    def _finish(self, code: int, why: str) -> None:
        if not code and not self._state.steps:
            self._log("warning: --hang had no effect, because no engine with the section has made a step")
        self._state.phase, self._state.code, self._state.why = "over", code, why
        for name in self._agents:
            self._send_over(name)

    def _hosts(self) -> list[str]:
        """Return the hosts that may have ranks."""
        return [name for name, agent in self._agents.items() if not agent.dropped]

    def _is_running(self, name: str) -> bool:
        return self._state.phase == "running" and name in self._state.placement

    def _placed(self) -> dict[str, ConnectedAgent]:
        """Return the connected members that have ranks of this start."""
        return {name: self._agents[name] for name in self._state.placement if name in self._agents}

    def _send(self, name: str, message: Message) -> None:
        self._outbox.append((name, message))

    def _send_over(self, name: str) -> None:
        self._send(name, {"kind": "over", "code": self._state.code, "why": self._state.why})

    def _send_to_placed(self, message: Message) -> None:
        for name in self._placed():
            self._send(name, {**message, "start": self._state.start})
