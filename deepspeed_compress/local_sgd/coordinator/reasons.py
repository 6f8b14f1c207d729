"""Reasons for which islands wait or are refused, with the names of islands and what to do."""

from collections.abc import Collection, Mapping
from typing import Any

from deepspeed_compress.local_sgd.coordinator.messages import Join
from deepspeed_compress.local_sgd.coordinator.records import Holder, Saved

_SHOWN = 20
"""Most islands that a reason names."""
_DIFFERENCES, _LONGEST = 10, 200
"""Most differences between terms that a reason names, and most characters of each name and value."""


def names_of(islands: Mapping[int, str]) -> str:
    """Return the names of `islands`, hosts by number: "island 0 (a) and island 2 (b)"."""
    names = [f"island {number} ({host})" if host else f"island {number}" for number, host in islands.items()]
    shown = [*names[:_SHOWN], *([f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])]
    return " and ".join([*([", ".join(shown[:-1])] if shown[:-1] else []), *shown[-1:]])


def too_few(minimum: int, connected: Collection[int]) -> str:
    """Return the reason that fewer than `minimum` islands are connected."""
    names = f" ({names_of(dict.fromkeys(sorted(connected), ''))})" if connected else ""
    return (
        f"at least {minimum} islands must be connected (minimum), and {len(connected)} {_is(len(connected))}{names}; "
        f"start {max(1, minimum - len(connected))} more"
    )


def too_few_loaded(minimum: int, claims: int, absent: Mapping[int, Holder]) -> str:
    """Return the reason that fewer than `minimum` islands have loaded a checkpoint."""
    missing = f"; missing: {_names(absent)}" if absent else ""
    return f"at least {minimum} islands must load a checkpoint (minimum), and {claims} {_has(claims)}{missing}"


def absent_holders(absent: Mapping[int, Holder]) -> str:
    """Return the reason that no connected island has the anchors that the `absent` islands hold."""
    numbers, count = " ".join(map(str, absent)), len(absent)
    return (
        f"{_names(absent)} {_has(count)} the newest weights of this run, {_has(count)} not left it, and {_is(count)} "
        f"not connected; start {_them(count)} again from a checkpoint, or continue without {_them(count)}: "
        f"ds-compress islands forget HOST:PORT {numbers}"
    )


def not_returned(missing: Collection[int], members: int) -> str:
    """Return the reason that too few islands of the last round have returned to a coordinator."""
    return (
        f"since the coordinator was restarted, {members - len(missing)} of the {members} islands of the last exchange "
        f"have returned; missing: {names_of(dict.fromkeys(missing, ''))}. Start them again, or continue without them: "
        f"ds-compress islands forget HOST:PORT {' '.join(map(str, missing))}"
    )


def older_state(join: Join, saved: Saved) -> str:
    """Return the reason that an island knows more of the run than its coordinator."""
    return (
        f"island {join.number} with version {join.version} is not known to run {saved.run}, which has had "
        f"{saved.next_number} islands and {saved.next_round - 1} versions: the coordinator was started from an older "
        "state; start it from the newest one"
    )


def different_terms(own: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return a description of the terms in which an island differs from the others; "" if there are none."""
    different = [key for key in dict.fromkeys([*own, *theirs]) if own.get(key) != theirs.get(key)]
    return "; ".join(
        f"{key[:_LONGEST]} is {repr(own.get(key))[:_LONGEST]}, that of the others {repr(theirs.get(key))[:_LONGEST]}"
        for key in different[:_DIFFERENCES]
    )


def votes_missing(round_: int, late: str) -> str:
    """Return the reason that the outcome of a round is open."""
    return f"the exchange of round {round_} has not ended for {late}"


def _names(absent: Mapping[int, Holder]) -> str:
    return names_of({number: one.host for number, one in absent.items()})


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _has(count: int) -> str:
    return "has" if count == 1 else "have"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"
