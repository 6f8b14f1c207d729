"""Agent of one host, which carries out the supervisor's decisions and reports the state of this host's ranks."""

import json
import signal
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from deepspeed_compress.launcher.heartbeat import AGENT, EXIT_PERMANENT, HOSTS, MEMORY, RESUME, first_error
from deepspeed_compress.launcher.host_resources import HostStart, ReservedPort, remove_shared_memory
from deepspeed_compress.launcher.messages import FROM_SUPERVISOR, SUPERVISOR, Message
from deepspeed_compress.launcher.supervisor import FAILED, LOST_AFTER, SIGNALLED
from deepspeed_compress.launcher.workers import Workers
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import LARGE_HEAD, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError, OtherServiceError, ProtocolError

_POLL_INTERVAL = 0.05
_BEAT_INTERVAL = 1.0
_SUPERVISOR_TIMEOUT = LOST_AFTER / 2
_CONNECT_TIMEOUT = 60.0
_LIMITS = Limits(head=LARGE_HEAD, patience=_SUPERVISOR_TIMEOUT)
"""Limits of the supervisor's messages, which contain the addresses of all hosts."""


class Agent:
    """Agent of one host. `run` returns the exit code of the job.

    Args:
        address: (host, port) of the supervisor.
        job: identifier of the job.
        ranks: number of ranks on this host.
        grace: seconds that ranks have to end.
        workers: the processes of the ranks.
        directory: the directory of the job on this host (`job_directory`).
        log: receives log lines.
        credentials: credentials of this side.
    """

    def __init__(
        self,
        address: tuple[str, int],
        job: str,
        ranks: int,
        grace: float,
        workers: Workers,
        directory: Path,
        log: Callable[[str], None],
        credentials: Credentials,
    ) -> None:
        self._credentials = credentials
        self._address, self._job, self._ranks, self._grace = address, job, ranks, grace
        self._workers, self._directory, self._log = workers, directory, log
        self._signal = 0
        self._start: HostStart | None = None
        self._code: int | None = None
        self._link: Connection | None = None
        self._last_received = self._last_beat = time.monotonic()
        self._port = ReservedPort()
        self._rendezvous: list[tuple[str, int]] = []
        self._handlers: Mapping[str, Callable[[Message], None]] = {
            "start": self._begin,
            "stop": self._stop,
            "pass": self._pass,
            "over": self._over,
            "refused": self._refused,
            "beat": lambda message: None,
        }

    def run(self) -> int:
        """Run until the job has ended, and return its exit code."""
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            while self._code is None:
                self._run_once()
            return self._code
        finally:
            try:
                self._workers.close()
                self._port.release()
                remove_shared_memory(self._rendezvous)
            finally:
                for number, handler in before.items():
                    signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _run_once(self) -> None:
        link = self._connected()
        if link is None:
            return
        try:
            self._receive(link)
            self._watch()
            self._beat()
        except OSError as error:
            self._disconnect(str(error))

    def _receive(self, link: Connection) -> None:
        for message in link.arrived(_POLL_INTERVAL):
            self._last_received = time.monotonic()
            FROM_SUPERVISOR.read(message)
            self._handlers[message["kind"]](message)
        if time.monotonic() - self._last_received > _SUPERVISOR_TIMEOUT:
            raise TimeoutError(f"no message for {_SUPERVISOR_TIMEOUT:g} s")

    # Messages of the supervisor.

    def _begin(self, message: Message) -> None:
        if not message["hosts"]:
            raise ProtocolError("the start message names no host")
        # What ranks keep in `memory` survives restarts, until the job ends.
        heartbeats, memory = self._directory / f"heartbeats_{message['start']}", self._directory / "memory"
        for directory in (heartbeats, memory):
            directory.mkdir(mode=0o700, exist_ok=True)
        ranks = range(message["node"] * self._ranks, (message["node"] + 1) * self._ranks)
        self._start = HostStart(message["start"], ranks, heartbeats)
        self._rendezvous.append((message["hosts"][0], message["port"]))
        if message["node"] == 0:
            self._port.release()
        common = {
            "WORLD_SIZE": str(message["world"]),
            "LOCAL_WORLD_SIZE": str(self._ranks),
            "LOCAL_SIZE": str(self._ranks),
            "GROUP_RANK": str(message["node"]),
            "NODE_RANK": str(message["node"]),
            "MASTER_ADDR": message["hosts"][0],
            "MASTER_PORT": str(message["port"]),
            AGENT: str(heartbeats),
            MEMORY: str(memory),
            HOSTS: json.dumps(message["hosts"]),
            **({RESUME: "1"} if message["resume"] else {}),
        }
        own = {rank: {"RANK": str(rank), "LOCAL_RANK": str(local)} for local, rank in enumerate(ranks)}
        self._workers.start({rank: {**common, **more} for rank, more in own.items()})

    def _stop(self, message: Message) -> None:
        """Stop the ranks.

        Ranks that save on SIGTERM would wait for a lost rank, so they are killed. Others may clean up. The end of this
        host's ranks is reported again if all of them had succeeded before a rank of another host failed.
        """
        start = self._start
        if start is None or start.number != message["start"]:
            return
        start.stopping, start.reported, start.kill_at = True, False, time.monotonic() + self._grace
        waiting = start.saving()
        self._workers.signal(signal.SIGKILL, waiting)
        self._workers.signal(signal.SIGTERM, [rank for rank in start.ranks if rank not in waiting])
        # A rank that is suspended does not receive other signals.
        self._workers.signal(signal.SIGCONT)

    def _pass(self, message: Message) -> None:
        if self._start is not None:
            self._start.terminating, self._start.kill_at = True, time.monotonic() + self._grace
            self._workers.signal(message["number"])

    def _over(self, message: Message) -> None:
        self._code = message["code"]
        if message["why"]:
            self._log(f"error: {message['why']}")

    def _refused(self, message: Message) -> None:
        self._code = FAILED
        self._log(
            f"error: --rendezvous {self._address[0]}:{self._address[1]}: {message['why']}; run the same command on all "
            "hosts, or choose another address"
        )

    # Work of this host.

    def _watch(self) -> None:
        """Handle signals, deadlines, and ranks that have ended."""
        ended, start = self._workers.ended(), self._start
        if self._signal:
            self._request_end()
        if start is None:
            return
        if start.kill_at is not None and time.monotonic() > start.kill_at:
            self._workers.signal(signal.SIGKILL)
        bad = {rank: status for rank, status in ended.items() if status and rank in start.ranks}
        if bad and not start.stopping and not start.terminating:
            self._report_failed(start, bad)
        if not self._workers.living and not start.reported:
            self._report_ended(start)

    def _report_failed(self, start: HostStart, bad: Mapping[int, int]) -> None:
        # If one rank was killed, the others may have failed only because of that.
        rank, status = min(bad.items(), key=lambda one: one[1] > 0)
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"
        about = {"rank": rank, "how": how, "permanent": EXIT_PERMANENT in bad.values(), "steps": start.steps}
        self._send("failed", start=start.number, **about)
        # From now on, the ranks of this start only have to be stopped.
        start.stopping, start.reported = True, False

    def _report_ended(self, start: HostStart) -> None:
        """Report that all ranks have ended, on their own or because they were stopped."""
        if not start.stopping:
            start.reported = True
            self._send("done", start=start.number)
        elif start.kill_at is not None:
            start.reported = True
            remove_shared_memory(self._rendezvous)
            self._rendezvous.clear()
            error = first_error(start.heartbeats)
            fields = {} if error is None else {"error": error.describe(), "error_time": error.time}
            self._send("stopped", start=start.number, steps=start.steps, port=self._port.reserve(), **fields)

    def _request_end(self) -> None:
        number, self._signal = self._signal, 0
        if number == signal.SIGINT and self._start is not None and self._start.terminating:
            # The user has pressed Ctrl-C twice, so the ranks are killed at once.
            self._start.kill_at = 0.0
        self._send("end", number=number)

    def _beat(self) -> None:
        now, start = time.monotonic(), self._start
        if now - self._last_beat > _BEAT_INTERVAL:
            self._last_beat = now
            number, silent, steps = (0, None, 0) if start is None else (start.number, start.silent(now), start.steps)
            self._send("beat", start=number, silent=silent, steps=steps)

    def _send(self, kind: str, **fields: object) -> None:
        assert self._link is not None
        self._link.send({"kind": kind, **fields})

    # Connection to the supervisor.

    def _connected(self) -> Connection | None:
        """Return the connection to the supervisor, joining the job if needed; None if it cannot be reached."""
        if self._link is not None:
            return self._link
        try:
            link = connect(
                f"{self._address[0]}:{self._address[1]}", SUPERVISOR, self._credentials, _SUPERVISOR_TIMEOUT, _LIMITS
            )
            # The address is not looked up, since many hosts resolve their own name to one that only they can use.
            address = self._address[0] if link.own_address.startswith("127.") else link.own_address
            joining = {"name": uuid.uuid4().hex, "job": self._job, "address": address}
            link.send({"kind": "join", **joining, "port": self._port.reserve()})
        except (AuthenticationError, OtherServiceError) as error:
            self._code = FAILED
            self._log(f"error: --rendezvous {error}")
            return None
        except OSError as error:
            self._retry_or_give_up(str(error))
            return None
        self._link, self._last_received = link, time.monotonic()
        return link

    def _retry_or_give_up(self, why: str) -> None:
        if self._signal:
            self._code = SIGNALLED + self._signal
        elif time.monotonic() - self._last_received > _CONNECT_TIMEOUT:
            self._code = FAILED
            self._log(
                f"error: --rendezvous {self._address[0]}:{self._address[1]}: no answer for {_CONNECT_TIMEOUT:g} s "
                f"({why}); start the agent on that host, or end this one"
            )
        else:
            time.sleep(_POLL_INTERVAL)

    def _disconnect(self, why: str) -> None:
        """Close the connection and kill all ranks, because other hosts may already have taken over."""
        self._log(f"lost the connection to the agent of {self._address[0]}: {why}")
        assert self._link is not None
        self._link.close()
        self._link, self._start = None, None
        self._workers.signal(signal.SIGKILL)
        while self._workers.living:
            self._workers.ended()
            time.sleep(_POLL_INTERVAL)
