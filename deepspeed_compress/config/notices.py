"""Settings that are valid and have no effect, or cost more than they give."""

import re
from collections.abc import Iterator

from deepspeed_compress.config.models import SECTION, CompressConfig, NoneConfig, TopKConfig
from deepspeed_compress.config.problems import Problem, pointer, show

# A pattern that is found in all of these is found in every name.
_ANY_NAMES = ("", "a", "0.b_1")


def find_notices(section: CompressConfig) -> list[Problem]:
    """What `section` sets to no effect; empty for the defaults."""
    return [notice for rule in _RULES for notice in rule(section)]


def _notice(path: str, what: str, write: str) -> Problem:
    return Problem(pointer((SECTION, *path.split("."))), what, write)


def _warmup_of_nothing(section: CompressConfig) -> Iterator[Problem]:
    steps = section.schedule.warmup_steps
    if steps and isinstance(section.gradients, NoneConfig):
        what = f'{steps} has no effect, because method "none" never compresses (allowed: 0)'
        yield _notice("schedule.warmup_steps", what, "0, or choose a method")


def _seed_unused(section: CompressConfig) -> Iterator[Problem]:
    users = (section.gradients, getattr(section.gradients, "values", None))
    random = any(getattr(user, "rounding", None) == "stochastic" for user in users)
    if section.seed and not random:
        what = f"{section.seed} has no effect, because nothing is rounded stochastically (allowed: 0)"
        yield _notice("seed", what, '0, or "rounding": "stochastic"')


def _dense_topk(section: CompressConfig) -> Iterator[Problem]:
    topk = section.gradients
    if not isinstance(topk, TopKConfig):
        return
    if topk.density == 1:
        what = "1.0 drops nothing and sends an index with every value (useful: below 0.5)"
        yield _notice("gradients.density", what, 'a smaller density, or "method": "blockwise"')
    elif topk.density * topk.block_size < 1:
        what = (
            f"{topk.density} of block_size {topk.block_size} is less than one value, but one is always sent "
            f"(useful: at least {1 / topk.block_size})"
        )
        yield _notice("gradients.density", what, "a larger density or a larger block_size")


def _overrides(section: CompressConfig) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, override in enumerate(getattr(section.gradients, "overrides", ())):
        path = f"gradients.overrides.{index}.parameters"
        pattern = override.parameters
        if pattern in seen:
            yield _notice(path, f"{show(pattern)} has no effect, an earlier override has it", "it once")
        elif all(re.search(pattern, name) for name in _ANY_NAMES):
            what = f"{show(pattern)} matches every parameter, so that nothing is compressed"
            yield _notice(path, what, 'a narrower pattern, or "method": "none" for all gradients')
        seen.add(pattern)


_RULES = (_warmup_of_nothing, _seed_unused, _dense_topk, _overrides)
