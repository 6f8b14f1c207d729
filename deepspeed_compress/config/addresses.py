"""Addresses of services as users write them: "head.example.org:29400"."""

import re
from typing import Annotated

from pydantic import AfterValidator, Field

_MOST = 65535
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})"


def check_address(text: str) -> str:
    """Return `text` if it is "host:port" with a name or an IPv4 address, and a port from 1 to 65535.

    Raises:
        ValueError: if it is not, with what to write instead.
    """
    found = re.fullmatch(rf"({_HOST}):(\d+)", text, re.ASCII)
    if found is None and text.count(":") > 1:
        raise ValueError(
            f'"{text}" contains an IPv6 address (allowed: a host name or an IPv4 address, and a port); write '
            '"head.example.org:29400"'
        )
    if found is None:
        raise ValueError(f'"{text}" is not an address (allowed: host:port); write "head.example.org:29400"')
    if not 1 <= int(found[2][:6]) <= _MOST:
        raise ValueError(f'"{text}" has port {found[2]} (allowed: 1 to {_MOST}); write "{found[1]}:29400"')
    return text


Address = Annotated[
    str,
    AfterValidator(check_address),
    Field(examples=["head.example.org:29400"], json_schema_extra={"pattern": rf"^{_HOST}:[0-9]{{1,5}}$"}),
]
