"""Log lines of a coordinator: which islands join and leave, why, and which rounds are committed."""

from collections.abc import Callable, Mapping

from deepspeed_compress.local_sgd.coordinator.wire import Message
from deepspeed_compress.transport.rate_limited_log import RateLimitedLog


class MembershipLog:
    """Log that turns the messages of a coordinator to its islands, or of a supervisor to its agents, into lines.

    Args:
        report: receives each line.
        member: noun for a client of the service.
    """

    def __init__(self, report: Callable[[str], None], member: str) -> None:
        self._report, self._member = report, member
        # Any client that has the secret can be refused as often as it likes.
        self._report_refusal = RateLimitedLog(report)
        self._connected: dict[str, str] = {}
        self._round: tuple[int, bool] | None = None
        self._handlers: Mapping[str, Callable[[str, str, Message], None]] = {
            "welcome": self._welcome,
            "refused": self._refused,
            "unknown": self._unknown,
            "waiting": self._waiting,
            "outcome": self._outcome,
        }

    def record(self, name: str, peer: str, message: Message) -> None:
        """Log `message` of the coordinator to the island `name`, whose address is `peer`."""
        handler = self._handlers.get(message["kind"])
        if handler is not None:
            handler(name, peer, message)

    def record_departure(self, name: str, why: str) -> None:
        """Log that the island `name` has left. Only the first reason is logged."""
        about = self._connected.pop(name, None)
        if about is not None:
            self._report(f"{about} {why}; {len(self._connected)} connected")

    def _welcome(self, name: str, peer: str, message: Message) -> None:
        again = "joined again" if name in self._connected else "joined"
        self._connected[name] = about = f"{self._member} {message['number']} ({peer})"
        self._report(f"{about} {again}; {len(self._connected)} connected")

    def _refused(self, name: str, peer: str, message: Message) -> None:
        self._report_refusal(f"an {self._member} at {peer} was refused: {message['why']}")

    def _unknown(self, name: str, peer: str, message: Message) -> None:
        self.record_departure(name, "was silent for longer than `timeout`")

    def _waiting(self, name: str, peer: str, message: Message) -> None:
        self._report(f"{self._connected.get(name, name)} waits: {message['why']}")

    def _outcome(self, name: str, peer: str, message: Message) -> None:
        """Log the outcome of a round once, although every island receives it."""
        found = (message["id"], message["committed"])
        if found != self._round:
            self._round = found
            self._report(f"round {message['id']} is {'committed' if message['committed'] else 'void'}")
