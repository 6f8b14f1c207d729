"""Check whether a number of ranks can train the same batches, by the rules of DeepSpeed's runtime/config.py."""

import math
from collections.abc import Mapping
from typing import Any

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.native import TENSOR

BATCH, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def size_problem(ds_config: Mapping[str, Any] | None, ranks: int) -> str:
    """Return why `ranks` ranks cannot train the batches that `ds_config` specifies; "" if they can.

    `ds_config` is None if it is unknown.
    """
    if ds_config is None:
        return f"the program's arguments contain no DeepSpeed configuration with {BATCH}"
    batch = ds_config.get(BATCH)
    if not isinstance(batch, int):
        return f"/{BATCH} is {batch!r}, so another number of ranks would train other batches; write a number"
    copies, rest = divmod(ranks, _ranks_of_a_copy(ds_config))
    if rest or not copies:
        return f"{ranks} ranks are not a multiple of tensor x pipeline = {_ranks_of_a_copy(ds_config)}"
    given = {key: ds_config[key] for key in (MICRO, STEPS) if isinstance(ds_config.get(key), int)}
    product = copies * math.prod(given.values())
    if batch % product == 0 and (len(given) < 2 or batch == product):
        return ""
    factors = " x ".join(f"{key} {value}" for key, value in given.items()) or "1"
    advice = f"; leave out {STEPS}" if len(given) == 2 else ""
    return f"/{BATCH} {batch} is not divisible by {copies} replicas x {factors}{advice}"


def _ranks_of_a_copy(ds_config: Mapping[str, Any]) -> int:
    """Return the number of ranks that hold one copy of the model's layers."""
    section = parse_section(dict(ds_config)) if SECTION in ds_config else None
    parallelism = section.parallelism if section is not None else None
    return TENSOR.effective(ds_config, parallelism or Parallelism()) * (parallelism.pipeline if parallelism else 1)
