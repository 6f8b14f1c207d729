"""Rules on Accelerate's own configuration, which `accelerate config` writes: settings in it that never reach DeepSpeed.

They find nothing in other configurations. Of the other rules, only those of the syntax apply to one of Accelerate.
"""

import os
from pathlib import Path as FilePath

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.rule import Context, Findings, finding, key_finding, rule
from deepspeed_compress.tools.lint.values import number, show, text_number

SECTION = "deepspeed_config"
"""Section of Accelerate's configuration with settings of DeepSpeed, or the name of DeepSpeed's configuration."""
NAME = "deepspeed_config_file"
_TYPE = "distributed_type"
_NVME_PATHS = frozenset({"offload_optimizer_nvme_path", "offload_param_nvme_path"})
_SETTINGS = _NVME_PATHS | {
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "zero3_save_16bit_model",
}
"""Keys of the section that Accelerate writes into the configuration of DeepSpeed."""
_LAUNCHED = frozenset(
    {
        NAME,
        "zero3_init_flag",
        "deepspeed_hostfile",
        "deepspeed_exclusion_filter",
        "deepspeed_inclusion_filter",
        "deepspeed_moe_layer_cls_names",
        "deepspeed_multinode_launcher",
        "mixed_precision",
        "num_processes",
        "num_machines",
        "machine_rank",
        "main_process_ip",
        "main_process_port",
    }
)
"""Keys of the section that the launcher reads itself."""
YAML = (".yaml", ".yml")


def is_used(document: Document) -> bool:
    """Return True if `accelerate launch` starts DeepSpeed, so that the section takes effect."""
    return document.has(SECTION) and document.get(_TYPE, default="DEEPSPEED") == "DEEPSPEED"


def file_name(document: Document) -> str | None:
    """Return the name of the DeepSpeed configuration that Accelerate reads, or None."""
    name = document.string(SECTION, NAME)
    return name if is_used(document) and name not in ("", "none") else None


def find_file(document: Document, name: str) -> str | None:
    """Return the path of a file that `document` names, or None if it does not exist.

    Programs open the name relative to their working directory, which is usually above the directory of `document`.
    """
    beside = os.path.join(os.path.dirname(document.path), name)
    above = (str(parent / name) for parent in FilePath(os.path.abspath(document.path)).parents)
    return next((path for path in (name, beside, *above) if os.path.isfile(path)), None)


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
    settings = document.section(SECTION)
    dropped = [key for key, value in settings.items() if _is_dropped(key, value, file_name(document))]
    if dropped and is_used(document):
        keys, them = ", ".join(map(show, dropped)), "them" if dropped[1:] else "it"
        what = f"Accelerate does not pass on {keys}, and DeepSpeed never sees {them}"
        instead = f"{them} into a configuration of DeepSpeed, named by {NAME}, or remove {them}"
        yield key_finding((SECTION, dropped[0]), what, instead)


def _is_dropped(key: str, value: object, file: str | None) -> bool:
    if key in _NVME_PATHS:
        return value not in (None, "none") and file is None
    if key == "gradient_clipping":
        return 0 in (number(value), text_number(value))
    return key not in _SETTINGS | _LAUNCHED


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
    # `accelerate config` writes an empty section for every choice.
    if document.get(SECTION) and not is_used(document):
        what = f"with {show(document.get(_TYPE))} Accelerate starts no DeepSpeed, and {SECTION} has no effect"
        instead = f'"DEEPSPEED", or remove {SECTION}; --use_deepspeed on the command line applies it too'
        yield finding((_TYPE,), what, instead)


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
    name = file_name(document)
    if name is not None and name.endswith(YAML) and find_file(document, name) is not None:
        what = f"{show(name)} is YAML by its name, which Accelerate reads as JSON and stops at"
        yield finding((SECTION, NAME), what, "the same settings into a .json file")
