"""The rules: a module for each family, with a table at its end."""

from deepspeed_compress.tools.lint.rule import Rule
from deepspeed_compress.tools.lint.rules import (
    accelerate,
    auto,
    batch,
    hf,
    keys,
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
    silent,
    ours,
    run,
)

RULES: tuple[Rule, ...] = tuple(
    sorted((rule for module in _MODULES for rule in module.RULES), key=lambda rule: rule.code)
)
