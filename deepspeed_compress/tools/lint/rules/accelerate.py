"""Rules on configurations of Accelerate: settings that never reach DeepSpeed."""

from deepspeed_compress.diagnostics import Diagnostic, at, at_key, write
from deepspeed_compress.tools.lint.accelerate import (
    NAME,
    PLACES,
    SECTION,
    file_name,
    is_left_out,
    is_used,
    named_file,
    settings,
)
from deepspeed_compress.tools.lint.document import Document, Member
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.values import show

_PRECISION = "mixed_precision"
_TYPE = "distributed_type"
_LAUNCHED = frozenset(
    {
        NAME,
        "zero3_init_flag",
        "deepspeed_hostfile",
        "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter",
        "deepspeed_moe_layer_cls_names",
        "deepspeed_multinode_launcher",
        _PRECISION,
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
    }
)
"""Keys of the section that the launcher reads itself."""
_YAML = (".yaml", ".yml")
_PATHS = frozenset(key for key in PLACES if key.endswith("nvme_path"))


@rule("DSC730", "error")
def accelerate_settings_beside_file(document: Document, context: Context) -> Findings:
    """Accelerate's configuration names a DeepSpeed file, and has settings that belong in that file.

    With deepspeed_config_file, Accelerate refuses settings of ZeRO, clipping, accumulation, offloading and
    mixed_precision in its own configuration (accelerate/utils/dataclasses.py).

    Wrong: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"deepspeed_config_file": "configs/zero0_int4.json", "zero_stage": 3}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"zero_stage": 3, "zero3_save_16bit_model": true}}
    Context: {"framework": "accelerate"}
    Proof: raises will be ignored
    """
    # Report all such settings in one finding, because they are a single mistake.
    if document.origin is None or file_name(document) is None or not is_used(document):
        return
    beside = [member for member in settings(document) if member.key in PLACES]
    precision = document.origin.by_key.get(_PRECISION)
    if precision is not None and precision.value.value is not None:
        beside.append(precision)
    if beside:
        names = ", ".join(member.key for member in beside)
        what = f"{names} together with {NAME}, which Accelerate refuses (allowed: in that file only)"
        first = beside[0]
        path = (first.key,) if first is precision else (SECTION, first.key)
        instead = f"them into {show(file_name(document))}, and remove them here"
        yield Diagnostic(at_key(*path, span=first.key_span), what, write(instead))


@rule("DSC731", "warning")
def accelerate_key_dropped(document: Document, context: Context) -> Findings:
    """deepspeed_config has a key that Accelerate does not pass on.

    Accelerate knows a dozen keys of this section (accelerate/utils/launch.py). It silently drops all others, such as
    DeepSpeed's section optimizer. It reads paths for NVMe but does not pass them on, nor gradient_clipping if that is 0
    (accelerate/utils/dataclasses.py): DeepSpeed then clips by its default of 1.0.

    Wrong: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"zero_stage": 2, "train_micro_batch_size_per_gpu": 4}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Context: {"framework": "accelerate"}
    Proof: accepts the setting has no effect
    """
    # Report all such keys in one finding: a DeepSpeed configuration was placed inside Accelerate's.
    dropped = [member for member in settings(document) if _is_dropped(document, member)]
    if dropped and is_used(document):
        several = len(dropped) > 1
        keys, them = ", ".join(show(member.key) for member in dropped), "them" if several else "it"
        what = f"Accelerate does not pass on {keys}, and DeepSpeed never sees {them}"
        instead = f"{them} into a configuration of DeepSpeed, named by {NAME}, or remove {them}"
        yield Diagnostic(at_key(SECTION, dropped[0].key, span=dropped[0].key_span), what, write(instead))


def _is_dropped(document: Document, member: Member) -> bool:
    if member.key in _PATHS:
        return member.value.value not in (None, "none") and file_name(document) is None
    return is_left_out(member) or (member.key not in PLACES and member.key not in _LAUNCHED)


@rule("DSC732", "warning")
def accelerate_file_missing(document: Document, context: Context) -> Findings:
    """Accelerate's configuration names a file that does not exist.

    Accelerate opens the file from the directory in which it is started (accelerate/utils/deepspeed.py). There is no
    such file in this directory, next to the configuration, or in a directory above it.

    Wrong: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"deepspeed_config_file": "no/such/ds_config.json"}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Context: {"framework": "accelerate"}
    Proof: raises Expected a string path to an existing deepspeed config
    """
    name = file_name(document) if document.origin is not None else None
    member = next((member for member in settings(document) if member.key == NAME), None)
    if name is not None and member is not None and is_used(document) and named_file(document) is None:
        what = f"{show(name)} was not found here, next to this file, or in a directory above it"
        yield Diagnostic(at(SECTION, NAME, span=member.value.span), what, write("the path of a configuration"))


@rule("DSC733", "warning")
def accelerate_deepspeed_unused(document: Document, context: Context) -> Findings:
    """deepspeed_config has no effect, because distributed_type does not start DeepSpeed.

    accelerate launch starts DeepSpeed only with distributed_type DEEPSPEED (accelerate/commands/launch.py), or with
    --use_deepspeed on the command line: with MULTI_GPU, FSDP, NO and others the section has no effect.

    Wrong: {"distributed_type": "MULTI_GPU", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Context: {"framework": "accelerate"}
    Proof: unproved it needs the GPUs that the program would be launched on
    """
    if document.origin is not None and not is_used(document):
        kind = document.origin.by_key[_TYPE]
        what = f"with {show(kind.value.value)} Accelerate starts no DeepSpeed, and {SECTION} has no effect"
        instead = f'"DEEPSPEED", or remove {SECTION}; --use_deepspeed on the command line applies it too'
        yield Diagnostic(at(_TYPE, span=kind.value.span), what, write(instead))


@rule("DSC734", "error")
def accelerate_file_is_yaml(document: Document, context: Context) -> Findings:
    """Accelerate's configuration names a YAML file.

    Accelerate's own configuration may be YAML, but it reads DeepSpeed's configuration with Python's json
    (accelerate/utils/deepspeed.py).

    Wrong: {"distributed_type": "DEEPSPEED", "num_processes": 1,
        "deepspeed_config": {"deepspeed_config_file": ".pre-commit-hooks.yaml"}}
    Right: {"distributed_type": "DEEPSPEED", "num_processes": 1, "deepspeed_config": {"zero_stage": 2}}
    Context: {"framework": "accelerate"}
    Proof: raises JSONDecodeError
    """
    name = file_name(document) if document.origin is not None else None
    if name is not None and name.endswith(_YAML) and is_used(document) and named_file(document) is not None:
        span = next(member.value.span for member in settings(document) if member.key == NAME)
        what = f"{show(name)} is YAML by its name, which Accelerate reads as JSON and stops at"
        yield Diagnostic(at(SECTION, NAME, span=span), what, write("the same settings into a .json file"))
