"""The command `ds-compress lint`."""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.lint.document import Document
from deepspeed_compress.lint.files import STDIN, Source, sources
from deepspeed_compress.lint.finding import Finding
from deepspeed_compress.lint.fixes import Fixed, apply, diff
from deepspeed_compress.lint.outputs import Report, plural, render
from deepspeed_compress.lint.rule import Context
from deepspeed_compress.lint.rules import RULES
from deepspeed_compress.lint.runner import lint_document
from deepspeed_compress.lint.selection import Selection, check_codes
from deepspeed_compress.lint.settings import Settings, find_settings

CLEAN, FOUND, FAILED = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Linted:
    """A file, and what is wrong with it, after the fixes that were asked for."""

    source: Source
    fixed: Fixed

    @property
    def changed(self) -> bool:
        return self.fixed.text != self.source.document.text


def run(options: argparse.Namespace) -> int:
    """Lint, and give the exit code: 0 clean, 1 findings, 2 wrong usage or an internal error."""
    try:
        return _run(options)
    except (CompressError, OSError) as error:
        print(f"ds-compress: error: {error}", file=sys.stderr)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        print(
            f"ds-compress: internal error: {type(error).__name__}: {error} ({where.filename}:{where.lineno}). "
            "Please report it with the file that was read.",
            file=sys.stderr,
        )
    return FAILED


def _run(options: argparse.Namespace) -> int:
    if options.unsafe_fixes and not (options.fix or options.diff):
        raise ConfigError("--unsafe-fixes has no effect alone. Write it together with --fix or --diff.")
    if options.diff and options.output_file is not None:
        raise ConfigError("--output-file has no effect with --diff. Write > FILE to keep the difference.")
    settings = find_settings(Path.cwd())
    selection, context = _selection(options, settings), _context(options, settings)
    linted = [
        _lint(source, context, selection, options)
        for source in sources(options.files, settings.exclude, sys.stdin.buffer)
    ]
    if not linted:
        print(f"ds-compress: warning: no DeepSpeed configuration in {', '.join(options.files)}", file=sys.stderr)
    wrong = _write(linted, options)
    return CLEAN if options.exit_zero or not wrong else FOUND


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
        model=None if options.model is None else read_model(options.model),
        gpu_memory=options.gpu_memory,
        bandwidth=options.bandwidth,
    )


def read_model(path: Path) -> dict[str, Any]:
    """Content of the config.json of a Hugging Face model, given as a file or its directory."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"not JSON: {error}"
        raise ConfigError(f"--model {file}: {reason}. Write the config.json of a model, or its directory.") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {file}: {type(config).__name__} (allowed: an object). Write a model's config.json.")
    return config


def _lint(source: Source, context: Context, selection: Selection, options: argparse.Namespace) -> Linted:
    known = replace(context, **{key: value for key, value in source.hints.items() if getattr(context, key) is None})

    def lint(document: Document) -> Iterable[Finding]:
        return lint_document(document, known, selection)

    if options.fix or options.diff:
        return Linted(source, apply(source.document, lint, options.unsafe_fixes))
    return Linted(source, Fixed(source.document, 0, tuple(lint(source.document))))


def _write(linted: list[Linted], options: argparse.Namespace) -> bool:
    """Write corrections, differences and findings; whether anything is (or, with --diff, was) wrong."""
    changed = [result for result in linted if result.changed]
    if options.diff:
        _show_differences(changed)
        return bool(changed) or any(result.fixed.remaining for result in linted)
    to_stdout = [result for result in linted if options.fix and result.source.path == STDIN]
    for result in changed:
        if result.source.path != STDIN:
            Path(result.source.path).write_bytes(result.fixed.text.encode())
    for result in to_stdout:
        _print(result.fixed.text, sys.stdout)
    findings = tuple(_findings(linted))
    stream = sys.stderr if to_stdout else sys.stdout
    _report(findings, linted, options, stream)
    return bool(findings)


def _show_differences(changed: list[Linted]) -> None:
    for result in changed:
        _print(diff(result.source.document.text, result.fixed.text, result.source.path), sys.stdout)
    count = sum(result.fixed.count for result in changed)
    print(f"--fix would make {plural(count, 'correction')} in {plural(len(changed), 'file')}.", file=sys.stderr)


def _findings(linted: Iterable[Linted]) -> Iterator[Finding]:
    for result in linted:
        yield from result.fixed.remaining


def _report(findings: tuple[Finding, ...], linted: list[Linted], options: argparse.Namespace, stream: Any) -> None:
    fixed = sum(result.fixed.count for result in linted)
    colour = options.output_file is None and _has_colour(stream)
    text = render(Report(findings, len(linted), RULES, fixed, colour), options.output_format)
    if options.output_file is None:
        _print(text, stream)
    else:
        options.output_file.write_text(text, encoding="utf-8", errors="backslashreplace")


def _has_colour(stream: Any) -> bool:
    return bool(stream.isatty()) and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _print(text: str, stream: Any) -> None:
    """Write `text`; characters that the terminal cannot show are escaped."""
    encoding = getattr(stream, "encoding", None) or "utf-8"
    stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
