"""Fields of the messages of a coordinator. `requests` has those of islands, and `wire` explains each kind."""

from typing import Any

from deepspeed_compress.transport.fields import Table, a_boolean, a_text, an_integer, every

_MOST = 1 << 53
_NUMBER = an_integer(0, _MOST)
_NAME, _ADDRESS, _TEXT = a_text(64, least=1), a_text(300), a_text(4096)
_RANKS = 1 << 20


_PARTNER = {"number": _NUMBER, "samples": _NUMBER, "version": _NUMBER, "store": _ADDRESS}


def _partner(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != _PARTNER.keys():
        return False
    return all(fits(value[key]) for key, fits in _PARTNER.items())


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
