"""Rules of the linter, one module per family. Each check follows the texts of its rule."""

from importlib import import_module
from pkgutil import iter_modules

from deepspeed_compress.tools.lint.rule import LintRule
from deepspeed_compress.tools.outputs.report import rules_of

_MODULES = [import_module(f"{__name__}.{module.name}") for module in iter_modules(__path__)]

RULES: tuple[LintRule, ...] = tuple(sorted(rules_of(_MODULES, LintRule), key=lambda rule: rule.code))
