"""The command `ds-compress lint`, with its settings in pyproject.toml."""

import argparse
import os
import shutil
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn

from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.model_families import read_config
from deepspeed_compress.safe_files import replacing, temporary
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.files import Source, detected_framework, sources
from deepspeed_compress.tools.lint.fixes import Fixed, apply, diff
from deepspeed_compress.tools.lint.options import Framework, add_lint_arguments
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import ALL, Selection, check_codes, ignored_inside, lint_document
from deepspeed_compress.tools.outputs import Report, lines, plural, render, visible

CLEAN, FOUND, FAILED = 0, 1, 2

_TABLE = ("tool", "ds-compress", "lint")
_PER_FILE = "per-file-ignores"
_KEYS = (
    *("select", "ignore", _PER_FILE, "exclude", "force-exclude"),
    *("exit-on", "framework", "world-size", "ranks-per-node", "bandwidth"),
)
_EXIT_ON = "warning"
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

    @property
    def changed(self) -> bool:
        return self.fixed.text != self.source.document.text


def run(options: argparse.Namespace) -> int:
    """Lint, and return the exit code: 0 without serious findings, 1 with them."""
    if options.unsafe_fixes and not (options.fix or options.diff):
        raise ConfigError("--unsafe-fixes has no effect alone. Write it together with --fix or --diff.")
    settings, per_file = find_settings(Path.cwd())
    _check_codes(options, settings, per_file)
    # What the command line says takes precedence over the file, but it ignores more rules.
    given = {key: value for key, value in vars(options).items() if value}
    options = argparse.Namespace(**{**vars(settings), **given, "ignore": [*settings.ignore, *options.ignore]})
    selection = Selection(tuple(options.select or (ALL,)), tuple(options.ignore), per_file)
    context = Context(
        options.world_size,
        options.ranks_per_node,
        options.framework,
        None if options.model is None else read_config(options.model),
        options.bandwidth,
    )
    found = sources(options.files, options.exclude, options.force_exclude)
    linted = [_lint(source, context, selection, options) for source in found]
    if not options.quiet:
        for note in _notes(linted, options):
            print(f"ds-compress: {visible(note)}", file=sys.stderr)
    _write(linted, options)
    return CLEAN if options.exit_zero or not _is_wrong(linted, options) else FOUND


def _check_codes(
    options: argparse.Namespace, settings: argparse.Namespace, per_file: Mapping[str, tuple[str, ...]]
) -> None:
    for place, chosen in (("--", options), ("pyproject.toml: ", settings)):
        check_codes(chosen.select, RULES, f"{place}select")
        check_codes(chosen.ignore, RULES, f"{place}ignore")
    for codes in per_file.values():
        check_codes(codes, RULES, "pyproject.toml: per-file-ignores")


def _notes(linted: list[Linted], options: argparse.Namespace) -> Iterator[str]:
    """Yield notes on the run other than findings."""
    if not linted and not options.force_exclude:
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


def _is_wrong(linted: list[Linted], options: argparse.Namespace) -> bool:
    """Return True if a finding is at least as severe as `--exit-on`, or if --diff shows a correction."""
    grave = SEVERITIES[: SEVERITIES.index(options.exit_on or _EXIT_ON) + 1]
    found = any(one.severity in grave for result in linted for one in result.fixed.remaining)
    return found or (options.diff and any(result.changed for result in linted))


def _lint(source: Source, context: Context, selection: Selection, options: argparse.Namespace) -> Linted:
    known = replace(
        context,
        framework=context.framework or source.framework or detected_framework(source.document),
        world_size=context.world_size or source.world_size,
    )
    detected = known.framework if context.framework is None else None

    def lint(document: Document) -> Iterable[Diagnostic]:
        return lint_document(document, known, selection)

    if options.fix or options.diff:
        return Linted(source, apply(source.document, lint, options.unsafe_fixes), detected)
    return Linted(source, Fixed(source.document, 0, tuple(lint(source.document))), detected)


def _write(linted: list[Linted], options: argparse.Namespace) -> None:
    """Write corrections and findings, or differences."""
    changed = [result for result in linted if result.changed]
    if options.diff:
        _show_differences(changed, options.quiet)
        return
    for result in changed:
        if not result.source.from_stdin:
            _replace_content(Path(result.source.path), result.fixed.text.encode())
    to_stdout = [result for result in linted if options.fix and result.source.from_stdin]
    for result in to_stdout:
        sys.stdout.write(result.fixed.text)
    stream = sys.stderr if to_stdout else sys.stdout
    findings = tuple(one for result in linted for one in result.fixed.remaining)
    fixed = sum(result.fixed.count for result in linted)
    report = Report(findings, len(linted), RULES, fixed, _has_colour(stream), options.quiet)
    stream.write(render(report, options.output_format))


def _replace_content(path: Path, content: bytes) -> None:
    """Replace the content of a file, or of the target of a link. An error or interruption leaves the old content."""
    target = path.resolve()
    with replacing(target, temporary(target)) as stream:
        stream.write(content)
        shutil.copymode(target, temporary(target))


def _show_differences(changed: list[Linted], quiet: bool) -> None:
    for result in changed:
        text = diff(result.source.document.text, result.fixed.text, result.source.path)
        # Output that is piped into `patch` must not be changed.
        sys.stdout.write(lines(map(visible, text.split("\n"))) if sys.stdout.isatty() else text)
    count = sum(result.fixed.count for result in changed)
    if not quiet:
        print(f"--fix would make {plural(count, 'correction')} in {plural(len(changed), 'file')}.", file=sys.stderr)


def _has_colour(stream: Any) -> bool:
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


class _SettingsParser(argparse.ArgumentParser):
    """Parser of settings in a file, which are options of the command."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}")


def find_settings(start: Path) -> tuple[argparse.Namespace, Mapping[str, tuple[str, ...]]]:
    """Return the settings in the nearest pyproject.toml that has any, as options of the command, and ignores per file.

    The search begins in `start` and goes on in the directories above it.

    Raises:
        ConfigError: The file cannot be read, or has a key or a value that is not allowed.
    """
    for path in (directory / "pyproject.toml" for directory in (start, *start.parents)):
        table = _table(path) if path.is_file() else None
        if table is not None:
            return _settings(table, f"{path}: [{'.'.join(_TABLE)}]")
    return _settings({}, "")


def _table(path: Path) -> Any:
    try:
        table: Any = tomllib.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}. Correct the file, which is read for settings of the linter.") from error
    for key in _TABLE:
        table = table.get(key) if isinstance(table, dict) else None
    return table


def _settings(table: Any, place: str) -> tuple[argparse.Namespace, Mapping[str, tuple[str, ...]]]:
    if not isinstance(table, dict):
        raise ConfigError(f"{place} is {table!r}. Write a table.")
    parser = _SettingsParser(prog=place)
    add_lint_arguments(parser)
    words, per_file = list[str](), table.pop(_PER_FILE, {})
    for key, value in table.items():
        if key not in _KEYS:
            close = get_close_matches(key, _KEYS, n=1, cutoff=0.0)[0]
            raise ConfigError(f"{place}: unknown key {key!r} (allowed: {', '.join(_KEYS)}). Write {close}.")
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        words += [] if value is False else [f"--{key}"] if value is True else [f"--{key}={text}"]
    if not isinstance(per_file, dict) or not all(isinstance(codes, list) for codes in per_file.values()):
        raise ConfigError(f'{place}: {_PER_FILE} is {per_file!r}. Write a table such as "*zero3*.json" = ["DSC201"].')
    return parser.parse_args(words), {pattern: tuple(map(str, codes)) for pattern, codes in per_file.items()}
