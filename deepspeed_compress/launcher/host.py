"""Agent of one host: carries out the supervisor's decisions, and reports the state of this host's ranks."""

import json
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from deepspeed_compress.launcher.directory import JobDirectory
from deepspeed_compress.launcher.failures import PERMANENT
from deepspeed_compress.launcher.heartbeat import AGENT, HOSTS, MEMORY, RESUME, Sign, read_sign
from deepspeed_compress.launcher.messages import FROM_SUPERVISOR, SUPERVISOR, Message
from deepspeed_compress.launcher.supervisor import FAILED, LOST_AFTER, SIGNALLED
from deepspeed_compress.launcher.workers import Ended, Workers, how_ended
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.errors import AuthenticationError, OtherServiceError, ProtocolError
from deepspeed_compress.transport.fields import check_message
from deepspeed_compress.transport.frames import Limits

__all__ = ["Agent", "Slots"]

_LOOK_EVERY = 0.05
_BEAT_EVERY = 1.0
_SILENT = LOST_AFTER / 2
_LIMITS = Limits(head=1 << 24, patience=_SILENT)
"""Limits of the supervisor's messages, which hold the addresses of all hosts."""
_DEEPSPEED_SHARES = Path("/dev/shm")


@dataclass(frozen=True)
class Slots:
    """Slots for ranks on this host.

    Attributes:
        count: number of slots.
        devices: name of each slot in CUDA_VISIBLE_DEVICES; empty to leave the variable alone.
    """

    count: int
    devices: tuple[str, ...] = ()

    def environment(self, chosen: Sequence[int]) -> dict[str, str]:
        """Return the environment of ranks in the slots `chosen`."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(self.devices[slot] for slot in chosen)} if self.devices else {}


@dataclass
class _Start:
    """Ranks of one start on this host.

    Attributes:
        number: number of the start.
        slots: slot of each rank.
        signs: directory of the ranks' signs of life.
        stopping: True once the ranks have to end.
        passing: True once the ranks were asked to end, as their program chooses.
        kill_at: time at which ranks that have not ended are killed.
        told: True once the supervisor knows that all have ended.
        newest: newest sign of each rank, including those that have ended.
    """

    number: int
    slots: Mapping[int, int]
    signs: Path
    stopping: bool = False
    passing: bool = False
    kill_at: float | None = None
    told: bool = False
    newest: dict[int, Sign] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Return the largest number of steps that one of its ranks has counted."""
        return max((sign.steps for sign in self._read().values()), default=0)

    def silent(self, now: float) -> float | None:
        """Return the seconds since the last sign of life; None until each rank has given one."""
        times = [sign.time for sign in self._read().values() if sign.time]
        return max(0.0, now - max(times)) if times and len(times) == len(self.slots) else None

    def saving(self) -> list[int]:
        """Return the ranks that save on SIGTERM, and would then wait for lost ranks."""
        return [rank for rank, sign in self._read().items() if sign.saves]

    def _read(self) -> Mapping[int, Sign]:
        self.newest.update({rank: sign for rank in self.slots if (sign := read_sign(self.signs, rank)) is not None})
        return self.newest


class Agent:
    """Agent of one host. `run` returns the exit code of the job.

    Args:
        address: (host, port) of the supervisor.
        job: identifier of the job.
        slots: slots of this host.
        grace: seconds that ranks have to end.
        workers: the processes of the ranks.
        directory: the directory of the job on this host.
        tell: receives log lines.
        credentials: credentials of this side.
    """

    def __init__(
        self,
        address: tuple[str, int],
        job: str,
        slots: Slots,
        grace: float,
        workers: Workers,
        directory: JobDirectory,
        tell: Callable[[str], None],
        credentials: Credentials,
    ) -> None:
        self._credentials = credentials
        self._address, self._job, self._slots, self._grace = address, job, slots, grace
        self._workers, self._directory, self._tell = workers, directory, tell
        self._signal = 0
        self._start: _Start | None = None
        self._code: int | None = None
        self._link: Connection | None = None
        self._heard = self._beaten = time.monotonic()
        self._port = _Port()
        self._meeting: list[tuple[str, int]] = []
        self._handlers: Mapping[str, Callable[[Message], None]] = {
            "start": self._begin,
            "stop": self._stop,
            "pass": self._pass,
            "over": self._over,
            "refused": self._refused,
            "unknown": self._unknown,
        }

    def run(self) -> int:
        """Run until the job has ended. Return its exit code."""
        with self._signals():
            try:
                while self._code is None:
                    self._turn()
                return self._code
            finally:
                self._workers.signal(signal.SIGKILL)
                self._workers.close()
                self._port.release()
                _remove_shared(self._meeting)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._be_signalled) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _be_signalled(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    def _turn(self) -> None:
        link = self._connected()
        if link is None:
            return
        try:
            self._listen(link)
            self._watch()
            self._beat()
        except OSError as error:
            self._lose(str(error))

    def _listen(self, link: Connection) -> None:
        for message in link.arrived(_LOOK_EVERY):
            self._heard = time.monotonic()
            check_message(message, FROM_SUPERVISOR)
            handler = self._handlers.get(message["kind"])
            if handler is not None:
                handler(message)
        if time.monotonic() - self._heard > _SILENT:
            raise TimeoutError(f"it has not answered for {_SILENT:g} s")

    # Messages of the supervisor.

    def _begin(self, message: Message) -> None:
        number, slots, first = message["start"], message["slots"], message["first"]
        if not message["hosts"] or not set(slots) <= set(range(self._slots.count)):
            raise ProtocolError(f"it starts slots {slots} of {self._slots.count} on {len(message['hosts'])} hosts")
        signs = self._directory.signs(number)
        self._start = _Start(number, {first + local: slot for local, slot in enumerate(slots)}, signs)
        self._meeting.append((message["hosts"][0], message["port"]))
        if message["node"] == 0:
            self._port.release()
        common = {
            "WORLD_SIZE": str(message["world"]),
            "LOCAL_WORLD_SIZE": str(len(slots)),
            "LOCAL_SIZE": str(len(slots)),
            "GROUP_RANK": str(message["node"]),
            "NODE_RANK": str(message["node"]),
            "MASTER_ADDR": message["hosts"][0],
            "MASTER_PORT": str(message["port"]),
            AGENT: str(signs),
            MEMORY: str(self._directory.memory),
            HOSTS: json.dumps(message["hosts"]),
            **({RESUME: "1"} if message["resume"] else {}),
            **self._slots.environment(slots),
        }
        ranks = {first + local: {"RANK": str(first + local), "LOCAL_RANK": str(local)} for local in range(len(slots))}
        self._workers.start({rank: {**common, **own} for rank, own in ranks.items()})

    def _stop(self, message: Message) -> None:
        """Stop the ranks.

        Those that save on SIGTERM would wait for a lost rank, so they are killed; others may clean up.
        """
        start = self._start
        if start is None or start.number != message["start"]:
            return
        start.stopping, start.kill_at = True, time.monotonic() + self._grace
        waiting = start.saving()
        self._workers.signal(signal.SIGKILL, waiting)
        self._workers.signal(signal.SIGTERM, [rank for rank in start.slots if rank not in waiting])
        # A rank that is suspended does not receive other signals.
        self._workers.signal(signal.SIGCONT)

    def _pass(self, message: Message) -> None:
        if self._start is not None:
            self._start.passing, self._start.kill_at = True, time.monotonic() + self._grace
            self._workers.signal(message["number"])

    def _over(self, message: Message) -> None:
        self._code = message["code"]
        if message["why"]:
            self._tell(f"error: {message['why']}")

    def _refused(self, message: Message) -> None:
        self._code = FAILED
        self._tell(
            f"error: --rendezvous {self._address[0]}:{self._address[1]}: {message['why']} (allowed: the same command "
            "on all hosts); write the same, or another address"
        )

    def _unknown(self, message: Message) -> None:
        raise ConnectionError("it has taken this host for lost")

    # Work of this host.

    def _watch(self) -> None:
        """Handle ranks that have ended, and everything that is due."""
        ended, start = self._workers.ended(), self._start
        if self._signal:
            self._ask_to_end()
        if start is None:
            return
        if start.kill_at is not None and time.monotonic() > start.kill_at:
            self._workers.signal(signal.SIGKILL)
        bad = [one for one in ended if one.status and one.rank in start.slots]
        if bad and not start.stopping and not start.passing:
            self._say_failed(start, bad)
        if not self._workers.living and not start.told:
            self._say_ended(start, bad)

    def _say_failed(self, start: _Start, bad: Sequence[Ended]) -> None:
        ended = bad[0]
        # If one rank was killed, others may have raised because of that alone.
        code = ended.status if all(one.status > 0 for one in bad) else None
        code = PERMANENT if any(one.status == PERMANENT for one in bad) else code
        self._say(
            "failed",
            start,
            rank=ended.rank,
            slot=start.slots[ended.rank],
            how=how_ended(ended.status),
            code=code,
            steps=start.steps,
        )
        # From now on, the ranks of this start only have to be stopped.
        start.stopping, start.told = True, False

    def _say_ended(self, start: _Start, bad: Sequence[Ended]) -> None:
        """Report that all ranks are gone: they have finished, or were stopped."""
        if not start.stopping:
            start.told = True
            self._say("done", start)
        elif start.kill_at is not None:
            start.told = True
            _remove_shared(self._meeting)
            self._meeting.clear()
            self._say("stopped", start, steps=start.steps, port=self._port.reserve())

    def _ask_to_end(self) -> None:
        number, self._signal = self._signal, 0
        if number == signal.SIGINT and self._start is not None and self._start.passing:
            # A user who interrupts twice does not want to wait.
            self._start.kill_at = 0.0
        assert self._link is not None
        self._link.send({"kind": "end", "number": number})

    def _beat(self) -> None:
        now = time.monotonic()
        if now - self._beaten > _BEAT_EVERY and self._link is not None:
            self._beaten = now
            start = self._start
            silent, steps = (None, 0) if start is None else (start.silent(now), start.steps)
            number = 0 if start is None else start.number
            self._link.send({"kind": "beat", "start": number, "silent": silent, "steps": steps})

    def _say(self, kind: str, start: _Start, **said: object) -> None:
        assert self._link is not None
        self._link.send({"kind": kind, "start": start.number, **said})

    # Connection to the supervisor.

    def _connected(self) -> Connection | None:
        """Return the connection to the supervisor, joining as a new member if needed; None if there is none yet."""
        if self._link is not None:
            return self._link
        try:
            link = connect(f"{self._address[0]}:{self._address[1]}", SUPERVISOR, self._credentials, _SILENT, _LIMITS)
            joining = {"name": uuid.uuid4().hex, "job": self._job, "address": self._own_address(link)}
            link.send(
                {"kind": "join", **joining, "slots": list(range(self._slots.count)), "port": self._port.reserve()}
            )
        except (AuthenticationError, OtherServiceError) as error:
            self._code = FAILED
            self._tell(f"error: --rendezvous {error}")
            return None
        except OSError as error:
            self._wait_for(str(error))
            return None
        self._link, self._heard = link, time.monotonic()
        return link

    def _own_address(self, link: Connection) -> str:
        """Return the address at which other hosts reach this one.

        Many hosts resolve their own name to an address that only they can use.
        """
        address = link.own_address
        return self._address[0] if address.startswith("127.") else address

    def _wait_for(self, why: str) -> None:
        if self._signal:
            self._code = SIGNALLED + self._signal
        elif time.monotonic() - self._heard > _GIVE_UP:
            self._code = FAILED
            self._tell(
                f"error: --rendezvous {self._address[0]}:{self._address[1]}: nobody answers there for {_GIVE_UP:g} s "
                f"({why}); start the agent of that host, or end this one"
            )
        else:
            time.sleep(_LOOK_EVERY)

    def _lose(self, why: str) -> None:
        """End all ranks: without the supervisor they may not train, because others may have taken over."""
        self._tell(f"connection to the agent of {self._address[0]} is lost: {why}")
        assert self._link is not None
        self._link.close()
        self._link, self._start = None, None
        self._workers.signal(signal.SIGKILL)
        while self._workers.living:
            self._workers.ended()
            time.sleep(_LOOK_EVERY)


_GIVE_UP = 60.0


class _Port:
    """Port of this host that is reserved until it is released."""

    def __init__(self) -> None:
        self._held: socket.socket | None = None

    def reserve(self) -> int:
        """Reserve a free port, and return its number."""
        if self._held is None:
            self._held = socket.socket()
            self._held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._held.bind(("", 0))
        return int(self._held.getsockname()[1])

    def release(self) -> None:
        """Release the port, so that a rank may listen at it."""
        if self._held is not None:
            self._held.close()
            self._held = None


def _remove_shared(meeting: Sequence[tuple[str, int]]) -> None:
    """Remove shared memory that DeepSpeed never removes, named after the address and port of the ranks' rendezvous."""
    for address, port in meeting:
        for left in _DEEPSPEED_SHARES.glob(f"deepspeed_*_{address}_{port}_*"):
            with suppress(OSError):
                left.unlink()
