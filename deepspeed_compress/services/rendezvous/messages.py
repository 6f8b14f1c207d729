"""Fields of the messages between islands and their coordinator. `wire` says what each kind means."""

from typing import Any

from deepspeed_compress.transport.fields import (
    Table,
    a_boolean,
    a_number,
    a_text,
    an_integer,
    every,
    optional,
)

__all__ = ["FROM_COORDINATOR", "FROM_ISLANDS"]

_MOST = 1 << 53
_NUMBER = an_integer(0, _MOST)
_NAME, _ADDRESS, _TEXT = a_text(64, least=1), a_text(300), a_text(4096)
_RANKS = 1 << 20


_MINIMUM = an_integer(1, _RANKS)
_SECONDS = a_number(least=1e-3, most=1e9)
_PARTNER = {"number": _NUMBER, "samples": _NUMBER, "version": _NUMBER, "store": _ADDRESS}


def _terms(value: Any) -> bool:
    """Check terms for what the coordinator itself reads; islands must have all others alike."""
    return isinstance(value, dict) and _SECONDS(value.get("timeout", 1.0)) and _MINIMUM(value.get("minimum", 1))


def _partner(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != _PARTNER.keys():
        return False
    return all(fits(value[key]) for key, fits in _PARTNER.items())


FROM_ISLANDS: Table = {
    "join": {
        "name": _NAME,
        "terms": _terms,
        "store": _ADDRESS,
        "addresses": every(_ADDRESS, _RANKS),
        "process": optional(_TEXT),
        "version": optional(_NUMBER),
        "run": optional(_NAME),
        "number": optional(_NUMBER),
    },
    "beat": {},
    "ready": {"version": _NUMBER},
    # Weights that no island has saved are claimed by number -1.
    "claim": {"run": _NAME, "number": optional(an_integer(-1, _MOST)), "version": _NUMBER},
    "arrive": {"version": _NUMBER, "samples": _NUMBER},
    "vote": {"round": _NUMBER, "ok": a_boolean},
    "sources": {},
    "leave": {},
}
"""Messages of islands, by kind."""

FROM_COORDINATOR: Table = {
    "welcome": {"run": _NAME, "number": _NUMBER},
    "refused": {"why": a_text(1 << 16)},
    "waiting": {"why": _TEXT},
    "anchor": {"version": _NUMBER, "sources": every(every(_ADDRESS, _RANKS), _RANKS)},
    "round": {"id": _NUMBER, "base": _NUMBER, "fresh": _TEXT, "partners": every(_partner, _RANKS)},
    "outcome": {"id": _NUMBER, "committed": a_boolean},
    "over": {},
    "open": {},
    "unknown": {},
    "beat": {},
}
"""Messages of the coordinator, by kind."""
