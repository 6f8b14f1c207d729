"""How findings are written: one module a format, all with `render`."""

from collections.abc import Callable
from importlib import import_module

from deepspeed_compress.tools.lint.outputs.report import Report, plural

__all__ = ["Report", "plural", "render"]


def render(report: Report, name: str) -> str:
    """`report` in the format `name`. Only its module is loaded."""
    module = import_module(f"deepspeed_compress.tools.lint.outputs.as_{name}")
    function: Callable[[Report], str] = module.render
    return function(report)
