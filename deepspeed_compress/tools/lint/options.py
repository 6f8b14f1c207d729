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
    what = "files, directories, base64, or - (default: .)"
    parser.add_argument("files", nargs="*", default=["."], metavar="FILE", help=what)
    parser.add_argument("--version", action="version", version=f"ds-compress {__version__}")
    _add_files(parser.add_argument_group("files"))
    _add_rules(parser.add_argument_group("rules"))
    _add_context(parser.add_argument_group("what is known about the run"))
    _add_fixes(parser.add_argument_group("corrections"))
    _add_output(parser.add_argument_group("output"))


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rule` to `parser`."""
    parser.add_argument("rules", nargs="*", metavar="CODE", help="code or name of a rule, such as DSC201")
    parser.add_argument("--all", action="store_true", help="every rule, one line each")
    parser.add_argument("--markdown", action="store_true", help="as a page of documentation")


def _add_files(group: argparse._ArgumentGroup) -> None:
    what = "files and directories to pass over"
    group.add_argument("--exclude", type=_patterns, action="extend", metavar="PATTERNS", help=what)
    what = "pass over excluded files, and files that are no configurations, even where FILE names them"
    group.add_argument("--force-exclude", action="store_true", help=what)
    what = "also read files outside of the project that a configuration or a link in it names"
    group.add_argument("--follow-outside", action="store_true", help=what)
    group.add_argument("--stdin-filename", metavar="NAME", help="name of what comes from standard input (-)")
    group.add_argument("--config", type=Path, metavar="TOML", help="settings, instead of the nearest pyproject.toml")


def _add_rules(group: argparse._ArgumentGroup) -> None:
    what = "rules to apply: codes, beginnings of codes, names, or ALL (default)"
    group.add_argument("--select", type=_codes, action="extend", metavar="RULES", help=what)
    what = "rules not to apply"
    group.add_argument("--ignore", type=_codes, action="extend", default=[], metavar="RULES", help=what)


def _add_context(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--world-size", type=positive_integer, metavar="N", help="ranks in all")
    group.add_argument("--ranks-per-node", type=positive_integer, metavar="N", help="ranks on each node")
    group.add_argument("--framework", choices=FRAMEWORKS, help="what reads the configuration")
    group.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face model, or its config.json")
    group.add_argument("--gpu-memory", type=memory, metavar="SIZE", help="of one device, such as 80GB")
    group.add_argument("--bandwidth", type=positive_number, metavar="GBIT", help="between nodes, in Gbit/s")


def _add_fixes(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--fix", action="store_true", help="correct what can safely be corrected")
    group.add_argument("--unsafe-fixes", action="store_true", help="with --fix or --diff: correct the rest too")
    group.add_argument("--diff", action="store_true", help="show what --fix would do")


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-format", choices=FORMATS, default="full")
    group.add_argument("--output-file", type=Path, metavar="FILE", help="write findings to FILE")
    group.add_argument("--statistics", action="store_true", help="count findings by rule instead of showing them")
    group.add_argument("-q", "--quiet", action="store_true", help="findings and errors only: no summary, no notes")
    what = "least severity that makes the exit code 1 (default: warning)"
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
