"""Appearance of a report: colors, the page skeleton, its style sheet and its script."""

from collections.abc import Mapping
from pathlib import Path

COLOURS: Mapping[str, tuple[str, str]] = {
    "paper": ("#ffffff", "#0d1117"),
    "card": ("#f6f8fa", "#161b22"),
    "ink": ("#1f2328", "#e6edf3"),
    "muted": ("#59636e", "#9198a1"),
    "rule": ("#d8dee4", "#30363d"),
    "run": ("#1f6feb", "#58a6ff"),
    "baseline": ("#a3adb8", "#6e7681"),
    "run-soft": ("#a5c8ff", "#1f4e8c"),
    "green": ("#2da44e", "#3fb950"),
    "yellow": ("#d4a72c", "#d29922"),
    "orange": ("#e16f24", "#db6d28"),
    "purple": ("#8250df", "#a371f7"),
    "cyan": ("#1b7c83", "#39c5cf"),
    "brown": ("#953800", "#bc6c25"),
    "red": ("#cf222e", "#f85149"),
}


def light(name: str) -> str:
    """Return the color for a white background, as used in the picture."""
    return COLOURS[name][0]


def css_variables(dark: bool) -> str:
    """Return all colors as CSS variables named `--NAME`."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())


def stylesheet() -> str:
    """Return the style sheet of a page: the colors for light and dark screens, and page.css."""
    light_colours, dark_colours = css_variables(dark=False), css_variables(dark=True)
    return (
        f":root {{ color-scheme: light dark; {light_colours} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark_colours} }} }}\n{_asset('page.css')}"
    )


def script() -> str:
    """Return page.js, which shows the figures under the pointer."""
    return _asset("page.js")


def _asset(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title><style>
{style}</style></head><body>
<header><h1>{title}</h1>{status}</header>
{sections}
<script>
{script}</script></body></html>
"""
