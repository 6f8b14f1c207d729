"""Command-line options of `ds-compress lint` and `rule`. Every command loads this module, so its imports are light."""

import argparse
from pathlib import Path
from typing import Literal, get_args

from deepspeed_compress.diagnostics import SEVERITIES
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.outputs.machine import FORMATS

Framework = Literal["deepspeed", "hf", "accelerate", "lightning"]
FRAMEWORKS: tuple[Framework, ...] = get_args(Framework)
FINE_TUNING = ("llamafactory", "swift", "axolotl", "trl")
"""Frameworks whose Trainer reads the configuration, so that they are `hf` for the rules."""


def add_lint_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `lint` to `parser`."""
    what = "files, directories, or - for standard input (default: .)"
    parser.add_argument("files", nargs="*", default=["."], metavar="FILE", help=what)
    group = parser.add_argument_group("files")
    what = "patterns of files and directories to skip, separated by commas"
    group.add_argument("--exclude", type=_words, action="extend", default=[], metavar="PATTERNS", help=what)
    group = parser.add_argument_group("rules")
    what = "rules to apply: codes, prefixes of codes, names, or ALL (default)"
    group.add_argument("--select", type=_words, action="extend", default=[], metavar="RULES", help=what)
    what = "rules to leave out"
    group.add_argument("--ignore", type=_words, action="extend", default=[], metavar="RULES", help=what)
    group = parser.add_argument_group("facts about the run")
    group.add_argument("--world-size", type=positive_integer, metavar="N", help="total number of ranks")
    group.add_argument("--ranks-per-node", type=positive_integer, metavar="N", help="number of ranks on each node")
    what = f"program that reads the configuration; {', '.join(FINE_TUNING)} are hf"
    group.add_argument("--framework", type=_framework, choices=FRAMEWORKS, help=what)
    group.add_argument("--model", type=Path, metavar="DIR", help="Hugging Face model: its directory or config.json")
    group = parser.add_argument_group("fixes")
    group.add_argument("--fix", action="store_true", help="correct what has a safe correction")
    group = parser.add_argument_group("output")
    group.add_argument("--output-format", choices=FORMATS, default="full")
    what = "lowest severity for which the exit code is 1 (default: warning)"
    group.add_argument("--exit-on", choices=SEVERITIES, default="warning", help=what)


def add_rule_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `rule` to `parser`."""
    parser.add_argument("rules", nargs="*", metavar="CODE", help="code or name of a rule, such as DSC201")
    parser.add_argument("--all", action="store_true", help="list all rules, one per line")
    parser.add_argument("--markdown", action="store_true", help="print a page of documentation")


def _framework(name: str) -> str:
    return "hf" if name in FINE_TUNING else name


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]
