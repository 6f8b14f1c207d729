"""Fields of the messages between agents and their supervisor. The module `supervisor` explains each kind."""

import signal
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.transport.fields import Table, a_boolean, a_number, a_text, an_integer, every, optional

Message = Mapping[str, Any]
SUPERVISOR = "supervisor"
"""Name of the service that the supervisor runs."""
_SLOTS = 1 << 12
"""Largest slot number of a host."""
_RANKS = 1 << 20
_START, _STEPS = an_integer(0, 1 << 53), an_integer(0, 1 << 53)
_PORT, _SLOT, _RANK = an_integer(1, 65535), an_integer(0, _SLOTS), an_integer(0, _RANKS)
_NAME, _ADDRESS, _TEXT = a_text(64, least=1), a_text(300, least=1), a_text(4096)
_STATUS = an_integer(-255, 255)


def _different_slots(value: Any) -> bool:
    return every(_SLOT, _SLOTS)(value) and len(set(value)) == len(value)


def _ending(value: Any) -> bool:
    return type(value) is int and value in (signal.SIGINT, signal.SIGTERM)


FROM_AGENTS: Table = {
    "join": {"name": _NAME, "job": _NAME, "address": _ADDRESS, "slots": _different_slots, "port": _PORT},
    "beat": {"start": _START, "silent": optional(a_number(0.0)), "steps": _STEPS},
    "failed": {"start": _START, "rank": _RANK, "slot": _SLOT, "how": _TEXT, "code": optional(_STATUS), "steps": _STEPS},
    "done": {"start": _START},
    "stopped": {
        "start": _START,
        "steps": _STEPS,
        "port": _PORT,
        "error": optional(_TEXT),
        "error_time": optional(a_number(0.0)),
    },
    "end": {"number": _ending},
}
"""Messages of agents, by kind."""

FROM_SUPERVISOR: Table = {
    "start": {
        "start": _START,
        "restart": _START,
        "world": _RANK,
        "hosts": every(_ADDRESS, _RANKS),
        "port": _PORT,
        "resume": a_boolean,
        "node": _RANK,
        "first": _RANK,
        "slots": _different_slots,
    },
    "stop": {"start": _START},
    "pass": {"start": _START, "number": _ending},
    "over": {"code": an_integer(0, 255), "why": a_text(1 << 16)},
    "refused": {"why": _TEXT},
    "unknown": {},
    "beat": {},
}
"""Messages of the supervisor, by kind."""
