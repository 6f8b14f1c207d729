"""Rules on ZeRO and offloading: settings that contradict the stage, the optimizer or the number of ranks."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import ZERO, Context, Findings, corrected, finding, key_finding, rule
from deepspeed_compress.tools.lint.values import integer, means_auto, show


@rule("DSC400", "error")
def stage_range(document: Document, context: Context) -> Findings:
    """zero_optimization.stage is not 0, 1, 2 or 3.

    The stage is an enumeration (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 4}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}}
    Proof: raises Input should be 0, 1, 2
    """
    value = document.get(ZERO, "stage", default=0)
    if isinstance(value, list) and document.get("autotuning", "enabled") is True:
        return  # stages for the autotuner to try
    if not means_auto(value) and not isinstance(value, bool) and integer(value) not in (0, 1, 2, 3):
        yield finding((ZERO, "stage"), f"{show(value)} is not a ZeRO stage (allowed: 0, 1, 2, 3)", "0, 1, 2 or 3")


@rule("DSC401", "warning")
def zero_without_stage(document: Document, context: Context) -> Findings:
    """zero_optimization has settings but no stage.

    The default stage is 0, which turns ZeRO off (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"overlap_comm": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "overlap_comm": true}}
    Proof: accepts ZeRO is off
    """
    settings = document.section(ZERO)
    ours = document.get("deepspeed_compress", "parallelism", "zero_stage")
    # A misspelled "stage" has its own finding.
    meant = any(closest(key, ["stage"]) for key in settings if key not in keys().sections[(ZERO,)].keys)
    if settings and "stage" not in settings and ours is None and not meant:
        what = 'without "stage" ZeRO is off, and the other settings have no effect'
        yield key_finding((ZERO,), what, '"stage": 2 as well')


HPZ = (ZERO, "zero_hpz_partition_size")


def secondary_size(document: Document) -> int:
    """Return the size of secondary partitions, or 1 if there are none."""
    return max(document.integer(*HPZ) or 1, 1)


@rule("DSC409", "error")
def hpz_divides_world(document: Document, context: Context) -> Findings:
    """zero_hpz_partition_size does not divide the number of ranks.

    All secondary groups must have this size (utils/groups.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}, "train_batch_size": 3}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "zero_optimization": {"stage": 3},
        "train_batch_size": 3}
    Context: {"world_size": 3}
    Proof: raises is not divisible by
    """
    size, world = secondary_size(document), context.world_size
    if world is not None and document.stage == 3 and world % min(size, world):
        yield finding(HPZ, f"{size} does not divide {world} ranks", "the ranks of one node")


@rule("DSC411", "warning")
def hpz_is_not_a_node(document: Document, context: Context) -> Findings:
    """zero_hpz_partition_size is not the number of ranks of a node.

    The purpose of secondary partitions is to gather weights inside a node (utils/groups.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    Context: {"world_size": 4, "ranks_per_node": 4}
    Proof: accepts weights are gathered across nodes, or less memory is saved than possible
    """
    size, node = secondary_size(document), context.ranks_per_node
    if size > 1 and node is not None and size != node and document.stage == 3:
        what = f"{size} is not the {node} ranks of a node: secondary partitions cross nodes, or are larger than needed"
        yield finding(HPZ, what, str(node))


@rule("DSC413", "error")
def untested_optimizer(document: Document, context: Context) -> Findings:
    """ZeRO refuses the optimizer unless the file allows it.

    The engine (runtime/engine.py) accepts only the optimizers of a list (runtime/zero/utils.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": 1}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": true, "zero_optimization": {"stage": 1}}
    Proof: raises You are using an untested ZeRO Optimizer
    """
    name = document.get("optimizer", "type")
    untested = {optimizer.lower() for optimizer in keys().untested_optimizers}
    # Inside zero_optimization the key is refused, which another rule reports.
    allowed = document.get("zero_allow_untested_optimizer") or document.has(ZERO, "zero_allow_untested_optimizer")
    if isinstance(name, str) and name.lower() in untested and document.stage in (1, 2, 3) and not allowed:
        what = f"{show(name)} is not tested with ZeRO, which refuses it"
        yield finding(("optimizer", "type"), what, '"zero_allow_untested_optimizer": true as well, or "AdamW"')


@rule("DSC414", "info")
def zero_needs_optimizer(document: Document, context: Context) -> Findings:
    """The file has stage 1 or 2 but no optimizer.

    The program must pass an optimizer, or the engine stops (runtime/engine.py). Hugging Face passes one.

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}}
    Context: {"framework": "deepspeed"}
    Proof: raises requires an optimizer
    """
    alone = context.framework == "deepspeed" and not document.has("optimizer")
    if alone and document.stage in (1, 2):
        what = f'stage {document.stage} needs an optimizer, and there is no "optimizer" here'
        yield finding((ZERO, "stage"), what, '"optimizer": {...}, or pass one to deepspeed.initialize')


@rule("DSC416", "error")
def muon_with_reduce_scatter(document: Document, context: Context) -> Findings:
    """Muon is used with stage 3 and reduce_scatter.

    Muon orthogonalizes whole matrices (runtime/zero/stage3.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "gradient_clipping": 0,
        "zero_optimization": {"stage": 3}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "gradient_clipping": 0,
        "zero_optimization": {"stage": 3, "reduce_scatter": false}}
    Proof: raises Muon and reduce scatter cannot be used together
    """
    if document.optimizer == "muon" and document.stage == 3 and document.scatters:
        what = '"Muon" needs whole gradients, and stage 3 scatters them'
        yield finding(("optimizer", "type"), what, '"reduce_scatter": false in zero_optimization')


@rule("DSC417", "error")
def odd_allgather_bucket(document: Document, context: Context) -> Findings:
    """allgather_bucket_size is odd.

    Buckets are aligned to four bytes (runtime/zero/stage_1_and_2.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 499999999}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "allgather_bucket_size": 500000000}}
    Proof: raises allgather_bucket_size must be a multiple
    """
    size = document.integer(ZERO, "allgather_bucket_size")
    if size is not None and size % 2 and document.stage in (1, 2):
        what = f"{size} is odd (allowed: even numbers)"
        yield corrected(document, (ZERO, "allgather_bucket_size"), what, size + 1, "Make it even")


@rule("DSC402", "error")
def offload_ratio_without_stage_3(document: Document, context: Context) -> Findings:
    """The optimizer is offloaded in part below stage 3.

    Asserted when the configuration is read (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Proof: raises Partial offloading only supported for ZeRO Stage 3
    """
    ratio = document.number(ZERO, "offload_optimizer", "ratio")
    if ratio is not None and ratio < 1 and document.stage in (0, 1, 2):
        what = f"{show(ratio)} offloads a part, which stage {document.stage} cannot (allowed: 1.0)"
        yield finding((ZERO, "offload_optimizer", "ratio"), what, "1.0, or stage 3")


_SUPER = (ZERO, "offload_optimizer", "super_offload")


@rule("DSC403", "warning")
def stage_3_only(document: Document, context: Context) -> Findings:
    """A setting has no effect below stage 3.

    Only the optimizer of stage 3 receives offload_param and super_offload, and only stage 3 partitions weights, which
    zero_hpz_partition_size divides inside nodes (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    Proof: accepts parameters stay on the device
    """
    asked = {
        (ZERO, "offload_param"): bool(document.offload("offload_param")),
        _SUPER: document.is_true(*_SUPER),
        HPZ: secondary_size(document) > 1,
    }
    for path in (path for path, is_asked in asked.items() if is_asked and document.stage in (0, 1, 2)):
        what = f'"{path[-1]}" has an effect with stage 3 only, and the stage is {document.stage}'
        yield key_finding(path, what, '"stage": 3, or remove the key')


@rule("DSC404", "warning")
def offload_optimizer_without_zero(document: Document, context: Context) -> Findings:
    """offload_optimizer has no effect with stage 0.

    Only the optimizers of ZeRO offload (runtime/engine.py). DeepSpeed creates the CPU optimizer nevertheless.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    Proof: accepts gradients and weights are not offloaded
    """
    if document.offload("offload_optimizer") and document.stage == 0 and "stage" in document.section(ZERO):
        what = "the optimizer is offloaded by ZeRO, and the stage is 0"
        yield key_finding((ZERO, "offload_optimizer"), what, '"stage": 1 to 3, or remove the key')


@rule("DSC406", "error")
def nvme_without_path(document: Document, context: Context) -> Findings:
    """Offloading to NVMe lacks a path.

    Stage 3 joins the path with file names (runtime/zero/stage3.py), or asserts that it is given
    (runtime/zero/partition_parameters.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    Proof: raises NoneType|nvme_path
    """
    for what in ("offload_param", "offload_optimizer"):
        missing = document.get(ZERO, what, "nvme_path") in (None, "")
        if document.offload(what) == "nvme" and missing and document.stage == 3:
            yield finding((ZERO, what, "device"), '"nvme" without nvme_path', '"nvme_path": "/local_nvme" as well')


@rule("DSC407", "warning")
def nvme_without_stage_3(document: Document, context: Context) -> Findings:
    """Offloading the optimizer to NVMe below stage 3 uses the CPU.

    Stages 1 and 2 treat every device except "none" as the CPU (runtime/zero/stage_1_and_2.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Proof: accepts the optimizer is in host memory
    """
    if document.offload("offload_optimizer") == "nvme" and document.stage in (1, 2):
        what = f'"nvme" means "cpu" with stage {document.stage}: only stage 3 swaps to disks'
        path = (ZERO, "offload_optimizer", "device")
        yield finding(path, what, '"cpu", or stage 3', fix("Write cpu", replace(document, path, "cpu")))


@rule("DSC415", "info")
def offload_of_client_optimizer(document: Document, context: Context) -> Findings:
    """The optimizer is offloaded, but the file has none.

    An optimizer that the program passes must be DeepSpeedCPUAdam or DeepSpeedCPULion, unless
    zero_force_ds_cpu_optimizer is false (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    Context: {"framework": "deepspeed"}
    Proof: accepts a torch optimizer that the program passes is refused with ZeRORuntimeException
    """
    forced = document.get("zero_force_ds_cpu_optimizer", default=True) is True
    active = document.offload("offload_optimizer") and document.stage in (1, 2, 3)
    if active and forced and not document.has("optimizer") and context.framework == "deepspeed":
        what = 'without "optimizer" the one of the program must be DeepSpeedCPUAdam, or it is refused'
        instead = '"optimizer": {"type": "AdamW", ...}, or "zero_force_ds_cpu_optimizer": false'
        yield key_finding((ZERO, "offload_optimizer"), what, instead)
