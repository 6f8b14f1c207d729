"""Checks of how ranks are divided: `parallelism` and `activations`, and the features of DeepSpeed that they go with."""

from collections.abc import Iterator

from deepspeed_compress.config.models import SECTION
from deepspeed_compress.config.places import PowerSGDGradients
from deepspeed_compress.config.problems import (
    NATIVE_KEYS,
    STAGE,
    TENSOR,
    Configuration,
    Conflicts,
    find_conflicts_with,
    problem,
    show,
)
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer, write

_PIPELINE = pointer((SECTION, "parallelism", "pipeline"))


def disagreement(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that a value that is given in both places, in the section and to DeepSpeed, is the same."""
    for native in NATIVE_KEYS:
        ours, theirs = native.given(configuration.parallelism), native.native(configuration.ds_config)
        outer = configuration.ds_config.get(native.section, {})
        if ours is not None and not isinstance(outer, dict):
            what = f"{ours} cannot be combined with {pointer((native.section,))}: {show(outer)} (allowed: an object)"
            yield Diagnostic(at(*native.ours), what, write(f'"{native.section}": {{"{native.key}": {ours}}}'))
        elif ours is not None and theirs is not None and not _same(ours, theirs, native.off):
            what = f"{ours} disagrees with {pointer(native.theirs)}: {show(theirs)} (allowed: the same value)"
            instead = f"the value in one of the two places only, or {ours} in both"
            yield Diagnostic(at(*native.ours), what, write(instead))


def _same(ours: int, theirs: object, off: int) -> bool:
    return isinstance(theirs, int) and not isinstance(theirs, bool) and max(theirs, off) == ours


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
        what = (
            f"tensor {tensor} x pipeline {stages} = {tensor * stages} ranks do not divide the world size {ranks} "
            "(allowed: divisors of the world size)"
        )
        instead = f"other values, or start a multiple of {tensor * stages} ranks"
        yield problem(("parallelism",), what, instead)


_SHARDING_KEY: Path = ("parallelism", "shard_within")
_SHARDING = pointer((SECTION, *_SHARDING_KEY))
_AGAINST_SHARDING: Conflicts = {
    ("islands",): (None, "islands divide the ranks of the job themselves", "null, or remove shard_within"),
    ("parallelism", "pipeline"): (
        1,
        "DeepSpeed distributes stages over all ranks of the job",
        "1, or remove shard_within",
    ),
    ("weights", "method"): ("none", "weights never leave a node", '"none"'),
    ("gradients", "hierarchy"): (None, "DeepSpeed reduces inside a node", "null"),
    ("gradients", "clip_norm"): (
        None,
        "a shard has parts of parameters, whose norms are smaller than those of the parameters",
        "null",
    ),
    ("checkpointing", "memory"): (
        None,
        "only the first node writes the model, so other hosts would have nothing in memory",
        "null",
    ),
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
