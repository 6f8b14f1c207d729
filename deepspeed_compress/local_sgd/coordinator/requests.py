"""Typed requests of islands to their coordinator: every field is checked before anything changes."""

import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from deepspeed_compress.transport.errors import ProtocolError

_LONGEST_TERMS = 1 << 16
"""Largest size in bytes of the terms of an island, as JSON."""
_SHOWN = 300
"""Most characters of a reason."""
_MOST = 1 << 53
"""Largest integer that every reader of JSON keeps exactly."""


def _encodable(text: str) -> str:
    """Return `text`. Raises ValueError for lone surrogates, which no log, file or socket accepts."""
    text.encode()
    return text


def _checked_terms(terms: dict[str, Any]) -> dict[str, Any]:
    """Return `terms`. Raises ValueError if they are too long, contain NaN, or cannot be represented in JSON."""
    try:
        size = len(json.dumps(terms, ensure_ascii=False, allow_nan=False).encode())
    except (TypeError, RecursionError) as error:
        raise ValueError(f"terms are not JSON ({error})") from error
    if size > _LONGEST_TERMS:
        raise ValueError(f"terms have {size} bytes (allowed: up to {_LONGEST_TERMS})")
    timeout, minimum = terms.get("timeout", 1.0), terms.get("minimum", 1)
    if type(timeout) not in (int, float) or not 0 < timeout <= 1e9 or not math.isfinite(timeout):
        raise ValueError(f"timeout is {timeout!r} (allowed: seconds, more than 0 and up to 1e9)")
    if type(minimum) is not int or not 1 <= minimum <= 1 << 20:
        raise ValueError(f"minimum is {minimum!r} (allowed: an integer from 1 to {1 << 20})")
    return terms


_Count = Annotated[int, Field(ge=0, le=_MOST)]
_Text = Annotated[str, Field(max_length=300), AfterValidator(_encodable)]
_Claimed = Annotated[int, Field(ge=0, le=1 << 40)]
"""Version of a checkpoint. Rounds are numbered from it, so it stays far below `_MOST`."""


class Request(BaseModel):
    """One message of an island. Unknown fields are ignored: newer islands may send more."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


class Join(Request):
    """Connection of an island, for the first time or again. `number` and `run` are those from its first `welcome`."""

    kind: Literal["join"]
    name: _Text = ""
    terms: Annotated[dict[str, Any], AfterValidator(_checked_terms)]
    store: _Text
    addresses: Annotated[list[_Text], Field(max_length=1 << 16)]
    process: _Text = ""
    version: _Count = 0
    run: _Text | None = None
    number: _Count | None = None
    give_up: Annotated[float, Field(gt=0, le=1e9)] | None = None
    """Seconds for which the island waits for a coordinator that it cannot reach."""

    @model_validator(mode="after")
    def _known_by_both(self) -> Self:
        if (self.run is None) != (self.number is None):
            raise ValueError("run and number belong together")
        return self


class Beat(Request):
    """Sign of life."""

    kind: Literal["beat"]


class Ready(Request):
    """Report that the island has the anchor of `version`; 0 for none."""

    kind: Literal["ready"]
    version: _Count


class Claim(Request):
    """Report that the island has loaded the anchor that island `number` of `run` saved; -1 if no island did."""

    kind: Literal["claim"]
    run: _Text
    number: Annotated[int, Field(ge=-1, le=_MOST)] = -1
    version: _Claimed


class Arrive(Request):
    """Request to exchange the weight changes of `samples` samples since the anchor of `version`."""

    kind: Literal["arrive"]
    version: _Count
    samples: _Count


class Vote(Request):
    """Report whether the exchange of `round` was `ok`."""

    kind: Literal["vote"]
    round: _Count
    ok: bool


class Sources(Request):
    """Request for the islands that hold the newest anchor."""

    kind: Literal["sources"]


class Leave(Request):
    """Report that the island leaves for good."""

    kind: Literal["leave"]


class Forget(Request):
    """Request of a user to remove the islands `numbers` for good."""

    kind: Literal["forget"]
    numbers: Annotated[list[_Count], Field(max_length=1 << 16)]


AnyRequest = Annotated[
    Join | Beat | Ready | Claim | Arrive | Vote | Sources | Leave | Forget, Field(discriminator="kind")
]
_ANY_REQUEST: TypeAdapter[AnyRequest] = TypeAdapter(AnyRequest)


def read_request(message: Mapping[str, Any]) -> AnyRequest:
    """Return `message` as the request of its kind. Raises ValueError if it is not a valid request."""
    return _ANY_REQUEST.validate_python(dict(message))


def check_request(message: Mapping[str, Any]) -> None:
    """Check `message`, which an island or a user has sent.

    Raises:
        ProtocolError: if it is not a valid request.
    """
    try:
        read_request(message)
    except ValueError as error:
        raise ProtocolError(" ".join(str(error).split())[:_SHOWN]) from error
