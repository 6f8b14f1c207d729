"""Parts of DeepSpeed that this package relies on, checked before anything is attached."""

import functools
import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from deepspeed_compress.errors import SeamError

SUPPORTED = (Version("0.18.3"), Version("0.20.dev0"))
"""Supported DeepSpeed versions: the first one that works, and the first one that is not known to work."""


@dataclass(frozen=True)
class Seam:
    """A DeepSpeed function that this package replaces or calls.

    A function whose parameters changed is listed once for each of its forms.

    Attributes:
        target: "module:Class.method" or "module:function".
        parameters: the names of its parameters, in order, with spaces between them; None if decorators hide them,
            depending on the versions of DeepSpeed and PyTorch, so that only its presence can be checked.
        since: first version of DeepSpeed with this form; None if all supported versions before `until` have it.
        until: first version of DeepSpeed without this form; None if the newest supported version has it.
    """

    target: str
    parameters: str | None = None
    since: str | None = None
    until: str | None = None

    def is_in(self, version: str) -> bool:
        """Return True if DeepSpeed `version` has the function in this form."""
        found = Version(version).release
        begun = self.since is None or found >= Version(self.since).release
        return begun and (self.until is None or found < Version(self.until).release)


_Z12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer."
_Z3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3."
_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine."
_LOAD_MODULE = "self checkpoint strict custom_load_fn fetch_z3_params"

STEP = (
    Seam(_ENGINE + "_take_model_step", "self lr_kwargs block_eigenvalue", until="0.19.8"),
    Seam(_ENGINE + "_take_model_step", "self lr_kwargs", since="0.19.8"),
    Seam(_ENGINE + "save_checkpoint", "self save_dir tag client_state save_latest exclude_frozen_parameters"),
    Seam(
        _ENGINE + "load_checkpoint",
        "self load_dir tag load_module_strict load_optimizer_states load_lr_scheduler_states load_module_only "
        "custom_load_fn",
    ),
    Seam(_ENGINE + "_load_zero_checkpoint", "self load_dir tag load_optimizer_states"),
    Seam(_ENGINE + "_get_all_ckpt_names", "self checkpoints_path tag"),
    Seam(_ENGINE + "_get_ckpt_name", "self checkpoints_path tag mp_placeholder pp_placeholder"),
    Seam(_ENGINE + "_get_mp_rank_zero_checkpoint_names", "self load_dir tag mp_rank dp_world_size bf16_mode"),
    Seam(_ENGINE + "load_module_state_dict", _LOAD_MODULE, until="0.19.3"),
    Seam(_ENGINE + "load_module_state_dict", f"{_LOAD_MODULE} z3_params_to_fetch allowed_missing_keys", since="0.19.3"),
    Seam(_ENGINE + "_copy_recovery_script", "self save_path"),
)
ZERO_0 = (
    Seam(_ENGINE + "allreduce_bucket", "self bucket dp_group dp_world_size"),
    Seam(_ENGINE + "allreduce_and_copy", "self small_bucket dp_group dp_world_size"),
)
ZERO_12 = (
    Seam(_Z12 + "average_tensor", "self tensor communication_data_type"),
    Seam(_Z12 + "gradient_reduction_w_predivide", "self tensor communication_data_type"),
    Seam(_Z12 + "reduce_ipg_grads", "self comm_dtype", since="0.18.5"),
    Seam(_Z12 + "reduce_gradients", "self pipeline_parallel"),
    Seam(_Z12 + "get_gradient_for_reduction", "self param"),
    Seam(_Z12 + "_use_compact_grad_partition_buffer", "self group_idx", since="0.19.8"),
    Seam(_Z12 + "_apply_muon_updates_cpu_offload", "self", since="0.19.8"),
)
OWNERSHIP = (
    Seam(_ENGINE + "_configure_zero_optimizer", "self optimizer"),
    Seam(_ENGINE + "_get_zero_param_shapes", "self"),
    Seam(_ENGINE + "_save_zero_checkpoint", "self save_path tag"),
    Seam(_ENGINE + "_load_zero_checkpoint", "self load_dir tag load_optimizer_states"),
    Seam(_Z12 + "state_dict", "self"),
    Seam(
        _Z12 + "load_state_dict",
        "self state_dict_list load_optimizer_states load_from_fp32_weights checkpoint_folder load_serial param_shapes",
    ),
)
ZERO_3 = (
    Seam(_Z3 + "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"),
    Seam(_Z3 + "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads"),
    Seam(_Z3 + "independent_gradient_partition_epilogue"),
    Seam(_Z3 + "partition_grads"),
    Seam(_Z3 + "_apply_muon_to_accumulated_grads", "self", since="0.19.8"),
)

_GATHER = "groups_flat partitioned_param_groups dp_process_group start_alignment_factor allgather_bucket_size"
WEIGHTS = (
    Seam("deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups", _GATHER),
    Seam("deepspeed.runtime.bf16_optimizer:all_gather_dp_groups", _GATHER),
    Seam(_Z12 + "step", "self closure"),
    Seam("deepspeed.runtime.bf16_optimizer:BF16_Optimizer.step", "self closure"),
    Seam(_ENGINE + "save_16bit_model", "self save_dir save_filename exclude_frozen_parameters"),
)

_COORDINATOR = "deepspeed.runtime.zero.partitioned_param_coordinator:PartitionedParameterCoordinator."
WEIGHTS_3 = (
    Seam("deepspeed.runtime.zero.partition_parameters:_dist_allgather_fn", "input_tensor output_tensor group"),
    Seam(_COORDINATOR + "fetch_sub_module"),
)


def _supported() -> str:
    return f"deepspeed >={SUPPORTED[0]},<{SUPPORTED[1].base_version}"


def check_version(found: str) -> None:
    """Check that DeepSpeed version `found` is in the supported range.

    Raises:
        SeamError: it is not.
    """
    if not SUPPORTED[0] <= Version(found) < SUPPORTED[1]:
        raise SeamError(
            f"DeepSpeed {found} is installed, but deepspeed_compress attaches to internals that it knows in "
            f"{_supported()} only; install one of these: pip install '{_supported().replace(' ', '')}'"
        )


def check_seams(seams: Iterable[Seam], found: str) -> None:
    """Check that every seam exists, with the expected parameters, in the installed DeepSpeed (version `found`).

    Raises:
        SeamError: the version is not supported, or a seam is missing or has other parameters.
    """
    check_version(found)
    for seam in (seam for seam in seams if seam.is_in(found)):
        present = _parameters(seam.target)
        if present is None or seam.parameters not in (None, present):
            what = "is missing" if present is None else f"takes ({present}), not ({seam.parameters})"
            raise SeamError(f"{seam.target} {what} in DeepSpeed {found}; supported: {_supported()}")


def _parameters(target: str) -> str | None:
    module, _, path = target.partition(":")
    try:
        return _names(functools.reduce(getattr, path.split("."), importlib.import_module(module)))
    except (ImportError, AttributeError):
        return None


@functools.cache
def _names(function: Any) -> str:
    return " ".join(inspect.signature(function).parameters)
