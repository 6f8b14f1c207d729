"""Messages are checked as a whole: kinds, fields, and their values. A wrong one is named without the rest."""

import traceback
from typing import Annotated, Any

import pytest
from pydantic import Field

from deepspeed_compress.transport.errors import MessageError
from deepspeed_compress.transport.messages import Fields, Messages, Name, Seconds


class Join(Fields):
    name: Name
    slots: Annotated[list[Annotated[int, Field(ge=0, le=9)]], Field(max_length=3)]
    silent: Seconds | None = None
    terms: dict[str, Any]
    ok: bool


MESSAGES = Messages({"join": Join, "beat": Fields})
TOKEN = "a7c4"
GOOD = {"kind": "join", "name": "n", "slots": [0, 9], "silent": 1.5, "terms": {}, "ok": False}


def test_a_message_of_the_table_is_read() -> None:
    found = MESSAGES.read(GOOD)
    assert isinstance(found, Join)
    assert (found.slots, found.silent) == ([0, 9], 1.5)
    MESSAGES.read({**GOOD, "silent": None, "slots": [], "more": 1})
    MESSAGES.read({"kind": "beat"})
    with pytest.raises(ValueError, match="frozen"):
        found.ok = True


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("kind", "jion"),
        ("kind", None),
        ("kind", []),
        ("name", ""),
        ("name", "x" * 65),
        ("name", "\ud800"),
        ("name", 1),
        ("name", None),
        ("slots", [0, True]),
        ("slots", [10]),
        ("slots", [-1]),
        ("slots", [1.0]),
        ("slots", [10**5000]),
        ("slots", [1] * 4),
        ("slots", {"0": 1}),
        ("silent", -0.1),
        ("silent", float("nan")),
        ("silent", "1"),
        ("silent", True),
        ("terms", []),
        ("ok", 1),
    ],
)
def test_an_invalid_field_is_named(name: str, value: object) -> None:
    with pytest.raises(MessageError, match=name) as raised:
        MESSAGES.read({**GOOD, "terms": {"token": TOKEN}, name: value})
    assert TOKEN not in "".join(traceback.format_exception(raised.value))
