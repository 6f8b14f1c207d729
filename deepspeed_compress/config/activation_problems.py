"""Settings of `activations` without effect, or that contradict the rest of the file."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.native import TENSOR, value_at
from deepspeed_compress.config.problems import problem
from deepspeed_compress.diagnostics import Diagnostic, Path, pointer

_OVERLAP: Path = ("tensor_parallel", "tp_overlap_comm")
_BACKEND: Path = ("expert_parallel", "comm_backend")
_SEQUENCE: Path = ("sequence_parallel_size",)


def find_idle_activations(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield a problem if the key `activations` changes nothing."""
    activations = section.activations
    if activations is None:
        return
    if all(value is None for _, value in activations):
        *most, last = type(activations).model_fields
        what = f"{{}} has no effect without {', '.join(most)} or {last} (allowed: null)"
        yield problem(("activations",), what, '"tensor": {}, "pipeline": {}, or null')
    if activations.tensor is not None and not activations.tensor.merge and activations.tensor.bits is None:
        what = "false has no effect without bits (allowed: true)"
        yield problem(("activations", "tensor", "merge"), what, 'true, or "bits": 8')
    if activations.tensor is not None and activations.tensor.backward_bits and activations.tensor.bits is None:
        what = f"{activations.tensor.backward_bits} has no effect without bits (allowed: null)"
        yield problem(("activations", "tensor", "backward_bits"), what, 'null, or "bits" as well')
    experts = activations.experts
    if experts is not None and experts.dispatch is None and experts.combine is None:
        what = "{} has no effect without dispatch or combine (allowed: null)"
        yield problem(("activations", "experts"), what, '"dispatch": {}, "combine": {}, or null')


def find_activation_mismatches(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield settings of `activations` that DeepSpeed's keys, or the layout of the file, leave without effect.

    Only what the file says is checked. A program may also divide the model by itself: see the checks of an engine in
    `backends/deepspeed/activations/attach.py`.
    """
    activations, parallelism = section.activations, section.parallelism or Parallelism()
    if activations is None:
        return
    written = TENSOR.given(parallelism) is not None or TENSOR.native(ds_config) is not None
    if activations.tensor is not None and written and TENSOR.effective(ds_config, parallelism) == 1:
        what = f"has no effect with {pointer(TENSOR.place(parallelism))}: 1, where no layer is split (allowed: null)"
        yield problem(("activations", "tensor"), what, "null, or a size above 1")
    if activations.tensor is not None and value_at(ds_config, _OVERLAP) is True:
        what = f"cannot be combined with {pointer(_OVERLAP)}: true, which sums by other means (allowed: false)"
        yield problem(("activations", "tensor"), what, f"null, or false at {pointer(_OVERLAP)}")
    if activations.pipeline is not None and "pipeline" in parallelism.model_fields_set and parallelism.pipeline == 1:
        what = f"has no effect with {pointer((SECTION, 'parallelism', 'pipeline'))}: 1 (allowed: null)"
        yield problem(("activations", "pipeline"), what, "null, or more stages")
    enabled = value_at(ds_config, ("expert_parallel", "enabled"))
    if activations.experts is not None and enabled and value_at(ds_config, _BACKEND) == "deepep":
        what = f'cannot be combined with {pointer(_BACKEND)}: "deepep", which exchanges by itself (allowed: "comm")'
        yield problem(("activations", "experts"), what, f'null, or "comm" at {pointer(_BACKEND)}')
    if activations.sequence is not None and value_at(ds_config, _SEQUENCE) == 1:
        what = f"has no effect with {pointer(_SEQUENCE)}: 1 (allowed: null)"
        yield problem(("activations", "sequence"), what, "null, or a size above 1")
    if activations.sequence is not None and parallelism.pipeline > 1:
        what = f"cannot be combined with {pointer((SECTION, 'parallelism', 'pipeline'))} above 1 (allowed: null)"
        yield problem(("activations", "sequence"), what, "null, or one stage")
