"""Rules of the linter, one module per family. Each check follows the texts of its rule."""

from deepspeed_compress.tools.lint.rule import LintRule
from deepspeed_compress.tools.lint.rules import (
    accelerate,
    auto,
    batch,
    hf,
    keys,
    lightning,
    norm,
    offload,
    optimizer,
    ours,
    pipeline,
    precision,
    reduction,
    removed,
    run,
    scaling,
    schedulers,
    silent,
    syntax,
    tensor,
    types,
    zero,
)
from deepspeed_compress.tools.rules import rules_of

_MODULES = (
    syntax,
    types,
    keys,
    removed,
    batch,
    precision,
    scaling,
    reduction,
    norm,
    zero,
    offload,
    optimizer,
    schedulers,
    pipeline,
    tensor,
    auto,
    hf,
    accelerate,
    lightning,
    silent,
    ours,
    run,
)

RULES: tuple[LintRule, ...] = tuple(sorted(rules_of(_MODULES, LintRule), key=lambda rule: rule.code))
