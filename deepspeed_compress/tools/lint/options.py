"""Command-line options of `ds-compress lint` and `rule`. Every command loads this module, so its imports are light."""

import argparse
import re
from pathlib import Path
from typing import Literal, get_args

from deepspeed_compress import __version__
from deepspeed_compress.diagnostics import SEVERITIES
from deepspeed_compress.tools.arguments import positive_integer, positive_number

Framework = Literal["deepspeed", "hf", "accelerate", "lightning"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
FORMATS = ("full", "concise", "json", "github", "sarif")

_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(i?)B", re.IGNORECASE)


def add_lint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lint` to `parser`."""
    what = "files, directories, base64 text, or - for standard input (default: .)"
    parser.add_argument("files", nargs="*", default=["."], metavar="FILE", help=what)
    parser.add_argument("--version", action="version", version=f"ds-compress {__version__}")
    _add_files(parser.add_argument_group("files"))
    _add_rules(parser.add_argument_group("rules"))
    _add_context(parser.add_argument_group("facts about the run"))
    _add_fixes(parser.add_argument_group("fixes"))
    _add_output(parser.add_argument_group("output"))


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rule` to `parser`."""
    parser.add_argument("rules", nargs="*", metavar="CODE", help="code or name of a rule, such as DSC201")
    parser.add_argument("--all", action="store_true", help="list all rules, one per line")
    parser.add_argument("--markdown", action="store_true", help="print a page of documentation")


def _add_files(group: argparse._ArgumentGroup) -> None:
    what = "patterns of files and directories to skip, separated by commas"
    group.add_argument("--exclude", type=_patterns, action="extend", metavar="PATTERNS", help=what)
    what = "skip excluded files and files that are not configurations, even if FILE names them"
    group.add_argument("--force-exclude", action="store_true", help=what)
    what = "also read files outside the project that a configuration or a link refers to"
    group.add_argument("--follow-outside", action="store_true", help=what)
    group.add_argument("--stdin-filename", metavar="NAME", help="name of the file that is read from standard input (-)")
    group.add_argument("--config", type=Path, metavar="TOML", help="settings, in place of the nearest pyproject.toml")


def _add_rules(group: argparse._ArgumentGroup) -> None:
    what = "rules to apply: codes, prefixes of codes, names, or ALL (default)"
    group.add_argument("--select", type=_codes, action="extend", metavar="RULES", help=what)
    what = "rules to leave out"
    group.add_argument("--ignore", type=_codes, action="extend", default=[], metavar="RULES", help=what)


def _add_context(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--world-size", type=positive_integer, metavar="N", help="total number of ranks")
    group.add_argument("--ranks-per-node", type=positive_integer, metavar="N", help="number of ranks on each node")
    group.add_argument("--framework", choices=FRAMEWORKS, help="program that reads the configuration")
    group.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face model: its directory or config.json")
    group.add_argument("--gpu-memory", type=memory, metavar="SIZE", help="memory of one GPU, such as 80GB")
    group.add_argument("--bandwidth", type=positive_number, metavar="GBIT", help="bandwidth between nodes, in Gbit/s")


def _add_fixes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fix", action="store_true", help="apply all safe fixes")
    group.add_argument("--unsafe-fixes", action="store_true", help="with --fix or --diff: also apply the other fixes")
    group.add_argument("--diff", action="store_true", help="show what --fix would change")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-format", choices=FORMATS, default="full")
    group.add_argument("--output-file", type=Path, metavar="FILE", help="write findings to FILE")
    group.add_argument("--statistics", action="store_true", help="count findings by rule instead of showing them")
    group.add_argument("-q", "--quiet", action="store_true", help="print findings and errors, but no summary or notes")
    what = "lowest severity for which the exit code is 1 (default: warning)"
    group.add_argument("--exit-on", choices=SEVERITIES, help=what)
    group.add_argument("--exit-zero", action="store_true", help="exit with 0 even if there are findings")


def _codes(text: str) -> list[str]:
    return [code for code in re.split(r"[\s,]+", text) if code]


def _patterns(text: str) -> list[str]:
    return [pattern for pattern in text.split(",") if pattern]


def memory(text: str) -> int:
    """Parse a size with a unit, such as 80GB or 79.5GiB, and return it in bytes."""
    found = _MEMORY.fullmatch(text.strip())
    size = int(float(found[1]) * (1024 if found[3] else 1000) ** _UNITS[found[2].upper()]) if found else 0
    if not size:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size (allowed: a number and kB to TB or KiB to TiB)")
    return size
