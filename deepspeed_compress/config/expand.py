"""Expansion of the section's parallelism into DeepSpeed's own keys, and its agreement with their values."""

import copy
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.contradictions import find_mismatches
from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.native import NATIVE_KEYS, STAGE, TENSOR, NativeKey, value_at
from deepspeed_compress.config.problems import problem, raise_problems, show
from deepspeed_compress.diagnostics import Diagnostic, at, pointer, write
from deepspeed_compress.errors import CompressWarning


def expand(ds_config: Mapping[str, Any], section: CompressConfig) -> dict[str, Any]:
    """Return a copy of `ds_config` with the section's parallelism in DeepSpeed's own keys.

    The section itself stays.

    Raises:
        ConfigError: if a value given in both places differs, if pipeline parallelism is combined with ZeRO stage 2 or
            3, or if a method contradicts the rest of the file (see `find_mismatches`).
    """
    parallelism = section.parallelism or Parallelism()
    problems = find_conflicts(ds_config, parallelism) + find_mismatches(ds_config, section)
    if problems:
        raise_problems(problems)
    expanded = copy.deepcopy(dict(ds_config))
    for native in NATIVE_KEYS:
        value = native.given(parallelism)
        if value is not None and (native is not TENSOR or _uses_autotp(parallelism)):
            expanded.setdefault(native.section, {})[native.key] = value
    if _may_overlap(expanded, section):
        expanded["zero_optimization"].setdefault("overlap_comm", True)
    return expanded


def _may_overlap(ds_config: Mapping[str, Any], section: CompressConfig) -> bool:
    """Return True if DeepSpeed's streams can reduce during backward and every program stays correct.

    Not under ZeRO 1: there `overlap_comm` reduces only what the last micro-step has gradients of, each once.
    """
    zero, pipeline = ds_config.get("zero_optimization"), (section.parallelism or Parallelism()).pipeline
    return (
        section.gradients.method != "none"
        and isinstance(zero, dict)
        and STAGE.effective(ds_config, Parallelism()) == 2
        and zero.get("contiguous_gradients", True) is True
        and pipeline == 1
        and value_at(zero, ("offload_optimizer", "device")) in (None, "none")
        and ds_config.get("managed_gradient_accumulation", True) is True
    )


def _uses_autotp(parallelism: Parallelism) -> bool:
    """Return True if DeepSpeed must be told of tensor parallelism.

    DeepSpeed would treat a size of 1 as tensor parallelism, and a pipeline as a plain model.
    """
    return parallelism.tensor > 1 and parallelism.pipeline == 1


def check_world(section: CompressConfig, world_size: int, ds_config: Mapping[str, Any] | None = None) -> int:
    """Return the data-parallel size of `world_size` ranks.

    DeepSpeed's own tensor-parallel size in `ds_config` is used if the section gives none. Issues a CompressWarning if
    one rank remains, which has nothing to exchange.

    Raises:
        ConfigError: if tensor x pipeline does not divide `world_size`.
    """
    parallelism = section.parallelism or Parallelism()
    problems = list(_indivisible(ds_config or {}, parallelism, world_size))
    if problems:
        raise_problems(problems)
    size = world_size // (TENSOR.effective(ds_config or {}, parallelism) * parallelism.pipeline)
    if section.islands is not None and section.islands.size is not None:
        size = section.islands.size
    if isinstance(parallelism.shard_within, int):
        # Only nodes exchange what the section compresses.
        size //= parallelism.shard_within
    for key in ("gradients", "weights"):
        if size == 1 and getattr(section, key).method != "none":
            text = f"{pointer((SECTION, key))}: compression has no effect, because the data-parallel size is 1"
            warnings.warn(f'{text}. Write "method": "none", or start more ranks.', CompressWarning, stacklevel=2)
    return size


def find_conflicts(
    ds_config: Mapping[str, Any], parallelism: Parallelism, world_size: int | None = None
) -> list[Diagnostic]:
    """Return contradictions of the parallelism with DeepSpeed's keys, DeepSpeed's rules, or the number of ranks."""
    problems = [p for native in NATIVE_KEYS for p in _disagreement(native, ds_config, parallelism)]
    problems += _pipeline_with_partition(ds_config, parallelism)
    problems += _pipeline_with_autotp(ds_config, parallelism)
    return problems + ([] if world_size is None else list(_indivisible(ds_config, parallelism, world_size)))


def _disagreement(native: NativeKey, ds_config: Mapping[str, Any], parallelism: Parallelism) -> Iterator[Diagnostic]:
    ours, theirs = native.given(parallelism), native.native(ds_config)
    outer = ds_config.get(native.section, {})
    if ours is None:
        return
    if not isinstance(outer, dict):
        what = f"{ours} cannot be combined with {pointer((native.section,))}: {show(outer)} (allowed: an object)"
        instead = f'"{native.section}": {{"{native.key}": {ours}}}'
        yield Diagnostic(at(*native.ours), what, write(instead))
    elif theirs is not None and not _same(ours, theirs, native.off):
        what = f"{ours} disagrees with {pointer(native.theirs)}: {show(theirs)} (allowed: the same value)"
        instead = f"the value in one of the two places only, or {ours} in both"
        yield Diagnostic(at(*native.ours), what, write(instead))


def _same(ours: int, theirs: object, off: int) -> bool:
    return isinstance(theirs, int) and not isinstance(theirs, bool) and max(theirs, off) == ours


def _pipeline_with_partition(ds_config: Mapping[str, Any], parallelism: Parallelism) -> Iterator[Diagnostic]:
    stage = STAGE.effective(ds_config, parallelism)
    if parallelism.pipeline > 1 and stage >= 2:
        what = (
            f"{stage} cannot be combined with {pointer((SECTION, 'parallelism', 'pipeline'))}: "
            f"{parallelism.pipeline} (allowed with a pipeline: 0, 1)"
        )
        yield Diagnostic(at(*STAGE.place(parallelism)), what, write('0 or 1, or "pipeline": 1'))


def _pipeline_with_autotp(ds_config: Mapping[str, Any], parallelism: Parallelism) -> Iterator[Diagnostic]:
    """Check that DeepSpeed's own tensor parallelism is off, because its groups would ignore pipeline stages."""
    size = TENSOR.native(ds_config)
    if parallelism.pipeline > 1 and isinstance(size, int) and size > 1:
        what = (
            f"{size} cannot be combined with {pointer((SECTION, 'parallelism', 'pipeline'))}: {parallelism.pipeline} "
            "(allowed with a pipeline: 0)"
        )
        instead = f'0, and "tensor": {size} in {pointer((SECTION, "parallelism"))}'
        yield Diagnostic(at(*TENSOR.theirs), what, write(instead))


def _indivisible(ds_config: Mapping[str, Any], parallelism: Parallelism, world_size: int) -> Iterator[Diagnostic]:
    tensor, pipeline = TENSOR.effective(ds_config, parallelism), parallelism.pipeline
    if world_size < 1 or world_size % (tensor * pipeline):
        what = (
            f"tensor {tensor} x pipeline {pipeline} = {tensor * pipeline} ranks do not divide the world size "
            f"{world_size} (allowed: divisors of the world size)"
        )
        instead = f"other values, or start a multiple of {tensor * pipeline} ranks"
        yield problem(("parallelism",), what, instead)
