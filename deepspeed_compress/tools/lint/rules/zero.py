"""Rules on ZeRO: settings that contradict the stage, the optimizer or the number of ranks."""

import sys
from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, at, at_key, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import Context, accepts, raises, rule, unproved
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


@rule(
    code="DSC400",
    name="stage-range",
    severity="error",
    family="zero",
    summary="zero_optimization.stage is not 0, 1, 2 or 3.",
    reason="An enumeration (runtime/zero/config.py).",
    wrong=zero(4),
    right=zero(3),
    proof=raises("Input should be 0, 1, 2"),
)
def stage_range(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get(ZERO, "stage", default=0)
    if isinstance(value, list) and document.get("autotuning", "enabled") is True:
        return  # stages for the autotuner to try
    if not means_auto(value) and not isinstance(value, bool) and integer(value) not in (0, 1, 2, 3):
        yield Diagnostic(
            at(ZERO, "stage"), f"{show(value)} is no stage of ZeRO (allowed: 0, 1, 2, 3)", write("0, 1, 2 or 3")
        )


@rule(
    code="DSC401",
    name="zero-without-stage",
    severity="warning",
    family="zero",
    summary="zero_optimization has settings but no stage.",
    reason="The default stage is 0, which is no ZeRO at all (runtime/zero/config.py).",
    wrong=trained(zero_optimization={"overlap_comm": True}),
    right=zero(2, overlap_comm=True),
    proof=accepts("ZeRO is off"),
)
def zero_without_stage(document: Document, context: Context) -> Iterator[Diagnostic]:
    settings = section(document, ZERO)
    ours = document.get("deepspeed_compress", "parallelism", "zero_stage")
    # A misspelled "stage" has its own finding.
    meant = any(closest(key, {"stage": None}) for key in settings if key not in keys().sections[(ZERO,)].keys)
    if settings and "stage" not in settings and ours is None and not meant:
        yield Diagnostic(
            at_key(ZERO),
            'without "stage" ZeRO is off, and the other settings have no effect',
            write('"stage": 2 besides'),
        )


@rule(
    code="DSC409",
    name="hpz-divides-world",
    severity="error",
    family="zero",
    summary="zero_hpz_partition_size does not divide the number of ranks.",
    reason="The secondary groups must all have this size (utils/groups.py).",
    wrong=zero(3, zero_hpz_partition_size=2, also={"train_batch_size": 3}),
    right=zero(3, also={"train_batch_size": 3}),
    proof=raises("is not divisible by"),
    context={"world_size": 3},
)
def hpz_divides_world(document: Document, context: Context) -> Iterator[Diagnostic]:
    size, world = integer(document.get(ZERO, "zero_hpz_partition_size")), context.world_size
    if size is not None and size > 1 and world is not None and stage(document) == 3 and world % min(size, world):
        yield Diagnostic(
            at(ZERO, "zero_hpz_partition_size"), f"{size} does not divide {world} ranks", write("the ranks of one node")
        )


@rule(
    code="DSC410",
    name="hpz-exceeds-world",
    severity="warning",
    family="zero",
    summary="zero_hpz_partition_size is larger than the number of ranks.",
    reason="DeepSpeed takes the smaller of the two (utils/groups.py).",
    wrong=zero(3, zero_hpz_partition_size=4),
    right=zero(3, zero_hpz_partition_size=2),
    proof=accepts("another size than the one given is used"),
    context={"world_size": 2},
)
def hpz_exceeds_world(document: Document, context: Context) -> Iterator[Diagnostic]:
    size, world = integer(document.get(ZERO, "zero_hpz_partition_size")), context.world_size
    if size is not None and world is not None and size > world and stage(document) == 3:
        what = f"{size} is more than the {world} ranks of the job, and taken for {world}"
        yield Diagnostic(at(ZERO, "zero_hpz_partition_size"), what, write("the ranks of one node"))


@rule(
    code="DSC411",
    name="hpz-is-not-a-node",
    severity="warning",
    family="zero",
    summary="zero_hpz_partition_size is not the number of ranks of a node.",
    reason="Secondary partitions are there to gather weights inside a node (utils/groups.py).",
    wrong=zero(3, zero_hpz_partition_size=2),
    right=zero(3, zero_hpz_partition_size=4),
    proof=accepts("weights are gathered across nodes, or less memory is saved than possible"),
    context={"world_size": 4, "ranks_per_node": 4},
)
def hpz_is_not_a_node(document: Document, context: Context) -> Iterator[Diagnostic]:
    size, node = integer(document.get(ZERO, "zero_hpz_partition_size")), context.ranks_per_node
    if size is not None and size > 1 and node is not None and size != node and stage(document) == 3:
        what = f"{size} is not the {node} ranks of a node: secondary partitions cross nodes, or are larger than needed"
        yield Diagnostic(at(ZERO, "zero_hpz_partition_size"), what, write(str(node)))


@rule(
    code="DSC412",
    name="hpz-without-stage-3",
    severity="warning",
    family="zero",
    summary="zero_hpz_partition_size below stage 3.",
    reason="Only stage 3 partitions weights (runtime/engine.py).",
    wrong=zero(2, zero_hpz_partition_size=2),
    right=zero(2),
    proof=accepts("weights are not partitioned"),
)
def hpz_without_stage_3(document: Document, context: Context) -> Iterator[Diagnostic]:
    size = integer(document.get(ZERO, "zero_hpz_partition_size"))
    if size is not None and size > 1 and stage(document) in (0, 1, 2):
        what = f"{size} has no effect with stage {stage(document)} (useful: with stage 3)"
        yield Diagnostic(at(ZERO, "zero_hpz_partition_size"), what, write("1, or stage 3"))


@rule(
    code="DSC413",
    name="untested-optimizer",
    severity="error",
    family="zero",
    summary="An optimizer that ZeRO refuses unless told otherwise.",
    reason="ZeRO has a list of optimizers (runtime/zero/utils.py), which the engine asserts (runtime/engine.py).",
    wrong=config(optimizer={"type": "SGD", "params": {"lr": 0.1}}, zero_optimization={"stage": 1}),
    right=config(
        optimizer={"type": "SGD", "params": {"lr": 0.1}},
        zero_allow_untested_optimizer=True,
        zero_optimization={"stage": 1},
    ),
    proof=raises("You are using an untested ZeRO Optimizer"),
)
def untested_optimizer(document: Document, context: Context) -> Iterator[Diagnostic]:
    name = document.get("optimizer", "type")
    untested = {optimizer.lower() for optimizer in keys().untested_optimizers}
    # Inside zero_optimization the key is refused, which another rule reports.
    allowed = document.get("zero_allow_untested_optimizer") or document.has(ZERO, "zero_allow_untested_optimizer")
    if isinstance(name, str) and name.lower() in untested and stage(document) in (1, 2, 3) and not allowed:
        what = f"{show(name)} is not tested with ZeRO, which refuses it"
        yield Diagnostic(
            at("optimizer", "type"), what, write('"zero_allow_untested_optimizer": true besides, or "AdamW"')
        )


@rule(
    code="DSC414",
    name="zero-needs-optimizer",
    severity="info",
    family="zero",
    summary="Stage 1 or 2 without an optimizer in the file.",
    reason="The program must pass one, or the engine stops (runtime/engine.py). Hugging Face passes one.",
    wrong=config(zero_optimization={"stage": 1}),
    right=zero(1),
    proof=raises("requires an optimizer"),
    context={"framework": "deepspeed"},
)
def zero_needs_optimizer(document: Document, context: Context) -> Iterator[Diagnostic]:
    alone = context.framework == "deepspeed" and not document.has("optimizer")
    if alone and stage(document) in (1, 2):
        what = f'stage {stage(document)} needs an optimizer, and there is no "optimizer" here'
        yield Diagnostic(at(ZERO, "stage"), what, write('"optimizer": {...}, or pass one to deepspeed.initialize'))


@rule(
    code="DSC416",
    name="muon-with-reduce-scatter",
    severity="error",
    family="zero",
    summary="Muon with stage 3 and reduce_scatter.",
    reason="Muon orthogonalizes whole matrices (runtime/zero/stage3.py).",
    wrong=config(optimizer={"type": "Muon", "params": {"lr": 0.02}}, zero_optimization={"stage": 3}),
    right=config(
        optimizer={"type": "Muon", "params": {"lr": 0.02}},
        zero_optimization={"stage": 3, "reduce_scatter": False},
    ),
    proof=raises("Muon and reduce scatter cannot be used together"),
)
def muon_with_reduce_scatter(document: Document, context: Context) -> Iterator[Diagnostic]:
    scatters = truth(document.get(ZERO, "reduce_scatter", default=True)) is True
    if optimizer(document) == "muon" and stage(document) == 3 and scatters:
        what = '"Muon" needs whole gradients, and stage 3 scatters them'
        yield Diagnostic(at("optimizer", "type"), what, write('"reduce_scatter": false in zero_optimization'))


@rule(
    code="DSC417",
    name="odd-allgather-bucket",
    severity="error",
    family="zero",
    summary="allgather_bucket_size is odd.",
    reason="Buckets are aligned to four bytes (runtime/zero/stage_1_and_2.py).",
    wrong=zero(2, allgather_bucket_size=499999999),
    right=zero(2, allgather_bucket_size=500000000),
    proof=raises("allgather_bucket_size must be a multiple"),
)
def odd_allgather_bucket(document: Document, context: Context) -> Iterator[Diagnostic]:
    size = integer(document.get(ZERO, "allgather_bucket_size"))
    if size is not None and size % 2 and stage(document) in (1, 2):
        path = (ZERO, "allgather_bucket_size")
        correction = fix("Make it even", replace(document, path, size + 1))
        yield Diagnostic(at(*path), f"{size} is odd (allowed: even numbers)", write(str(size + 1)), fix=correction)


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
"""Keys of stage 3 with their defaults. Keys about saving a model are not included: below 3 nothing is partitioned."""


@rule(
    code="DSC423",
    name="stage-3-keys-below-stage-3",
    severity="info",
    family="zero",
    summary="Keys of stage 3 with stage 1 or 2.",
    reason="Only the optimizer of stage 3 is given these settings (runtime/engine.py).",
    wrong=zero(2, stage3_max_live_parameters=200000000),
    right=zero(3, stage3_max_live_parameters=200000000),
    proof=accepts("the keys have no effect"),
)
def stage_3_keys_below_stage_3(document: Document, context: Context) -> Iterator[Diagnostic]:
    """Report all non-default keys of stage 3 in one finding, because configurations for several stages are common."""
    given = section(document, ZERO).items()
    found = [key for key, value in given if value not in (_ONLY_STAGE_3.get(key, value), AUTO)]
    if found and stage(document) in (1, 2):
        what = f"{', '.join(found)} {'have' if len(found) > 1 else 'has'} no effect with stage {stage(document)}"
        yield Diagnostic(at_key(ZERO, found[0]), what, write("stage 3, or remove what belongs to it"))


@rule(
    code="DSC424",
    name="overlap-buffers",
    severity="warning",
    family="zero",
    summary="The two buffers of overlap_comm take much of the memory of the GPU.",
    reason=(
        "With overlap_comm one buffer of reduce_bucket_size is filled while the other travels "
        "(runtime/zero/stage_1_and_2.py), and both stay for the whole backward pass."
    ),
    wrong=zero(2, overlap_comm=True),
    right=zero(2, overlap_comm=True, reduce_bucket_size=50000000),
    proof=unproved("it takes a GPU with little memory"),
    context={"gpu_memory": 16 * 2**30},
)
def overlap_buffers(document: Document, context: Context) -> Iterator[Diagnostic]:
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
        yield Diagnostic(
            at(ZERO, "overlap_comm"), what, write(f'"reduce_bucket_size": {_less(size, needed, context.gpu_memory)}')
        )


def _less(size: int, needed: int, memory: int) -> int:
    """Return a round number of elements that takes at most a twentieth of the memory."""
    wanted = size * memory // (20 * needed)
    return next((step for step in (200_000_000, 100_000_000, 50_000_000, 20_000_000) if step <= wanted), 10_000_000)


def _left_open(document: Document) -> bool:
    return AUTO in (document.get("fp16", "enabled"), document.get("bf16", "enabled"))
