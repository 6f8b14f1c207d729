"""The section as a whole. The text under each field is its description in the JSON Schema."""

from typing import Annotated, Any, Literal

from pydantic import Field

from deepspeed_compress.config.checkpointing import Checkpointing
from deepspeed_compress.config.communication import Communication
from deepspeed_compress.config.islands import Islands
from deepspeed_compress.config.methods import Density, Model, NoCompression
from deepspeed_compress.config.overrides import Pattern
from deepspeed_compress.config.places import BlockwiseGradients, GradientsConfig, WeightsConfig

SECTION = "deepspeed_compress"


class Parallelism(Model):
    """Division of the ranks. It expands into DeepSpeed's own keys, with which it must agree."""

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


Patch = Annotated[dict[str, Any], Field(examples=[{"bits": 8}])]
"""Keys of settings that stand in for those written there; with another `method` its own keys start at their
defaults."""


class Ramp(Model):
    """Transition from uncompressed to the chosen settings, after the warm-up."""

    steps: int = Field(ge=1)
    """Optimizer steps that the ramp takes."""
    shape: Literal["linear", "exponential", "cosine"] = "exponential"
    """How `density` falls from `start` to the chosen one, in 16 steps."""
    start: Density = 0.25
    """Density at the beginning of the ramp."""
    stages: Annotated[tuple[Patch, ...], Field(strict=False, min_length=1)] | None = None
    """Instead of a density that falls: keys of `gradients` that differ, one object after the other, each for an equal
    part of the steps."""


class Phase(Model):
    """Part of training with its own settings."""

    until: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of `total_steps` at which the phase ends. Three phases may leave it out: 0.2, 0.8 and 1.0."""
    gradients: Patch = Field(default={})
    """Keys of `gradients` that differ in this phase; `{}` for none, `{"method": "none"}` for no compression."""
    weights: Patch = Field(default={})
    """The same of `weights`, with ZeRO 1 and 2."""


class Schedule(Model):
    """Changes over the steps of training."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the start that are sent uncompressed."""
    ramp: Ramp | None = None
    """Compression that begins softly; null goes from the warm-up to the chosen settings at once."""
    phases: Annotated[tuple[Phase, ...], Field(strict=False)] = ()
    """Settings by fraction of training; the last phase ends with training."""
    total_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps of the whole training, for `phases`; null takes `scheduler.params.total_num_steps`."""


class RollBack(Model):
    """Rollback to the last settings with which training went well."""

    behind: float = Field(default=0.05, gt=0)
    """How far the smoothed loss may be above its best, as a fraction of it."""
    patience: int = Field(default=100, ge=1)
    """Optimizer steps for which it must have been so."""
    checkpoint: bool = False
    """Whether to load the checkpoint that this run has saved last, when nothing is compressed any more."""


class Guard(Model):
    """Guard that watches gradients, loss and residuals, and softens compression when something is wrong."""

    on_anomaly: Literal["disable", "soften", "report"] = "disable"
    """`disable`: send uncompressed; `soften`: one step softer each time; `report`: only write it down."""
    cooldown_steps: int = Field(default=50, ge=1)
    """Optimizer steps without anomaly after which compression returns by one step."""
    window: int = Field(default=64, ge=8)
    """Applied optimizer steps that say what is usual; before so many only what is not finite is an anomaly."""
    exploding: float = Field(default=20.0, gt=1)
    """Six gradient norms in a row of so many times what is usual are an anomaly; so is one of the square of that."""
    vanishing: float = Field(default=1e-4, ge=0, lt=1)
    """So is a whole window of norms below this fraction of what is usual; 0 never."""
    loss_spike: float = Field(default=0.3, gt=0)
    """So are six losses in a row above the usual ones by more than this fraction, and by six times the median
    deviation."""
    residual_growth: float = Field(default=10.0, gt=1)
    """So are six residual norms in a row of so many times what is usual, and one of the square of that."""
    residual_every: int = Field(default=50, ge=1)
    """Optimizer steps between looks at the residuals."""
    skip_steps: bool = True
    """Whether a step whose gradient norm is beyond the square of `exploding` times what is usual is skipped, as
    DeepSpeed skips one that is not finite; at most five in a row."""
    full_sync_every: int = Field(default=0, ge=0)
    """Optimizer steps between uncompressed steps that also send all residuals, and exact weights; 0 for none."""
    rollback: RollBack | None = None
    """What to do when training falls behind; null does nothing."""
    dry_run: bool = False
    """Decisions are written down as events, and not carried out."""


class Adaptive(Model):
    """Adaptive choice of the settings that are predicted to reach a loss soonest with this network and gradients."""

    candidates: Annotated[tuple[Patch, ...], Field(strict=False, min_length=1)] | None = None
    """Settings to choose from: keys of `gradients` that differ; null has a usual list. What is written in `gradients`,
    and no compression, are always among them."""
    weights: Annotated[tuple[Patch, ...], Field(strict=False, min_length=1)] | None = None
    """Settings of weights to choose from under ZeRO 1 and 2: keys of `weights` that differ, `[{}]` for none; null has a
    usual list where weights are compressed. What is written in `weights` is always among them."""
    max_error: Annotated[float, Field(gt=0, le=1)] | None = None
    """Relative error of gradients that are sent, without error feedback, that a choice may have; null leaves that to
    the steps that a loss is predicted to cost, and is 0.3 without error feedback."""
    probe_every: int = Field(default=100, ge=2)
    """Optimizer steps between measurements; they also follow when steps become much slower."""
    margin: float = Field(default=0.03, ge=0, lt=1)
    """Part of the predicted time to a loss by which another choice must be better to be taken."""
    groups: Annotated[tuple[Pattern, ...], Field(strict=False)] = ()
    """Patterns of groups of parameters, each of which may get settings of its own; all others are one more group."""


class Monitor(Model):
    """Measurements: what is measured, how often, and where it is written."""

    every: int = Field(default=1, ge=1)
    """Optimizer steps between measurements."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Directory for `compression.jsonl`, `events.jsonl` and a copy of the configuration without passwords and keys;
    null writes no file."""
    cosine_every: int = Field(default=0, ge=0)
    """Optimizer steps between comparisons with the true mean gradient, each of which costs one uncompressed
    all-reduce of a bucket; 0 makes none."""
    announce: bool = True
    """Whether a line at the start says what is compressed, and what that is expected to send and to keep."""


class Lint(Model):
    """Settings that only the linter reads; training ignores them."""

    ignore: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names of lint rules that do not apply to this file."""


class CompressConfig(Model):
    """Compressed communication for DeepSpeed.

    Every key has a default: `{}` is 8-bit blockwise gradients with error feedback.
    """

    parallelism: Parallelism | None = None
    """Degrees of parallelism; null leaves them to DeepSpeed's own keys."""
    gradients: GradientsConfig = BlockwiseGradients()
    """How gradients are compressed, chosen by `method` (`blockwise` when left out)."""
    weights: WeightsConfig = NoCompression()
    """How weights are compressed where they are gathered: as differences with ZeRO 1 and 2, rounded with ZeRO 3."""
    islands: Islands | None = None
    """Groups of ranks that train by themselves and exchange now and then; null trains all ranks as one."""
    ownership: Literal["contiguous", "balanced"] = "contiguous"
    """Which rank updates which parameters under ZeRO 1 and 2. `contiguous`: DeepSpeed's cut, a stretch of the model for
    each rank; `balanced`: parameters are dealt out, so that all ranks send and receive all through backward."""
    schedule: Schedule = Schedule()
    """How compression changes over the steps of training."""
    adaptive: Adaptive | None = None
    """Settings that follow the network and the gradients; null keeps what is written."""
    guard: Guard | None = None
    """What is done when something goes wrong; null watches nothing."""
    checkpointing: Checkpointing | None = None
    """Checkpoints that training does not wait for; null leaves saving to DeepSpeed."""
    communication: Communication = Communication()
    """How messages are sent."""
    monitor: Monitor = Monitor()
    """Statistics of what was sent."""
    on_missing_state: Literal["error", "reset"] = "error"
    """What to do when a checkpoint is loaded whose compression state is missing, damaged or of another run: stop, or
    start with empty memories."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Key of the random numbers of stochastic methods."""
    lint: Lint = Lint()
    """Settings of the linter."""
