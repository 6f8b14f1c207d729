"""The command `ds-compress rule` and the page of all rules, both generated from the table of rules."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from deepspeed_compress.diagnostics import Fix
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint.rule import Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import check_codes, matches
from deepspeed_compress.tools.lint.scanner import parse

_PROOFS: Mapping[str, str] = {
    "raises": "DeepSpeed fails with a message that matches `{}`.",
    "ignores": "DeepSpeed starts and ignores it.",
    "warns": "DeepSpeed starts and logs a message that matches `{}`.",
    "accepts": "DeepSpeed starts without a message: {}.",
    "unproved": "Not tested: {}.",
}
_HEAD = """# Lint rules

All rules of [`ds-compress lint`](lint.md), by family. `ds-compress rule --all --markdown` prints this page, and
`ds-compress rule CODE` explains one rule. Every example is tested: a rule reports its wrong example once and nothing in
the right one. Unless a rule says otherwise, both were also given to DeepSpeed {version} itself.
"""


def run(options: argparse.Namespace) -> int:
    """Print the requested rules, and return the exit code.

    Raises:
        ConfigError: There is no such rule, or none is requested.
    """
    if bool(options.rules) == options.all:
        raise ConfigError("write the code or name of a rule, or --all")
    check_codes(options.rules, RULES, "rule")
    chosen = [rule for rule in RULES if options.all or matches(rule, options.rules)]
    sys.stdout.write(page(chosen) if options.markdown else listing(chosen) if options.all else text(chosen))
    return 0


def listing(rules: Iterable[LintRule]) -> str:
    """Return one line per rule."""
    return "".join(f"{rule.code}  {rule.severity:<7}  {rule.name}: {rule.summary}\n" for rule in rules)


def text(rules: Iterable[LintRule]) -> str:
    """Return the full description of the rules."""
    return "\n".join(_section(rule, "#") for rule in rules)


def page(rules: Iterable[LintRule]) -> str:
    """Return the documentation page: a table and a section for each rule, grouped by family."""
    rules = sorted(rules, key=lambda rule: rule.code)
    families = dict.fromkeys(rule.family for rule in rules)
    version = json.loads(Path(__file__).with_name("keys.json").read_bytes())["deepspeed"]
    parts = [_HEAD.format(version=version)]
    for family in families:
        of_family = [rule for rule in rules if rule.family == family]
        parts.append("\n".join((f"## {family[0].upper()}{family[1:]}\n", *_table(of_family), "")))
        parts += [_section(rule, "###") for rule in of_family]
    return "\n".join(parts)


def _table(rules: Iterable[LintRule]) -> Iterator[str]:
    yield "| code | name | severity | fix | what it finds |"
    yield "|---|---|---|---|---|"
    for rule in rules:
        fix = fix_of(rule)
        marked = "" if fix is None else "safe" if fix.safe else "unsafe"
        summary = rule.summary.replace("|", "\\|")
        link = f"[{rule.code}](#{rule.code.lower()}-{rule.name})"
        yield f"| {link} | `{rule.name}` | {rule.severity} | {marked} | {summary} |"


def fix_of(rule: LintRule) -> Fix | None:
    """Return the fix that the rule proposes for its bad example, or None."""
    found = rule.check(parse(rule.wrong), Context(**rule.context))
    return next((one.fix for one in found if one.fix is not None), None)


def _section(rule: LintRule, heading: str) -> str:
    fix = fix_of(rule)
    fixed = () if fix is None else (f"`--fix{'' if fix.safe else ' --unsafe-fixes'}`: {fix.title}.\n",)
    return "\n".join(
        (
            f"{heading} {rule.code} {rule.name}\n",
            f"{rule.severity.capitalize()}. {rule.summary}\n",
            f"{rule.reason}\n",
            f"{_PROOFS[rule.proof.kind].format(rule.proof.text.rstrip('.'))}\n",
            *fixed,
            *_example("Wrong", rule.wrong, rule.context),
            *_example("Right", rule.right, rule.context),
        )
    )


def _example(title: str, source: str, context: Mapping[str, object]) -> Iterator[str]:
    given = ", ".join(f"{key} = {json.dumps(value)}" for key, value in context.items())
    yield f"{title}{f' ({given})' if given else ''}:\n"
    yield f"```hjson\n{source.strip()}\n```\n"
