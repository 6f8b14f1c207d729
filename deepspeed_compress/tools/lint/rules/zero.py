"""ZeRO: settings that contradict the stage, the optimizer, or the number of ranks."""

import sys
from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, replace
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises, unproved
from deepspeed_compress.tools.lint.rules.common import (
    AUTO,
    ZERO,
    bf16,
    config,
    fp16,
    integer,
    is_true,
    means_auto,
    optimizer,
    section,
    show,
    stage,
    trained,
    truth,
    zero,
)

_FAMILY = "zero"


def _stage_range(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get(ZERO, "stage", default=0)
    if isinstance(value, list) and document.get("autotuning", "enabled") is True:
        return  # the stages that the autotuner tries
    if not means_auto(value) and not isinstance(value, bool) and integer(value) not in (0, 1, 2, 3):
        yield Hit((ZERO, "stage"), f"{show(value)} is no stage of ZeRO (allowed: 0, 1, 2, 3)", "0, 1, 2 or 3")


def _no_stage(document: Document, context: Context) -> Iterator[Hit]:
    settings = section(document, ZERO)
    ours = document.get("deepspeed_compress", "parallelism", "zero_stage")
    # A key that is probably the stage, misspelled, has a finding of its own.
    meant = any(closest(key, {"stage": None}) for key in settings if key not in keys().sections[(ZERO,)].keys)
    if settings and "stage" not in settings and ours is None and not meant:
        yield Hit(
            (ZERO,), 'without "stage" ZeRO is off, and the other settings have no effect', '"stage": 2 besides', "key"
        )


def _hpz(document: Document, context: Context) -> Iterator[Hit]:
    size, world = integer(document.get(ZERO, "zero_hpz_partition_size")), context.world_size
    if size is not None and size > 1 and world is not None and stage(document) == 3 and world % min(size, world):
        yield Hit((ZERO, "zero_hpz_partition_size"), f"{size} does not divide {world} ranks", "the ranks of one node")


def _hpz_clipped(document: Document, context: Context) -> Iterator[Hit]:
    size, world = integer(document.get(ZERO, "zero_hpz_partition_size")), context.world_size
    if size is not None and world is not None and size > world and stage(document) == 3:
        what = f"{size} is more than the {world} ranks of the job, and taken for {world}"
        yield Hit((ZERO, "zero_hpz_partition_size"), what, "the ranks of one node")


def _hpz_node(document: Document, context: Context) -> Iterator[Hit]:
    size, node = integer(document.get(ZERO, "zero_hpz_partition_size")), context.ranks_per_node
    if size is not None and size > 1 and node is not None and size != node and stage(document) == 3:
        what = f"{size} is not the {node} ranks of a node: secondary partitions cross nodes, or are larger than needed"
        yield Hit((ZERO, "zero_hpz_partition_size"), what, str(node))


def _hpz_stage(document: Document, context: Context) -> Iterator[Hit]:
    size = integer(document.get(ZERO, "zero_hpz_partition_size"))
    if size is not None and size > 1 and stage(document) in (0, 1, 2):
        what = f"{size} has no effect with stage {stage(document)} (useful: with stage 3)"
        yield Hit((ZERO, "zero_hpz_partition_size"), what, "1, or stage 3")


def _untested(document: Document, context: Context) -> Iterator[Hit]:
    name = document.get("optimizer", "type")
    untested = {optimizer.lower() for optimizer in keys().untested_optimizers}
    # Inside zero_optimization it is refused, which another rule says.
    allowed = document.get("zero_allow_untested_optimizer") or document.has(ZERO, "zero_allow_untested_optimizer")
    if isinstance(name, str) and name.lower() in untested and stage(document) in (1, 2, 3) and not allowed:
        what = f"{show(name)} is not tested with ZeRO, which refuses it"
        yield Hit(("optimizer", "type"), what, '"zero_allow_untested_optimizer": true besides, or "AdamW"')


def _no_optimizer(document: Document, context: Context) -> Iterator[Hit]:
    alone = context.framework == "deepspeed" and not document.has("optimizer")
    if alone and stage(document) in (1, 2):
        what = f'stage {stage(document)} needs an optimizer, and there is no "optimizer" here'
        yield Hit((ZERO, "stage"), what, '"optimizer": {...}, or pass one to deepspeed.initialize')


def _muon(document: Document, context: Context) -> Iterator[Hit]:
    scatters = truth(document.get(ZERO, "reduce_scatter", default=True)) is True
    if optimizer(document) == "muon" and stage(document) == 3 and scatters:
        what = '"Muon" needs whole gradients, and stage 3 scatters them'
        yield Hit(("optimizer", "type"), what, '"reduce_scatter": false in zero_optimization')


def _odd_bucket(document: Document, context: Context) -> Iterator[Hit]:
    size = integer(document.get(ZERO, "allgather_bucket_size"))
    if size is not None and size % 2 and stage(document) in (1, 2):
        path = (ZERO, "allgather_bucket_size")
        correction = fix("Make it even", replace(document, path, size + 1))
        yield Hit(path, f"{size} is odd (allowed: even numbers)", str(size + 1), fix=correction)


_BUCKET = 500_000_000
_ONLY_STAGE_3 = {
    "sub_group_size": 1_000_000_000,
    "memory_efficient_linear": True,
    "module_granularity_threshold": 0,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_model_persistence_threshold": sys.maxsize,
    "stage3_module_granularity_threshold": 0,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
}
"""Keys of stage 3, and their defaults. How a model is saved is no matter of the stage: nothing is in parts below 3."""


def _stage3_keys(document: Document, context: Context) -> Iterator[Hit]:
    """One finding for all keys of stage 3 that ask for something: configurations for several stages are common."""
    given = section(document, ZERO).items()
    found = [key for key, value in given if value not in (_ONLY_STAGE_3.get(key, value), AUTO)]
    if found and stage(document) in (1, 2):
        what = f"{', '.join(found)} {'have' if len(found) > 1 else 'has'} no effect with stage {stage(document)}"
        yield Hit((ZERO, found[0]), what, "stage 3, or remove what belongs to it", "key")


def _double_buffers(document: Document, context: Context) -> Iterator[Hit]:
    size = integer(document.get(ZERO, "reduce_bucket_size", default=_BUCKET))
    contiguous = truth(document.get(ZERO, "contiguous_gradients", default=True)) is True
    doubled = contiguous and is_true(document, ZERO, "overlap_comm") and stage(document) in (1, 2)
    if context.gpu_memory is None or size is None or not doubled:
        return
    needed = 2 * size * (2 if fp16(document) or bf16(document) or _left_open(document) else 4)
    if 10 * needed > context.gpu_memory:
        what = (
            f"overlap_comm keeps two buffers of reduce_bucket_size {size}: {needed / 2**30:.1f} GiB of "
            f"{context.gpu_memory / 2**30:.0f}"
        )
        yield Hit((ZERO, "overlap_comm"), what, f'"reduce_bucket_size": {_less(size, needed, context.gpu_memory)}')


def _less(size: int, needed: int, memory: int) -> int:
    """A round number of elements that takes a twentieth of the memory at most."""
    wanted = size * memory // (20 * needed)
    return next((step for step in (200_000_000, 100_000_000, 50_000_000, 20_000_000) if step <= wanted), 10_000_000)


def _left_open(document: Document) -> bool:
    return AUTO in (document.get("fp16", "enabled"), document.get("bf16", "enabled"))


RULES = (
    Rule(
        "DSC400",
        "stage-range",
        "error",
        _FAMILY,
        "zero_optimization.stage is not 0, 1, 2 or 3.",
        "An enumeration (runtime/zero/config.py).",
        zero(4),
        zero(3),
        _stage_range,
        raises("Input should be 0, 1, 2"),
    ),
    Rule(
        "DSC401",
        "zero-without-stage",
        "warning",
        _FAMILY,
        "zero_optimization has settings but no stage.",
        "The default stage is 0, which is no ZeRO at all (runtime/zero/config.py).",
        trained(zero_optimization={"overlap_comm": True}),
        zero(2, overlap_comm=True),
        _no_stage,
        accepts("ZeRO is off"),
    ),
    Rule(
        "DSC409",
        "hpz-divides-world",
        "error",
        _FAMILY,
        "zero_hpz_partition_size does not divide the number of ranks.",
        "The secondary groups must all have this size (utils/groups.py).",
        zero(3, zero_hpz_partition_size=2, also={"train_batch_size": 3}),
        zero(3, also={"train_batch_size": 3}),
        _hpz,
        raises("is not divisible by"),
        {"world_size": 3},
    ),
    Rule(
        "DSC410",
        "hpz-exceeds-world",
        "warning",
        _FAMILY,
        "zero_hpz_partition_size is larger than the number of ranks.",
        "DeepSpeed takes the smaller of the two (utils/groups.py).",
        zero(3, zero_hpz_partition_size=4),
        zero(3, zero_hpz_partition_size=2),
        _hpz_clipped,
        accepts("another size than the one given is used"),
        {"world_size": 2},
    ),
    Rule(
        "DSC411",
        "hpz-is-not-a-node",
        "warning",
        _FAMILY,
        "zero_hpz_partition_size is not the number of ranks of a node.",
        "Secondary partitions are there to gather weights inside a node (utils/groups.py).",
        zero(3, zero_hpz_partition_size=2),
        zero(3, zero_hpz_partition_size=4),
        _hpz_node,
        accepts("weights are gathered across nodes, or less memory is saved than possible"),
        {"world_size": 4, "ranks_per_node": 4},
    ),
    Rule(
        "DSC412",
        "hpz-without-stage-3",
        "warning",
        _FAMILY,
        "zero_hpz_partition_size below stage 3.",
        "Only stage 3 partitions weights (runtime/engine.py).",
        zero(2, zero_hpz_partition_size=2),
        zero(2),
        _hpz_stage,
        accepts("weights are not partitioned"),
    ),
    Rule(
        "DSC413",
        "untested-optimizer",
        "error",
        _FAMILY,
        "An optimizer that ZeRO refuses unless told otherwise.",
        "ZeRO has a list of optimizers (runtime/zero/utils.py), which the engine asserts (runtime/engine.py).",
        config(optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_optimization={"stage": 1}),
        config(
            optimizer={"type": "SGD", "params": {"lr": 0.1}},
            zero_allow_untested_optimizer=True,
            zero_optimization={"stage": 1},
        ),
        _untested,
        raises("You are using an untested ZeRO Optimizer"),
    ),
    Rule(
        "DSC414",
        "zero-needs-optimizer",
        "info",
        _FAMILY,
        "Stage 1 or 2 without an optimizer in the file.",
        "The program must pass one, or the engine stops (runtime/engine.py). Hugging Face passes one.",
        config(zero_optimization={"stage": 1}),
        zero(1),
        _no_optimizer,
        raises("requires an optimizer"),
        {"framework": "deepspeed"},
    ),
    Rule(
        "DSC416",
        "muon-with-reduce-scatter",
        "error",
        _FAMILY,
        "Muon with stage 3 and reduce_scatter.",
        "Muon orthogonalizes whole matrices (runtime/zero/stage3.py).",
        config(optimizer={"type": "Muon", "params": {"lr": 0.02}}, zero_optimization={"stage": 3}),
        config(
            optimizer={"type": "Muon", "params": {"lr": 0.02}},
            zero_optimization={"stage": 3, "reduce_scatter": False},
        ),
        _muon,
        raises("Muon and reduce scatter cannot be used together"),
    ),
    Rule(
        "DSC417",
        "odd-allgather-bucket",
        "error",
        _FAMILY,
        "allgather_bucket_size is odd.",
        "Buckets are aligned to four bytes (runtime/zero/stage_1_and_2.py).",
        zero(2, allgather_bucket_size=499999999),
        zero(2, allgather_bucket_size=500000000),
        _odd_bucket,
        raises("allgather_bucket_size must be a multiple"),
    ),
    Rule(
        "DSC423",
        "stage-3-keys-below-stage-3",
        "info",
        _FAMILY,
        "Keys of stage 3 with stage 1 or 2.",
        "Only the optimizer of stage 3 is given these settings (runtime/engine.py).",
        zero(2, stage3_max_live_parameters=200000000),
        zero(3, stage3_max_live_parameters=200000000),
        _stage3_keys,
        accepts("the keys have no effect"),
    ),
    Rule(
        "DSC424",
        "overlap-buffers",
        "warning",
        _FAMILY,
        "The two buffers of overlap_comm take much of the memory of the GPU.",
        "With overlap_comm one buffer of reduce_bucket_size is filled while the other travels "
        "(runtime/zero/stage_1_and_2.py), and both stay for the whole backward pass.",
        zero(2, overlap_comm=True),
        zero(2, overlap_comm=True, reduce_bucket_size=50000000),
        _double_buffers,
        unproved("it takes a GPU with little memory"),
        {"gpu_memory": 16 * 2**30},
    ),
)
