"""The section as a whole. The text under each field is its description in the JSON Schema."""

from typing import Annotated, Literal

from pydantic import Field

from deepspeed_compress.config.methods import Model, NoCompression
from deepspeed_compress.config.places import BlockwiseGradients, GradientsConfig, WeightsConfig

SECTION = "deepspeed_compress"


class Parallelism(Model):
    """How the ranks are divided. Expands into DeepSpeed's own keys, with which it must agree."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """ZeRO stage, written to `zero_optimization.stage`. Left out or null: DeepSpeed's own setting holds."""
    tensor: int = Field(default=1, ge=1)
    """Ranks that share each layer, written to `tensor_parallel.autotp_size`."""
    pipeline: int = Field(default=1, ge=1)
    """Pipeline stages. More than 1 needs ZeRO stage 0 or 1."""
    partition: (
        Literal["balanced", "parameters", "uniform"]
        | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=2)]
    ) = "balanced"
    """How the layers are cut into stages, when this package builds the pipeline: by equal multiplications, by equal
    numbers of parameters, by equal numbers of decoder layers, or a list with that number for each stage."""
    activation_checkpointing: bool = False
    """Whether activations inside decoder layers are computed again in the backward pass instead of kept."""


class Schedule(Model):
    """What changes over the steps of training."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the start that are sent uncompressed."""


class Monitor(Model):
    """What is measured, how often, and where it is written."""

    every: int = Field(default=1, ge=1)
    """Optimizer steps between measurements."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Directory for `compression.jsonl`; null writes no file."""
    cosine_every: int = Field(default=0, ge=0)
    """Optimizer steps between comparisons with the true mean gradient, each of which costs one uncompressed
    all-reduce of a bucket; 0 makes none."""


class Lint(Model):
    """Read by the linter alone; training ignores it."""

    ignore: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of lint rules that do not apply to this file."""


class CompressConfig(Model):
    """Compressed communication for DeepSpeed. Every key has a default: `{}` is 8-bit blockwise gradients
    with error feedback."""

    parallelism: Parallelism | None = None
    """Degrees of parallelism; null leaves them to DeepSpeed's own keys."""
    gradients: GradientsConfig = BlockwiseGradients()
    """How gradients are compressed, chosen by `method` (`blockwise` when left out)."""
    weights: WeightsConfig = NoCompression()
    """How weights are compressed where they are gathered: as differences with ZeRO 1 and 2, rounded with ZeRO 3."""
    schedule: Schedule = Schedule()
    """How compression changes over the steps of training."""
    monitor: Monitor = Monitor()
    """Statistics of what was sent."""
    on_missing_state: Literal["error", "reset"] = "error"
    """What to do when a checkpoint is loaded whose compression state is missing, damaged or of another run: stop, or
    start with empty memories."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Key of the random numbers of stochastic methods."""
    lint: Lint = Lint()
    """Settings of the linter."""
