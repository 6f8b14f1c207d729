"""Argument types for argparse, which prints their errors after the name of the option, and examples for `--help`."""

import argparse
import contextlib
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from deepspeed_compress.tools.bench.links import ClusterError, bits_per_second

T = TypeVar("T", int, float)


def epilog(examples: Sequence[str], more: str = "") -> dict[str, Any]:
    """Return arguments for a parser whose help ends with `examples` (given without "ds-compress ") and `more`."""
    lines = "".join(f"\n  ds-compress {example}" for example in examples)
    return {"epilog": f"examples:{lines}{more}", "formatter_class": argparse.RawDescriptionHelpFormatter}


class Subcommands:
    """Subcommands of a command, whose help ends with the first example of each of them."""

    def __init__(self, parser: argparse.ArgumentParser, metavar: str) -> None:
        self._parser, self._subparsers = parser, parser.add_subparsers(required=True, metavar=metavar)

    def add(self, name: str, run: str, summary: str, examples: Sequence[str]) -> argparse.ArgumentParser:
        """Return the parser of a new subcommand, whose help ends with `examples`. See `cli.Command` for `run`."""
        self._parser.epilog = f"{self._parser.epilog}\n  ds-compress {examples[0]}"
        parser = self._subparsers.add_parser(name, help=summary, description=summary, **epilog(examples))
        parser.set_defaults(run=run)
        return parser


def integer_from(least: int, why: str = "") -> Callable[[str], int]:
    """Return an argument type for integers of at least `least`. `why` is added to the error message."""
    wanted = f"an integer from {least} up{why and f': {why}'}"
    return partial(_between, kind=int, above=least - 1, below=2**63, wanted=wanted)


def positive_integer(text: str) -> int:
    """Parse an integer of at least 1."""
    return _between(text, int, 0, 2**63, "a positive integer")


def port(text: str) -> int:
    """Parse a TCP port. 0 means any free port."""
    return _between(text, int, -1, 2**16, "a port from 0 to 65535")


def positive_number(text: str) -> float:
    """Parse a finite number above 0."""
    return _between(text, float, 0, math.inf, "a positive number")


def share(text: str) -> float:
    """Parse a fraction between 0 and 1, both excluded, such as "0.005" or "0.5%"."""
    factor = 100.0 if text.endswith("%") else 1.0
    return _between(text.removesuffix("%"), float, 0, factor, f"a number between 0 and {factor:g}") / factor


def _between(text: str, kind: Callable[[str], T], above: float, below: float, wanted: str) -> T:
    with contextlib.suppress(ValueError):
        if above < (number := kind(text)) < below:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")


def duration(text: str) -> float:
    """Parse a time such as "90 s", "30 min" or "2 h" and return it in seconds."""
    from deepspeed_compress.config.numbers import seconds

    try:
        return seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def rate(text: str) -> float:
    """Parse the rate of a link as `tc` writes it, such as "100mbit", and return it in bits per second."""
    try:
        return bits_per_second(text)
    except ClusterError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
