"""Typed messages: the one place that checks what another process has sent before anything uses it."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from deepspeed_compress.transport.connection import Head
from deepspeed_compress.transport.errors import MessageError

_SHOWN = 40


class Fields(BaseModel):
    """Fields of a message. Types are not converted, and unknown fields, which a newer release may send, are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)


def _encodable(text: str) -> str:
    """Return `text`. Raises ValueError for lone surrogates, which no log, file or socket accepts."""
    text.encode()
    return text


Text = Annotated[str, Field(max_length=4096), AfterValidator(_encodable)]
Address = Annotated[str, Field(max_length=300), AfterValidator(_encodable)]
Name = Annotated[str, Field(min_length=1, max_length=64), AfterValidator(_encodable)]
Count = Annotated[int, Field(ge=0, le=1 << 53)]
"""Number that every reader of JSON keeps exactly."""
Seconds = Annotated[float, Field(ge=0)]


F = TypeVar("F", bound=Fields)


class Messages:
    """Messages that one side of a service may send: the fields of each kind."""

    def __init__(self, kinds: Mapping[str, type[Fields]]) -> None:
        self._kinds = kinds

    def read(self, head: Head) -> Fields:
        """Return the message with `head`.

        Raises:
            MessageError: if it is not one of these messages. The text names the field.
        """
        kind = head.get("kind")
        fields = self._kinds.get(kind) if isinstance(kind, str) else None
        if fields is None:
            raise MessageError(f"unknown kind of message: {shown(kind)}")
        return validated(fields, dict(head), f"{kind}")


def validated(fields: type[F], given: Any, what: str) -> F:
    """Return `given`, which is `what`, as `fields`. Raises MessageError, which names the first field that is wrong."""
    try:
        return fields.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    # The error of pydantic is not chained, since it shows all of a message, and thus its token.
    name = ".".join(map(str, first["loc"])) or "it"
    found = "missing" if first["type"] == "missing" else shown(first["input"])
    raise MessageError(f"{what}: {name} is {found}: {first['msg']}")


def shown(value: Any) -> str:
    """Return `value` as it appears in messages. Python refuses to print integers of more than 4,300 digits."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, Mapping | list | tuple):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)}"
    return repr(value)[:_SHOWN]
