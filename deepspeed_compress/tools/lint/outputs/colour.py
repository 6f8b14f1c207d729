"""Colours of a terminal, and texts that cannot do anything to one."""

import re
import unicodedata
from collections.abc import Mapping

BOLD, DIM, BLUE = "1", "2", "34"
CODE: Mapping[str, str] = {"error": "1;31", "warning": "1;33", "info": "1;36"}

_SPACES: Mapping[str, str] = {"W": "  ", "F": "  "}
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def paint(text: str, style: str, colour: bool) -> str:
    """`text` in a style, or as it is."""
    return f"\x1b[{style}m{text}\x1b[0m" if colour else text


def visible(text: str) -> str:
    """`text` on one line, without characters that move the cursor or turn text around."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", text)


def blank(text: str) -> str:
    """White space as wide as `text`."""
    return "".join(
        "\t" if char == "\t" else "  " if unicodedata.east_asian_width(char) in "WF" else " " for char in text
    )
