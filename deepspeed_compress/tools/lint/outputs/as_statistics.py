"""How often each rule found something, the most frequent first. A star: `--fix` corrects some of it."""

from collections import defaultdict
from collections.abc import Sequence

from deepspeed_compress.tools.lint.finding import Finding
from deepspeed_compress.tools.lint.outputs.colour import CODE, paint
from deepspeed_compress.tools.lint.outputs.report import Report, lines


def render(report: Report) -> str:
    """One line a rule, and a summary."""
    by_code: dict[str, list[Finding]] = defaultdict(list)
    for finding in report.findings:
        by_code[finding.rule.code].append(finding)
    ordered = sorted(by_code.values(), key=lambda found: (-len(found), found[0].rule.code))
    return lines((*(_line(found, report.colour) for found in ordered), *report.closing))


def _line(found: Sequence[Finding], colour: bool) -> str:
    rule = found[0].rule
    star = "[*]" if any(finding.fixable == "--fix" for finding in found) else "[ ]"
    return f"{len(found):>5}  {paint(rule.code, CODE[rule.severity], colour)}  {star}  {rule.severity:<7}  {rule.name}"
