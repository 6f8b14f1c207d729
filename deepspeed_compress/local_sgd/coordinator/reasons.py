"""Reasons for which islands wait or are refused, with the names of islands and what to do."""

from collections.abc import Collection, Mapping

from deepspeed_compress.local_sgd.coordinator.records import Holder, Saved
from deepspeed_compress.local_sgd.coordinator.requests import Join

__all__ = ["few", "lacking", "more_to_load", "names_of", "not_back", "older_file", "voting"]

_SHOWN = 20
"""Most islands that a reason names."""


def names_of(islands: Mapping[int, str]) -> str:
    """Return the names of `islands`, hosts by number: "island 0 (a) and island 2 (b)"."""
    names = [f"island {number} ({host})" if host else f"island {number}" for number, host in islands.items()]
    shown = [*names[:_SHOWN], *([f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else [])]
    return " and ".join([*([", ".join(shown[:-1])] if shown[:-1] else []), *shown[-1:]])


def few(minimum: int, there: Collection[int]) -> str:
    """Return the reason that fewer than `minimum` islands are connected."""
    names = f" ({names_of(dict.fromkeys(sorted(there), ''))})" if there else ""
    return (
        f"at least {minimum} islands must be there (minimum), and {len(there)} of them {_is(len(there))}{names}; start "
        f"{max(1, minimum - len(there))} more"
    )


def more_to_load(minimum: int, claims: int, absent: Mapping[int, Holder]) -> str:
    """Return the reason that fewer than `minimum` islands have loaded a checkpoint."""
    missing = f"; missing: {_named(absent)}" if absent else ""
    return f"at least {minimum} islands must load a checkpoint (minimum), and {claims} {_has(claims)}{missing}"


def lacking(absent: Mapping[int, Holder]) -> str:
    """Return the reason that no connected island has the anchors that the `absent` islands hold."""
    numbers = " ".join(map(str, absent))
    return (
        f"{_named(absent)} {_has(len(absent))} the newest weights of this run, {_has(len(absent))} not left it, and "
        f"{_is(len(absent))} not connected; start {_them(len(absent))} again from a checkpoint, or go on without "
        f"{_them(len(absent))} by: ds-compress islands forget HOST:PORT {numbers}"
    )


def not_back(missing: Collection[int], members: int) -> str:
    """Return the reason that too few islands of the last round have returned to a coordinator."""
    return (
        f"of the {members} islands of the last exchange {members - len(missing)} have come back to the coordinator "
        f"since it was started again; missing: {names_of(dict.fromkeys(missing, ''))}. Start them again, or go on "
        f"without them by: ds-compress islands forget HOST:PORT {' '.join(map(str, missing))}"
    )


def older_file(join: Join, saved: Saved) -> str:
    """Return the reason that an island knows more of the run than its coordinator."""
    return (
        f"island {join.number} with version {join.version} is not known to run {saved.run}, which has had "
        f"{saved.next_number} islands and {saved.next_round - 1} versions: the coordinator was started from an older "
        "state; start it from the newest one"
    )


def voting(round_: int, late: str) -> str:
    """Return the reason that the outcome of a round is open."""
    return f"the exchange of round {round_} is not over for {late}"


def _named(absent: Mapping[int, Holder]) -> str:
    return names_of({number: one.host for number, one in absent.items()})


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _has(count: int) -> str:
    return "has" if count == 1 else "have"


def _them(count: int) -> str:
    return "it" if count == 1 else "them"
