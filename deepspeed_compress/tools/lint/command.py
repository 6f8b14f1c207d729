"""The command `ds-compress lint`."""

import argparse
import io
import os
import shutil
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.diagnostics import SEVERITIES, Diagnostic
from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.model_families import read_config
from deepspeed_compress.safe_files import replacing, temporary
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.files import STDIN, YAML, Search, Source, detected_framework, sources
from deepspeed_compress.tools.lint.fixes import Fixed, apply, diff
from deepspeed_compress.tools.lint.options import Framework
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import lint_document, shortened
from deepspeed_compress.tools.lint.selection import (
    Selection,
    Settings,
    check_codes,
    find_settings,
    ignored_by_remarks,
    read_settings,
)
from deepspeed_compress.tools.outputs import Report, lines, plural, render, visible

CLEAN, FOUND, FAILED = 0, 1, 2

_EXIT_ON = "warning"
_DETECTED_BY: Mapping[Framework, str] = {"hf": '"auto" values', "accelerate": "keys of Accelerate"}


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
    """Lint, and return the exit code: 0 without serious findings, 1 with, 2 for an internal error."""
    try:
        return _run(options)
    except (CompressError, OSError):
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"ds-compress: internal error: {type(error).__name__}: {error} ({where.filename}:{where.lineno}). "
            "Please report it with the file that was read.",
            file=sys.stderr,
        )
    return FAILED


def _run(options: argparse.Namespace) -> int:
    _check(options)
    settings = find_settings(Path.cwd()) if options.config is None else read_settings(options.config)
    selection, context, search = _selection(options, settings), _context(options, settings), _search(options, settings)
    # A program without standard input has None in its place.
    stdin = io.BytesIO() if sys.stdin is None else sys.stdin.buffer
    linted = [_lint(source, context, selection, options) for source in sources(options.files, search, stdin)]
    _check_output(linted, options.output_file)
    if not options.quiet:
        for note in _notes(linted, options.files, search):
            print(f"ds-compress: {visible(note)}", file=sys.stderr)
    _write(linted, options)
    wrong = _is_wrong(linted, options, options.exit_on or settings.exit_on or _EXIT_ON)
    return CLEAN if options.exit_zero or not wrong else FOUND


def _check(options: argparse.Namespace) -> None:
    """Check options that have no effect in combination.

    Raises:
        ConfigError: There are such options.
    """
    message = next(_contradictions(options), None)
    if message is not None:
        raise ConfigError(message)


def _contradictions(options: argparse.Namespace) -> Iterator[str]:
    if options.unsafe_fixes and not (options.fix or options.diff):
        yield "--unsafe-fixes has no effect alone. Write it together with --fix or --diff."
    if options.diff and options.output_file is not None:
        yield "--output-file has no effect with --diff. Write > FILE to keep the difference."
    if options.diff and options.statistics:
        yield "--statistics has no effect with --diff. Write one of them."
    if options.statistics and options.output_format not in ("full", "concise"):
        yield f"--statistics has no {options.output_format} format. Write one of the two options."
    if options.stdin_filename is not None and STDIN not in options.files:
        yield "--stdin-filename has no effect without standard input. Write - as FILE."
    if (options.stdin_filename or "").endswith(YAML) and options.fix:
        yield "--fix has no effect on YAML. Write --stdin-filename with another name, or no --fix."
    if options.exit_zero and options.exit_on:
        yield "--exit-on has no effect with --exit-zero. Write one of them."


def _check_output(linted: Iterable[Linted], output: Path | None) -> None:
    """Check that the findings are not written over a configuration.

    Raises:
        ConfigError: The output file is one of the linted files.
    """
    if output is not None and any(output.resolve() == Path(result.source.path).resolve() for result in linted):
        raise ConfigError(f"--output-file {output}: it is one of the linted configurations. Write another file.")


def _search(options: argparse.Namespace, settings: Settings) -> Search:
    exclude = settings.exclude if options.exclude is None else tuple(options.exclude)
    force = options.force_exclude or settings.force_exclude
    return Search(exclude, force, options.stdin_filename or STDIN, options.follow_outside)


def _notes(linted: list[Linted], files: Iterable[str], search: Search) -> Iterator[str]:
    """Yield notes on the run other than findings."""
    if not linted and not search.force:
        yield f"warning: no DeepSpeed configuration in {', '.join(files)}"
    for result in linted:
        document, unread = result.source.document, result.source.unread
        if unread:
            yield f"note: {document.path}: {unread} is outside of the project, and was not read; see --follow-outside"
        try:
            check_codes(ignored_by_remarks(document), RULES, document.path)
        except ConfigError as error:
            yield f"warning: {error}"
    for framework, sign in _DETECTED_BY.items():
        paths = [result.source.path for result in linted if result.detected == framework]
        if paths:
            more = f" and {plural(len(paths) - 1, 'more file')}" if paths[1:] else ""
            yield f"note: {paths[0]}{more}: checked for {framework}, because of {sign}; --framework overrides this"


def _is_wrong(linted: list[Linted], options: argparse.Namespace, exit_on: str) -> bool:
    """Return True if a finding is at least as severe as `exit_on`, or if --diff shows a correction."""
    grave = SEVERITIES[: SEVERITIES.index(exit_on) + 1]
    found = any(one.severity in grave for result in linted for one in result.fixed.remaining)
    return found or (options.diff and any(result.changed for result in linted))


def _selection(options: argparse.Namespace, settings: Settings) -> Selection:
    for codes, place in (
        (options.select or (), "--select"),
        (options.ignore, "--ignore"),
        (settings.select or (), f"{settings.place}: select"),
        (settings.ignore, f"{settings.place}: ignore"),
        *((codes, f"{settings.place}: per-file-ignores") for codes in settings.per_file_ignores.values()),
    ):
        check_codes(codes, RULES, place)
    select = tuple(options.select or settings.select or Selection().select)
    return Selection(select, (*settings.ignore, *options.ignore), settings.per_file_ignores)


def _context(options: argparse.Namespace, settings: Settings) -> Context:
    return Context(
        world_size=options.world_size or settings.world_size,
        ranks_per_node=options.ranks_per_node or settings.ranks_per_node,
        framework=options.framework or settings.framework,
        model=None if options.model is None else read_config(options.model),
        gpu_memory=options.gpu_memory,
        bandwidth=options.bandwidth,
    )


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
    to_stdout = [result for result in linted if options.fix and result.source.from_stdin]
    for result in changed:
        if not result.source.from_stdin:
            _replace_content(Path(result.source.path), result.fixed.text.encode())
    for result in to_stdout:
        _print(result.fixed.text, sys.stdout)
    _report(linted, options, sys.stderr if to_stdout else sys.stdout)


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
        _print(lines(map(visible, text.split("\n"))) if sys.stdout.isatty() else text, sys.stdout)
    count = sum(result.fixed.count for result in changed)
    if not quiet:
        print(f"--fix would make {plural(count, 'correction')} in {plural(len(changed), 'file')}.", file=sys.stderr)


def _told(linted: Iterable[Linted], everything: bool) -> Iterator[Diagnostic]:
    """Yield the findings of a report: all of them if `everything` is set, otherwise a limited number per rule."""
    for result in linted:
        yield from result.fixed.remaining if everything else shortened(result.fixed.remaining)


def _report(linted: list[Linted], options: argparse.Namespace, stream: Any) -> None:
    fixed = sum(result.fixed.count for result in linted)
    colour = options.output_file is None and _has_colour(stream)
    report = Report(tuple(_told(linted, options.statistics)), len(linted), RULES, fixed, colour, options.quiet)
    text = render(report, "statistics" if options.statistics else options.output_format)
    if options.output_file is None:
        _print(text, stream)
    else:
        options.output_file.write_text(text, encoding="utf-8", errors="backslashreplace")


def _has_colour(stream: Any) -> bool:
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _print(text: str, stream: Any) -> None:
    """Write `text` with characters escaped that the stream's encoding cannot represent."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
