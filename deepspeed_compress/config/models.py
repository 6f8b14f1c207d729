"""The section as a whole. The text under each field is its description in the JSON Schema."""

from typing import Annotated, Literal

from pydantic import Field

from deepspeed_compress.config.islands import Islands
from deepspeed_compress.config.methods import Model, NoCompression
from deepspeed_compress.config.numbers import BitRate, ByteRate, Duration
from deepspeed_compress.config.overrides import Pattern
from deepspeed_compress.config.places import BlockwiseGradients, GradientsConfig, WeightsConfig
from deepspeed_compress.config.schedules import Patch, Schedule


class TensorActivations(Model):
    """Sums of activations and of their gradients over the ranks that share a layer, during training."""

    merge: bool = True
    """Sum the gradient of a tensor once if several layers of a module read it: query, key and value, or gate and up.
    This changes nothing but the order of an addition."""
    bits: Literal[8, 4] | None = None
    """Bits per element of these sums; null sends them uncompressed. Sums over the vocabulary stay uncompressed."""
    backward_bits: Literal[8, 4] | None = None
    """Bits per element of the sums of the backward pass; null takes `bits`. Gradients need more bits than outputs."""

    @property
    def bits_of_gradients(self) -> int | None:
        """Return the bits per element of the sums of the backward pass; None if they stay uncompressed."""
        return self.bits if self.backward_bits is None else self.backward_bits


class PipelineActivations(Model):
    """Activations and their gradients between pipeline stages, during training."""

    bits: Literal[8, 4] = 8
    """Bits per element of the first tensor that a stage passes on, and of its gradient. Other tensors, such as masks,
    stay uncompressed."""


class Dispatch(Model):
    """Exchange of tokens on their way to the experts."""

    bits: Literal[8, 4] = 8
    """Bits per element of these tokens in the forward pass, and of their gradients in the backward pass."""


class Combine(Model):
    """Exchange of what the experts return."""

    bits: Literal[8, 4] = 8
    """Bits per element of these results in the forward pass, and of their gradients in the backward pass."""


class ExpertActivations(Model):
    """Exchanges of tokens between ranks that share the experts of a layer, during training. Counts stay exact."""

    dispatch: Dispatch | None = None
    """Tokens on their way to the experts, and their gradients; null sends them uncompressed."""
    combine: Combine | None = None
    """Results of the experts on their way back, and their gradients; null sends them uncompressed."""


class SequenceActivations(Model):
    """Queries, keys, values and outputs of attention between sequence-parallel ranks (Ulysses), during training."""

    bits: Literal[8, 4] = 8
    """Bits per element of these tensors and of their gradients. Positions stay uncompressed."""


class Activations(Model):
    """Compression of what ranks with different parts of the model send to each other."""

    tensor: TensorActivations | None = None
    """Sums between tensor-parallel ranks; null leaves them to the engine."""
    pipeline: PipelineActivations | None = None
    """Messages between pipeline stages; null leaves them to the engine."""
    experts: ExpertActivations | None = None
    """Exchanges between ranks that share experts; null leaves them to the engine."""
    sequence: SequenceActivations | None = None
    """All-to-alls between sequence-parallel ranks; null leaves them to the engine."""


class MemoryCheckpoints(Model):
    """Checkpoints in the memory of each host (`/dev/shm`), which outlive the training processes.

    The newest complete one is loaded instead of an older one in `directory`.
    """

    every: Annotated[int, Field(ge=1)] | Duration
    """Interval between checkpoints in memory: a number of optimizer steps, or a time such as "30 s"."""
    copies: Literal[0, 1] = 0
    """Number of copies of each host's files in the memory of the next host. With 1, one host may be lost."""
    max_rate: ByteRate | None = None
    """Largest rate at which each rank sends its files to the next host; null has no limit."""


class Checkpointing(Model):
    """Checkpoints: `save_checkpoint` copies the state to memory, and another process writes it during training."""

    asynchronous: bool = True
    """Continue training while a checkpoint is written; false waits until it is complete."""
    every: Annotated[int, Field(ge=1)] | Duration | None = None
    """Interval between automatic checkpoints: a number of optimizer steps, or a time such as "10 min"; null saves only
    when the program calls `save_checkpoint`."""
    directory: Annotated[str, Field(min_length=1)] | None = None
    """Directory of automatic checkpoints, which all hosts must share."""
    resume: bool | None = None
    """Load the newest complete checkpoint of `directory` when the engine is created. null does so only if the
    environment variable `DS_COMPRESS_RESUME` is 1, which `ds-compress run --restarts` sets when it restarts ranks."""
    save_on_sigterm: bool | None = None
    """On SIGTERM, finish the step, save a checkpoint in `directory`, and end all ranks. null does so only for ranks
    that `ds-compress run --restarts` has started."""
    keep: Annotated[int, Field(ge=1)] | None = None
    """Number of automatic checkpoints to keep, the newest ones; null keeps all. Checkpoints that the program saves are
    never removed."""
    on_error: Literal["warn", "stop"] = "warn"
    """Reaction if a checkpoint cannot be written, for example on a full disk: `warn`, or `stop` with an error on all
    ranks."""
    timeout: Duration = "10 min"
    """Time that the first rank waits for the files of all other ranks before a checkpoint counts as failed."""
    max_rate: ByteRate | None = None
    """Largest rate at which each rank writes DeepSpeed's files in the background; null has no limit."""
    memory: MemoryCheckpoints | None = None
    """More frequent checkpoints in the memory of the hosts, in addition to `directory`; null saves none."""


class Rollout(Model):
    """Weights for rollout workers, which generate with the newest policy: exact changes, published after each step."""

    directory: Annotated[str, Field(min_length=1)]
    """Directory of the published versions, which all ranks and all rollout workers share, or the address of a server of
    such a store: "tcp://host:port"."""
    method: Literal["exact", "blockwise"] = "exact"
    """`exact`: receivers hold the weights bit for bit. `blockwise`: changes are rounded to `bits` per value if that is
    shorter, and what was lost is sent with the next version."""
    bits: Literal[8, 4] | None = None
    """Bits per value of the method `blockwise`; null for 8."""
    every: int = Field(default=1, ge=1)
    """Optimizer steps per version."""
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    """Data type of the published weights, to which those of training are cast."""
    adapters: Literal["alone", "merged"] | None = None
    """Published part of a model with a LoRA adapter of PEFT. `alone`: the adapter, which engines load next to their
    own base. `merged`: the weights with the adapter in them. null: all parameters, for receivers with the same PEFT
    model."""
    full_every: int = Field(default=100, ge=1)
    """Number of versions per full copy. Receivers that start, or have missed much, begin with a full copy."""
    keep_full: int = Field(default=2, ge=1)
    """Number of full copies to keep. Everything before the oldest of them is deleted."""
    max_lag: int = Field(default=8, ge=0)
    """Number of versions by which rollouts may be behind, on average, before the doctor reports them. The program tells
    it how many they are (`engine.rollout.report_lag`)."""
    asynchronous: bool = True
    """Encode and write a version in a thread during the next step, so that training only waits for a copy of the
    weights; false waits until the version is complete."""

    @property
    def lossy_bits(self) -> Literal[8, 4] | None:
        """Return the bits per value of lossy changes; None for exact ones."""
        return None if self.method == "exact" else self.bits or 8


SECTION = "deepspeed_compress"


class Parallelism(Model):
    """Division of the job's ranks. The values are written to DeepSpeed's own keys, with which they must agree."""

    zero_stage: Annotated[int, Field(ge=0, le=3)] | None = None
    """ZeRO stage, which is written to `zero_optimization.stage`; null keeps DeepSpeed's own setting."""
    tensor: int = Field(default=1, ge=1)
    """Number of ranks that share each layer. Without a pipeline it is written to `tensor_parallel.autotp_size`."""
    pipeline: int = Field(default=1, ge=1)
    """Number of pipeline stages, made by `build_parallel` or by your own `PipelineModule`. More than 1 needs ZeRO 0 or
    1."""
    partition: (
        Literal["balanced", "parameters", "uniform"]
        | Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(strict=False, min_length=2)]
    ) = "balanced"
    """Division of a model into stages by `build_parallel`: `balanced` gives each stage equally many multiplications,
    `parameters` equally many parameters, and `uniform` equally many decoder layers. A list has the number of decoder
    layers of each stage; 0 leaves a stage only the layers before the first or after the last decoder layer."""
    shard_within: Literal["node"] | Annotated[int, Field(ge=2)] | None = None
    """Hybrid sharding: ZeRO 1, 2 or 3 shards the model over this many consecutive data-parallel ranks, or over those of
    a host (`node`). Each rank then averages the gradients of its shard over the nodes once a step, which is all that
    crosses between them. null shards over all ranks."""
    activation_checkpointing: bool = False
    """Let `build_parallel` recompute the activations of decoder layers in the backward pass instead of storing them."""


class Rollback(Model):
    """Return to the last settings with which training went well, if the loss falls behind."""

    behind: float = Field(default=0.05, gt=0)
    """Distance of the smoothed loss above its best value that counts as behind, as a fraction of the best value."""
    patience: int = Field(default=100, ge=1)
    """Optimizer steps for which the loss must be behind before anything is done."""
    checkpoint: bool = False
    """Load the last complete checkpoint that this run has saved, if training falls behind although nothing is
    compressed any more. Not with `islands`."""


class Guard(Model):
    """Guard that watches gradients, loss and residuals, and weakens compression after an anomaly."""

    on_anomaly: Literal["disable", "soften", "report"] = "disable"
    """Reaction to an anomaly: `disable` sends everything uncompressed, `soften` weakens compression by one step, and
    `report` only records an event."""
    cooldown_steps: int = Field(default=50, ge=1)
    """Optimizer steps without an anomaly after which compression returns by one step."""
    window: int = Field(default=64, ge=8)
    """Number of applied optimizer steps that define the usual values. Until there are as many, only values that are not
    finite are anomalies."""
    exploding: float = Field(default=20.0, gt=1)
    """Factor above the usual gradient norm that counts as exploding: six norms in a row above it, or one norm above its
    square, are an anomaly."""
    vanishing: float = Field(default=1e-4, ge=0, lt=1)
    """Fraction of the usual gradient norm that counts as vanishing: a whole window of norms below it is an anomaly; 0
    switches the check off."""
    loss_spike: float = Field(default=0.3, gt=0)
    """Fraction above the usual loss that counts as a spike: six losses in a row above it, and above six median
    deviations, are an anomaly."""
    residual_growth: float = Field(default=10.0, gt=1)
    """Factor above the usual residual norm that counts as growth: six measurements in a row above it, or one above its
    square, are an anomaly."""
    residual_every: int = Field(default=50, ge=1)
    """Optimizer steps between measurements of the residual norm."""
    skip_steps: bool = True
    """Skip steps whose gradient norm is above the square of `exploding` times the usual one, as DeepSpeed skips steps
    that are not finite; at most five in a row."""
    full_sync_every: int = Field(default=0, ge=0)
    """Optimizer steps between full synchronizations: uncompressed steps that also send all residuals and exact weights;
    0 has none."""
    rollback: Rollback | None = None
    """Reaction if the loss stays above its best value; null does nothing."""
    dry_run: bool = False
    """Record decisions as events without carrying them out."""


class Adaptive(Model):
    """Adaptive choice of the settings that are predicted to reach a given loss first on this network."""

    candidates: Annotated[tuple[Patch, ...], Field(strict=False, min_length=1)] | None = None
    """Settings to choose from, each an object with the keys of `gradients` to change. The settings of `gradients` and
    no compression are always candidates. null chooses among `blockwise` with 8, 4, 3 and 2 bits, `sign`, and `topk` of
    10 % and 1 % with 4-bit values."""
    weights: Annotated[tuple[Patch, ...], Field(strict=False, min_length=1)] | None = None
    """Settings of weights to choose from with ZeRO 1 and 2, each an object with the keys of `weights` to change; `[{}]`
    keeps them fixed. The settings of `weights` are always a candidate. null chooses among uncompressed weights,
    `blockwise` with 8, 4 and 3 bits, and `sign` with 3 and 2 levels, if `weights` has a method with bits or signs."""
    max_error: Annotated[float, Field(gt=0, le=1)] | None = None
    """Largest relative error of the gradients sent, measured without error feedback, that a choice may have. null sets
    no limit with error feedback, where the predicted number of steps accounts for the error, and 0.3 without it."""
    probe_every: int = Field(default=100, ge=2)
    """Optimizer steps between measurements. There are more at the start, and when steps become much slower."""
    margin: float = Field(default=0.03, ge=0, lt=1)
    """Fraction of the predicted time to a loss by which another choice must be better to be taken."""
    groups: Annotated[tuple[Pattern, ...], Field(strict=False)] = ()
    """Patterns of parameter names. The parameters that match a pattern form a group with its own choice; all others
    form one more group."""


class Auto(Model):
    """Comparison of compressed with uncompressed steps at the start of a run, which keeps the faster ones.

    Four uncompressed steps, which are left to DeepSpeed, and four compressed ones take turns. It is repeated when steps
    have become much slower or faster.
    """

    steps: int = Field(default=8, ge=3)
    """Pairs of a compressed and an uncompressed step that are measured, one at each change between the kinds."""
    margin: float = Field(default=0.03, ge=0, lt=1)
    """Fraction of the time of an uncompressed step by which compressed ones must be shorter to be kept, in the median
    of the pairs. They must be shorter in more than three quarters of the pairs, too."""


class Communication(Model):
    """Settings of the messages with gradients and weights."""

    max_rate: BitRate | None = None
    """Largest rate at which all processes of a host together send the messages of this package, so that others can use
    the link; null has no limit. Messages of DeepSpeed itself are not limited."""


class Monitor(Model):
    """Statistics of the traffic: how often they are measured, and where they are written."""

    every: int = Field(default=1, ge=1)
    """Optimizer steps between measurements."""
    path: Annotated[str, Field(min_length=1)] | None = None
    """Directory for `compression.jsonl`, `events.jsonl`, and `ds_config.json`, a copy of the configuration without
    passwords and keys; null writes no files."""
    cosine_every: int = Field(default=0, ge=0)
    """Optimizer steps between comparisons of the first bucket with the true mean gradient, each of which costs one
    uncompressed fp32 all-reduce of that bucket; 0 makes none."""
    announce: bool = True
    """Print a line on rank 0 at the start: the methods, the compressed part of the model, the expected bytes of a step
    with and without compression, and the memory of residuals."""


class Lint(Model):
    """Settings of `ds-compress lint`; training ignores them."""

    ignore: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Names or codes of lint rules that do not apply to this file."""


class CompressConfig(Model):
    """Compressed communication for DeepSpeed.

    Every key has a default: `{}` is 8-bit blockwise gradients with error feedback.
    """

    preset: Literal["auto"] | None = None
    """`auto` is short for `"auto": {}` with 4-bit gradients and, where weights are gathered, 4-bit weights (8-bit ones
    with ZeRO 3). Keys that the file has stay as written. null presets nothing."""
    parallelism: Parallelism | None = None
    """Degrees of parallelism; null leaves them to DeepSpeed's own keys."""
    gradients: GradientsConfig = BlockwiseGradients()
    """Compression of gradients. `method` selects the other keys; without it, the method is `blockwise`."""
    weights: WeightsConfig = NoCompression()
    """Compression of updated weights when ranks gather them: of their differences with ZeRO 1 and 2, of the weights
    themselves with ZeRO 3."""
    activations: Activations | None = None
    """Compression of activations and their gradients between ranks that hold different parts of the model or of a
    sequence, by tensor, pipeline or sequence parallelism; null leaves them to the engine."""
    islands: Islands | None = None
    """Groups of ranks that train independently and exchange weight changes periodically; null trains all ranks
    together."""
    ownership: Literal["contiguous", "balanced"] = "contiguous"
    """Assignment of parameters to the ranks that update them, with ZeRO 1 and 2. `contiguous` is DeepSpeed's: each rank
    owns a slice of the model. `balanced` distributes parameters so that all ranks send and receive throughout the
    backward pass."""
    schedule: Schedule = Schedule()
    """Changes of the settings over the steps of training."""
    auto: Auto | None = None
    """Comparison with uncompressed steps, after which the run continues with the faster kind; null compresses from the
    first step."""
    adaptive: Adaptive | None = None
    """Automatic choice of settings during training, from measurements of the network and the gradients; null keeps the
    settings as written."""
    guard: Guard | None = None
    """Detection of anomalies, after which compression is weakened; null watches nothing."""
    checkpointing: Checkpointing | None = None
    """Checkpoints that are written in the background; null leaves saving to DeepSpeed."""
    rollout: Rollout | None = None
    """Weights for rollout workers (RL), published after each step; null publishes none."""
    communication: Communication = Communication()
    """Settings of all messages that this package sends."""
    monitor: Monitor = Monitor()
    """Statistics of the traffic."""
    on_missing_state: Literal["error", "reset"] = "error"
    """Reaction if the compression state of a loaded checkpoint is missing, damaged or from another run: `error` stops,
    and `reset` warns and starts with empty residuals."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of stochastic rounding, `qsgd`, `stochastic_linear`, `randomk` and `powersgd`."""
    lint: Lint = Lint()
    """Settings of the linter for this file."""
