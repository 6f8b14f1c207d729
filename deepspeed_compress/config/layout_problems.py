"""Checks of weights, ownership, parallelism and activations against the rest of the file, which may request more.

An engine with features that cannot be compressed would be refused when compression is attached
(`backends.deepspeed.limits`); this reports them earlier.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.models import SECTION
from deepspeed_compress.config.places import BlockwiseWeights, CompressedWeights, PowerSGDGradients
from deepspeed_compress.config.problems import (
    NATIVE_KEYS,
    STAGE,
    TENSOR,
    Configuration,
    Conflicts,
    find_conflicts_with,
    problem,
    show,
    value_at,
)
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer, write


def weights(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that compressed weights are gathered, and in a way that the method and its keys support.

    ZeRO 1 and 2, and the bf16 optimizer of pipelines, gather updated weights, whose differences are sent. ZeRO 3
    gathers weights of which no rank keeps a copy, so the weights themselves are rounded, which needs more bits.
    """
    chosen, stage, place = configuration.section.weights, configuration.stage, configuration.stage_place
    pipeline = configuration.parallelism.pipeline
    if stage == 3 and any(phase.weights for phase in configuration.section.schedule.phases):
        what = f"weights cannot be combined with {place}: 3, whose rounding is fixed for a run (allowed: no weights)"
        yield problem(("schedule", "phases"), what, "gradients only")
    if not isinstance(chosen, CompressedWeights):
        return
    if stage == 0 and not (pipeline > 1 and _may_be_bf16(configuration)):
        what = f'"{chosen.method}" cannot be combined with {place}: 0, where nothing is gathered (allowed: 1, 2, 3)'
        instead = f'"method": "none", or another stage at {place}'
        if _may_be_bf16(configuration):
            instead += ', or the stages of the pipeline as "parallelism": {"pipeline": 2}'
        yield problem(("weights",), what, instead)
    if stage == 3 and not (isinstance(chosen, BlockwiseWeights) and chosen.bits >= 4 and chosen.rounding == "nearest"):
        given = show(chosen.model_dump(include={"method", "bits", "rounding"}))
        what = f"{given} cannot be combined with {place}: 3, which rounds weights (allowed: 8 or 4 bits, nearest)"
        yield problem(("weights",), what, '"method": "blockwise", "bits": 8, "rounding": "nearest"')
    if chosen.overlap and stage == 3:
        what = f"true has no effect with {place}: 3, which prefetches weights itself (allowed: false)"
        yield problem(("weights", "overlap"), what, f"false, or 1 or 2 at {place}")
    if chosen.overlap and pipeline > 1:
        what = (
            f"true cannot be combined with {_PIPELINE}: {pipeline}, whose tied layers are not called (allowed: false)"
        )
        yield problem(("weights", "overlap"), what, 'false, or "pipeline": 1')
    if chosen.frozen and stage != 3:
        what = f"true has no effect with {place}: {stage}, which never sends frozen weights (allowed: false)"
        yield problem(("weights", "frozen"), what, f"false, or 3 at {place}")


def _may_be_bf16(configuration: Configuration) -> bool:
    """Return True if the model may be in bf16, so that a pipeline's optimizer gathers weights under ZeRO 0 too."""
    settings = configuration.ds_config.get("bf16", configuration.ds_config.get("bfloat16"))
    return isinstance(settings, dict) and bool(settings.get("enabled", False))


_CONFLICTS_WITH_OWNERSHIP = ("round_robin_gradients", "elastic_checkpoint", "parameter_alignment")
"""Keys of `zero_optimization` with which DeepSpeed orders, pads or saves its flat buffers differently."""
_OPTIMIZER: Path = ("optimizer", "type")


def ownership(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that `ownership` applies: only to the flat buffers of ZeRO 1 and 2, in DeepSpeed's default layout."""
    chosen, stage, place = configuration.section.ownership, configuration.stage, configuration.stage_place
    if chosen == "contiguous":
        return
    what = f'"{chosen}" cannot be combined with '
    if stage not in (1, 2):
        why = f"{place}: {stage}, where no rank owns a slice of the model (allowed: stages 1 and 2)"
        yield problem(("ownership",), what + why, f'"contiguous", or 1 or 2 at {place}')
    if not configuration.compresses:
        why = 'method "none", which leaves everything to DeepSpeed (allowed: "contiguous")'
        yield problem(("ownership",), what + why, '"contiguous", or another method')
    for key in _CONFLICTS_WITH_OWNERSHIP:
        value, other = configuration.native("zero_optimization", key), pointer(("zero_optimization", key))
        if value:
            why = f"{other}: {show(value)}, which changes the layout of the flat buffers (allowed: false)"
            yield problem(("ownership",), what + why, f'"contiguous", or false at {other}')
    if str(configuration.native(*map(str, _OPTIMIZER))).lower() == "muon":
        why = f'{pointer(_OPTIMIZER)}: "Muon", whose momentum has whole matrices on several ranks (allowed: others)'
        yield problem(("ownership",), what + why, f'"contiguous", or "AdamW" at {pointer(_OPTIMIZER)}')


_ZERO = "zero_optimization"
OWN_GATHERS: Mapping[str, tuple[int, str]] = {
    "zero_quantized_weights": (False, "ZeRO++ quantizes weights already"),
    "zero_quantized_nontrainable_weights": (False, "ZeRO++ quantizes frozen weights already"),
    "stage3_use_all_reduce_for_fetch_params": (False, "weights that are fetched by an all-reduce cannot be compressed"),
    "zero_hpz_partition_size": (1, "ZeRO++ gathers weights from a second copy"),
}
"""Ways to gather weights in ZeRO 3, which other stages ignore: the value that turns each off, and why it is refused."""


def gathers_by_itself(ds_config: Mapping[str, Any]) -> bool:
    """Return True if weights cannot be compressed under ZeRO 3, because DeepSpeed gathers them in another way."""
    return any(_is_on(value_at(ds_config, (_ZERO, key)), off) for key, (off, _) in OWN_GATHERS.items())


def _is_on(value: object, off: object) -> bool:
    return value not in (None, "auto", 0, off)


_FEATURES: Mapping[Path, tuple[object, str]] = {
    (_ZERO, "zero_quantized_gradients"): (False, "ZeRO++ quantizes gradients already"),
    (_ZERO, "zenflow"): (None, "ZenFlow reduces gradients on a code path of its own"),
    (_ZERO, "offload_optimizer", "super_offload"): (False, "SuperOffload reduces gradients on a code path of its own"),
    ("compile", "deepcompile"): (False, "DeepCompile reduces gradients inside the compiled graph"),
}
"""Places of features that reduce gradients in incompressible ways, with the value that turns each off, and why."""


def features(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find features that reduce gradients or gather weights in incompressible ways, if anything acts on them."""
    if not configuration.compresses and configuration.parallelism.shard_within is None:
        return
    for path, (off, why) in _FEATURES.items():
        yield from _in_use(configuration, path, off, why, show(off))
    if configuration.stage == 3 and configuration.section.weights.method != "none":
        for key, (off, why) in OWN_GATHERS.items():
            yield from _in_use(
                configuration, (_ZERO, key), off, why, f'{show(off)}, or {SECTION}.weights.method "none"'
            )
    elif configuration.divides_job:
        why = "ZeRO++ would gather weights across islands, which differ"
        yield from _in_use(configuration, (_ZERO, "zero_hpz_partition_size"), 1, why, f"1, or no {SECTION}.islands")


def _in_use(configuration: Configuration, path: Path, off: object, why: str, instead: str) -> Iterator[Diagnostic]:
    value = value_at(configuration.ds_config, path)
    if _is_on(value, off):
        what = f"{show(value)} cannot be combined with {pointer((SECTION,))}: {why} (allowed: {show(off)})"
        yield Diagnostic(at(*path), what, write(instead))


AUTOCAST: Path = ("torch_autocast", "dtype")


def scaler_without_zero(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that torch's gradient scaler is not used without ZeRO by ranks that hold different parameters.

    Each of them would skip steps on its own.
    """
    if not configuration.compresses and configuration.parallelism.shard_within is None:
        return
    dtype = value_at(configuration.ds_config, AUTOCAST)
    scaled = (
        configuration.native("torch_autocast", "enabled") is True
        and configuration.native("fp16", "enabled") is not True
        and dtype in ("fp16", "float16", "half", "torch.float16")
    )
    if scaled and configuration.stage == 0 and (configuration.parallelism.pipeline > 1 or configuration.tensor > 1):
        what = f"{show(dtype)} without ZeRO gives ranks of a layer or stage a loss scale of its own (allowed: bfloat16)"
        yield Diagnostic(at(*AUTOCAST), what, write('"bfloat16", or ZeRO stage 1 to 3'))


_PIPELINE = pointer((SECTION, "parallelism", "pipeline"))


def disagreement(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that a value that is given in both places, in the section and to DeepSpeed, is the same."""
    for native in NATIVE_KEYS:
        ours, theirs = native.given(configuration.parallelism), native.native(configuration.ds_config)
        outer = configuration.ds_config.get(native.section, {})
        if ours is not None and not isinstance(outer, dict):
            what = f"{ours} cannot be combined with {pointer((native.section,))}: {show(outer)} (allowed: an object)"
            yield Diagnostic(at(*native.ours), what, write(f'"{native.section}": {{"{native.key}": {ours}}}'))
        elif ours is not None and theirs is not None and (type(theirs) is not int or max(theirs, native.off) != ours):
            what = f"{ours} disagrees with {pointer(native.theirs)}: {show(theirs)} (allowed: the same value)"
            instead = f"the value in one of the two places only, or {ours} in both"
            yield Diagnostic(at(*native.ours), what, write(instead))


def pipeline(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that a pipeline has neither ZeRO 2 or 3 nor DeepSpeed's tensor parallelism, whose groups ignore stages."""
    parallelism, size = configuration.parallelism, TENSOR.native(configuration.ds_config)
    if parallelism.pipeline == 1:
        return
    other = f"cannot be combined with {_PIPELINE}: {parallelism.pipeline} (allowed with a pipeline:"
    if configuration.stage >= 2:
        what = f"{configuration.stage} {other} 0, 1)"
        yield Diagnostic(at(*STAGE.place(parallelism)), what, write('0 or 1, or "pipeline": 1'))
    if isinstance(size, int) and size > 1:
        instead = f'0, and "tensor": {size} in {pointer((SECTION, "parallelism"))}'
        yield Diagnostic(at(*TENSOR.theirs), f"{size} {other} 0)", write(instead))


def world_size(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that tensor x pipeline divides the number of ranks."""
    tensor, stages, ranks = configuration.tensor, configuration.parallelism.pipeline, configuration.world_size
    if ranks is not None and (ranks < 1 or ranks % (tensor * stages)):
        what = f"tensor {tensor} x pipeline {stages} do not divide the world size {ranks} (allowed: divisors of it)"
        yield problem(("parallelism",), what, f"other values, or start a multiple of {tensor * stages} ranks")


_SHARDING_KEY: Path = ("parallelism", "shard_within")
_SHARDING = pointer((SECTION, *_SHARDING_KEY))
_AGAINST_SHARDING: Conflicts = {
    ("islands",): (None, "islands divide the ranks of the job themselves", "null, or remove shard_within"),
    ("parallelism", "pipeline"): (1, "DeepSpeed distributes stages over the whole job", "1, or remove shard_within"),
    ("weights", "method"): ("none", "weights never leave a node", '"none"'),
    ("gradients", "hierarchy"): (None, "DeepSpeed reduces inside a node", "null"),
    ("gradients", "clip_norm"): (None, "norms of parts of parameters are smaller", "null"),
    ("checkpointing", "memory"): (None, "only the first node writes the model", "null"),
    ("ownership",): ("contiguous", "all shards of a node have the same size", '"contiguous"'),
}


def sharding_within_section(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check settings that hybrid sharding leaves without effect, or cannot be combined with."""
    if configuration.parallelism.shard_within is None:
        return
    yield from find_conflicts_with(_SHARDING, configuration.section, _AGAINST_SHARDING)
    if isinstance(configuration.section.gradients, PowerSGDGradients):
        why = "a shard has parts of matrices, which low-rank factors cannot approximate (allowed: other methods)"
        yield problem(("gradients", "method"), f"cannot be combined with {_SHARDING}: {why}", '"blockwise"')


_ON_NVME = (
    ("offload_optimizer", "DeepSpeed writes gradients to a file before they are averaged over the nodes"),
    ("offload_param", "DeepSpeed keeps weights in files, so those of the nodes cannot be compared"),
)
"""Offloads whose device must not be NVMe with hybrid sharding, and the reason."""


def sharding_within_file(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check hybrid sharding against the rest of the file, and the number of ranks."""
    within, ranks = configuration.parallelism.shard_within, configuration.world_size
    if within is None:
        return
    if configuration.stage == 0:
        what = f"{show(within)} has no effect with {configuration.stage_place}: 0, which shards nothing"
        yield problem(_SHARDING_KEY, f"{what} (allowed: stages 1, 2 and 3)", "null, or another stage")
    for offload, why in _ON_NVME:
        place = ("zero_optimization", offload, "device")
        if configuration.native(*place) == "nvme":
            what = f'"nvme" cannot be combined with {_SHARDING}: {why} (allowed: "cpu", "none")'
            yield Diagnostic(at(*place), what, write('"cpu"'))
    size = within * configuration.tensor if isinstance(within, int) else 1
    if ranks is not None and ranks % size:
        what = f"nodes of {size} ranks do not divide the world size {ranks} (allowed: divisors of the world size)"
        yield problem(_SHARDING_KEY, what, f"another number, or start a multiple of {size} ranks")


def idle_activations(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that the key `activations` changes something."""
    activations = configuration.section.activations
    if activations is None:
        return
    if all(value is None for _, value in activations):
        *most, last = type(activations).model_fields
        what = f"{{}} has no effect without {', '.join(most)} or {last} (allowed: null)"
        yield problem(("activations",), what, '"tensor": {}, "pipeline": {}, or null')
    tensor, experts = activations.tensor, activations.experts
    if tensor is not None and not tensor.merge and tensor.bits is None:
        what = "false has no effect without bits (allowed: true)"
        yield problem(("activations", "tensor", "merge"), what, 'true, or "bits": 8')
    if tensor is not None and tensor.backward_bits and tensor.bits is None:
        what = f"{tensor.backward_bits} has no effect without bits (allowed: null)"
        yield problem(("activations", "tensor", "backward_bits"), what, 'null, or "bits" as well')
    if experts is not None and experts.dispatch is None and experts.combine is None:
        what = "{} has no effect without dispatch or combine (allowed: null)"
        yield problem(("activations", "experts"), what, '"dispatch": {}, "combine": {}, or null')


_OVERLAP = ("tensor_parallel", "tp_overlap_comm")
_BACKEND = ("expert_parallel", "comm_backend")
_SEQUENCE = "sequence_parallel_size"


def activations_within_file(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check settings of `activations` that DeepSpeed's keys, or the layout of the file, leave without effect.

    Only what the file says is checked. A program may also divide the model by itself: see the checks of an engine in
    `backends/deepspeed/activations/attach.py`.
    """
    activations, parallelism = configuration.section.activations, configuration.parallelism
    if activations is None:
        return
    written = TENSOR.given(parallelism) is not None or TENSOR.native(configuration.ds_config) is not None
    if activations.tensor is not None and written and configuration.tensor == 1:
        what = f"has no effect with {pointer(TENSOR.place(parallelism))}: 1, where no layer is split (allowed: null)"
        yield problem(("activations", "tensor"), what, "null, or a size above 1")
    if activations.tensor is not None and configuration.native(*_OVERLAP) is True:
        what = f"cannot be combined with {pointer(_OVERLAP)}: true, which sums by other means (allowed: false)"
        yield problem(("activations", "tensor"), what, f"null, or false at {pointer(_OVERLAP)}")
    if activations.pipeline is not None and "pipeline" in parallelism.model_fields_set and parallelism.pipeline == 1:
        yield problem(
            ("activations", "pipeline"), f"has no effect with {_PIPELINE}: 1 (allowed: null)", "null, or more stages"
        )
    enabled, backend = configuration.native("expert_parallel", "enabled"), configuration.native(*_BACKEND)
    if activations.experts is not None and enabled and backend == "deepep":
        what = f'cannot be combined with {pointer(_BACKEND)}: "deepep", which exchanges by itself (allowed: "comm")'
        yield problem(("activations", "experts"), what, f'null, or "comm" at {pointer(_BACKEND)}')
    if activations.sequence is not None and configuration.native(_SEQUENCE) == 1:
        what = f"has no effect with {pointer((_SEQUENCE,))}: 1 (allowed: null)"
        yield problem(("activations", "sequence"), what, "null, or a size above 1")
    if activations.sequence is not None and parallelism.pipeline > 1:
        what = f"cannot be combined with {_PIPELINE} above 1 (allowed: null)"
        yield problem(("activations", "sequence"), what, "null, or one stage")
