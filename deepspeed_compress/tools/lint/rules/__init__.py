"""Rules of the linter, one module per family. Each check follows the texts of its rule."""

from importlib import import_module
from pkgutil import iter_modules

from deepspeed_compress.tools.lint.rule import LintRule

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]
_FOUND = [value for module in _MODULES for value in vars(module).values() if isinstance(value, LintRule)]

RULES: tuple[LintRule, ...] = tuple(sorted(_FOUND, key=lambda rule: rule.code))
