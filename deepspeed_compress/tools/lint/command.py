"""The commands `ds-compress lint` and `ds-compress rule`, and the page of all rules."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_compress.diagnostics import SEVERITIES, Fix
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.model_families import read_config
from deepspeed_compress.safe_files import replacing, temporary
from deepspeed_compress.tools.lint.files import STDIN, Source, detected_framework, sources
from deepspeed_compress.tools.lint.fixes import MAX_FIXES, Fixed, apply
from deepspeed_compress.tools.lint.keys import keys
from deepspeed_compress.tools.lint.options import Framework
from deepspeed_compress.tools.lint.rule import PROOFS, Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import ALL, Selection, check_codes, ignored_inside, lint_document, matches
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.outputs.machine import FORMATS
from deepspeed_compress.tools.outputs.report import Report, plural, visible

CLEAN, FOUND, FAILED = 0, 1, 2

_DETECTED_BY: Mapping[Framework, str] = {
    "hf": '"auto" values or the file that names it',
    "accelerate": "keys of Accelerate",
}


@dataclass(frozen=True, slots=True)
class Linted:
    """Linted file: its source, and the result after the requested fixes."""

    source: Source
    fixed: Fixed
    detected: Framework | None
    """Framework, if only the file reveals it, or None."""


def run(options: argparse.Namespace) -> int:
    """Lint, write corrections and findings, and return the exit code: 0 without serious findings, 1 with them."""
    linted = _lint_files(options)
    for note in _notes(linted, options):
        print(f"ds-compress: {visible(note)}", file=sys.stderr)
    for result in linted:
        if result.fixed.text != result.source.document.text:
            _replace_content(Path(result.source.path), result.fixed.text.encode())
    findings = tuple(one for result in linted for one in result.fixed.remaining)
    has_colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    report = Report(findings, len(linted), RULES, sum(result.fixed.count for result in linted), has_colour)
    sys.stdout.write(FORMATS[options.output_format](report))
    grave = SEVERITIES[: SEVERITIES.index(options.exit_on) + 1]
    return FOUND if any(one.severity in grave for one in findings) else CLEAN


def _lint_files(options: argparse.Namespace) -> list[Linted]:
    if options.fix and STDIN in options.files:
        raise ConfigError("--fix: standard input cannot be corrected; write the name of the file")
    check_codes(options.select, RULES, "--select")
    check_codes(options.ignore, RULES, "--ignore")
    selection = Selection(tuple(options.select or (ALL,)), tuple(options.ignore))
    model = None if options.model is None else read_config(options.model)
    context = Context(options.world_size, options.ranks_per_node, options.framework, model)
    return [_lint(source, context, selection, options) for source in sources(options.files, options.exclude)]


def _notes(linted: list[Linted], options: argparse.Namespace) -> Iterator[str]:
    """Yield notes on the run other than findings."""
    if not linted:
        yield f"warning: no DeepSpeed configuration in {', '.join(options.files)}"
    for result in linted:
        try:
            check_codes(ignored_inside(result.source.document), RULES, result.source.path)
        except ConfigError as error:
            yield f"warning: {error}"
    for framework, sign in _DETECTED_BY.items():
        paths = [result.source.path for result in linted if result.detected == framework]
        if paths:
            more = f" and {plural(len(paths) - 1, 'more file')}" if paths[1:] else ""
            yield f"note: {paths[0]}{more}: checked for {framework}, because of {sign}; --framework overrides this"


def _lint(source: Source, context: Context, selection: Selection, options: argparse.Namespace) -> Linted:
    known = replace(
        context,
        framework=context.framework or source.framework or detected_framework(source.document),
        world_size=context.world_size or source.world_size,
    )
    most = MAX_FIXES if options.fix else 0
    fixed = apply(source.document, lambda document: lint_document(document, known, selection), most)
    return Linted(source, fixed, known.framework if context.framework is None else None)


def _replace_content(path: Path, content: bytes) -> None:
    """Replace the content of a file, or of the target of a link. An error or interruption leaves the old content."""
    target = path.resolve()
    with replacing(target, temporary(target)) as stream:
        stream.write(content)
        shutil.copymode(target, temporary(target))


def explain(options: argparse.Namespace) -> int:
    """Print the requested rules, and return the exit code.

    Raises:
        ConfigError: There is no such rule, or none is requested.
    """
    if bool(options.rules) == options.all:
        raise ConfigError("write the code or name of a rule, or --all")
    check_codes(options.rules, RULES, "rule")
    chosen = [rule for rule in RULES if options.all or matches(rule, options.rules)]
    if options.markdown:
        text = page(chosen)
    elif options.all:
        text = "".join(f"{rule.code}  {rule.severity:<7}  {rule.name}: {rule.summary}\n" for rule in chosen)
    else:
        text = _rendered(sections=chosen)
    sys.stdout.write(text)
    return 0


def page(rules: Iterable[LintRule]) -> str:
    """Return the documentation page: a table and a section for each rule, grouped by family."""
    ordered = sorted(rules, key=lambda rule: rule.code)
    families = dict.fromkeys(rule.family for rule in ordered)
    return _rendered(families=[(name, [rule for rule in ordered if rule.family == name]) for name in families])


def _rendered(*, families: Sequence[tuple[str, list[LintRule]]] = (), sections: Sequence[LintRule] = ()) -> str:
    """Return the text of the template for families of rules, or for sections of single rules."""
    # Linting does not need the package.
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, trim_blocks=True, undefined=StrictUndefined)
    environment.globals |= {"fix_of": fix_of, "json": json.dumps, "proofs": PROOFS, "version": keys().version}
    template = environment.get_template("rules.md.jinja")
    return template.render(families=families, sections=sections).strip() + "\n"


def fix_of(rule: LintRule) -> Fix | None:
    """Return the fix that the rule proposes for its bad example, or None."""
    found = rule.check(parse(rule.wrong), Context(**rule.context))
    return next((one.fix for one in found if one.fix is not None), None)
