"""Reader of the ds_config.json that runs now, for ``ds-compress plan cluster``: its layout and its batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION, CompressConfig, parse_section, read_ds_config
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import STAGE, TENSOR
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.choices import Setup
from deepspeed_compress.planner.layouts import GRADIENT_BITS, WEIGHT_BITS


def read_setup(file: Path, per_node: int) -> Setup:
    """Return the layout that `file` describes, on nodes of `per_node` GPUs. Without the section, nothing is compressed.

    Raises:
        ConfigError: The file cannot be read, or has settings that are not predicted.
    """
    ds_config = read_ds_config(file)
    section = parse_section(ds_config) if SECTION in ds_config else None
    parallelism = Parallelism() if section is None else section.parallelism or Parallelism()
    tensor, micro = TENSOR.effective(ds_config, parallelism), ds_config.get("train_micro_batch_size_per_gpu")
    within = parallelism.shard_within
    return Setup(
        STAGE.effective(ds_config, parallelism),
        tensor,
        parallelism.pipeline,
        micro if isinstance(micro, int) else 0,
        per_node // tensor if within == "node" else within or 0,
        **({} if section is None else _bits(file, section)),
    )


def written_batch(file: Path, gpus: int) -> int | None:
    """Return the sequences of a step that `file` describes on `gpus` GPUs; None if it leaves them open."""
    ds_config = read_ds_config(file)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, accumulation = (ds_config.get(name) for name in names)
    if isinstance(whole, int):
        return whole
    setup = read_setup(file, gpus)
    replicas = gpus // (setup.tensor * setup.pipeline)
    return micro * replicas * (accumulation if isinstance(accumulation, int) else 1) if isinstance(micro, int) else None


def _bits(file: Path, section: CompressConfig) -> Mapping[str, Any]:
    """Return the bits of gradients and weights.

    Raises:
        ConfigError: They are compressed in another way, or islands exchange them.
    """
    if section.islands is not None:
        raise ConfigError(f"--config {file}: islands are not predicted as what runs now; name a file without them")
    found = {}
    for kind, settings, allowed in (
        ("gradient", section.gradients, GRADIENT_BITS),
        ("weight", section.weights, WEIGHT_BITS),
    ):
        bits = 0 if settings.method == "none" else getattr(settings, "bits", None)
        if bits not in allowed or settings.method not in ("none", "blockwise"):
            raise ConfigError(
                f'--config {file}: {kind}s by "{settings.method}" are not predicted (allowed: "none", and "blockwise" '
                f"with {', '.join(map(str, allowed[1:]))} bits); name a file without it"
            )
        found[f"{kind}_bits"] = bits
    return found
