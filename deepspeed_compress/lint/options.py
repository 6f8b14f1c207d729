"""Options of `ds-compress lint` and `ds-compress rule`. Loaded with every command, so it is light."""

import argparse
import re
from pathlib import Path
from typing import Literal, get_args

Framework = Literal["deepspeed", "hf", "accelerate"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
FORMATS = ("full", "concise", "json", "github", "sarif")

_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", re.IGNORECASE)


def add_lint_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `lint`."""
    parser.add_argument(
        "files", nargs="*", default=["."], metavar="FILE", help="files, directories, base64, or - (default: .)"
    )
    _add_rules(parser.add_argument_group("rules"))
    _add_context(parser.add_argument_group("what is known about the run"))
    _add_fixes(parser.add_argument_group("corrections"))
    output = parser.add_argument_group("output")
    output.add_argument("--output-format", choices=FORMATS, default="full")
    output.add_argument("--output-file", type=Path, metavar="FILE", help="write findings to FILE")
    output.add_argument("--exit-zero", action="store_true", help="exit with 0 even if there are findings")


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `rule`."""
    parser.add_argument("rules", nargs="*", metavar="CODE", help="code or name of a rule, such as DSC201")
    parser.add_argument("--all", action="store_true", help="every rule, one line each")
    parser.add_argument("--markdown", action="store_true", help="as a page of documentation")


def _add_rules(group: argparse._ArgumentGroup) -> None:
    for option, default, meaning in (
        ("--select", None, "rules to apply: codes, beginnings of codes, names, or ALL (default)"),
        ("--ignore", [], "rules not to apply"),
    ):
        group.add_argument(option, type=_codes, action="extend", default=default, metavar="RULES", help=meaning)


def _add_context(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--world-size", type=_positive, metavar="N", help="ranks in all")
    group.add_argument("--ranks-per-node", type=_positive, metavar="N", help="ranks on each node")
    group.add_argument("--framework", choices=FRAMEWORKS, help="what reads the configuration")
    group.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face model, or its config.json")
    group.add_argument("--gpu-memory", type=memory, metavar="SIZE", help="of one device, such as 80GB")
    group.add_argument("--bandwidth", type=_positive_number, metavar="GBIT", help="between nodes, in Gbit/s")


def _add_fixes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fix", action="store_true", help="correct what can safely be corrected")
    group.add_argument("--unsafe-fixes", action="store_true", help="with --fix or --diff: correct the rest too")
    group.add_argument("--diff", action="store_true", help="show what --fix would do")


def _codes(text: str) -> list[str]:
    return [code for code in re.split(r"[\s,]+", text) if code]


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def _positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def memory(text: str) -> int:
    """Bytes of a size with a unit: 80GB, 79.5GiB."""
    found = _MEMORY.fullmatch(text.strip())
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2].upper()]) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size (allowed: a number and kB to TB or KiB to TiB)")
    return size
