"""The colours of a report, for light and for dark pages, by what they stand for."""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["COLOURS", "css_variables", "light"]

COLOURS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
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
        "red": ("#cf222e", "#f85149"),
    }
)


def light(name: str) -> str:
    """The colour on white paper, for the picture."""
    return COLOURS[name][0]


def css_variables(dark: bool) -> str:
    """All colours as CSS variables: --NAME."""
    return " ".join(f"--{name}: {pair[dark]};" for name, pair in COLOURS.items())
