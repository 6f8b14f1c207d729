"""Workloads and contenders: what is computed, and the DeepSpeed configuration of each system that is compared."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION, check_world, expand, parse_section
from deepspeed_compress.config import read_ds_config as read_file
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import TENSOR
from deepspeed_compress.errors import ConfigError

DEEPSPEED, OURS, COMPUTE_ONLY = "deepspeed", "compressed", "compute-only"
_MONITORS = ("tensorboard", "wandb", "csv_monitor", "comet")
_RAMPS = ("warmup_steps", "density_warmup_steps")


@dataclass(frozen=True)
class Workload:
    """Work that every contender does in a step, so that their times can be compared.

    A step has `accumulation` micro-batches of `micro_batch` sequences per data-parallel replica, which consists of
    `tensor` x `pipeline` x `sequence` ranks. With a `lora_rank`, only LoRA's adapters of that rank are trained.
    """

    model: str
    tensor: int
    pipeline: int
    partition: Any
    recompute: bool
    precision: str
    micro_batch: int
    accumulation: int
    clipping: float
    seq_len: int
    seed: int
    sequence: int = 1
    lora_rank: int = 0

    @property
    def share(self) -> tuple[int, int]:
        """Return the micro-batches, and the sequences in each, of one process if all of them divide a batch equally.

        Raises:
            ConfigError: The batch cannot be divided equally.
        """
        sequences, needed = self.micro_batch * self.accumulation, self.tensor * self.pipeline * self.sequence
        if sequences % needed:
            found = f"{self.micro_batch} sequences x {self.accumulation} micro-batches"
            ranks = f"the {needed} ranks of a replica"
            raise ConfigError(f"--micro-batch: {found} are not a multiple of {ranks}; write {needed}, for example")
        share = sequences // needed
        size = self.micro_batch if share % self.micro_batch == 0 else share
        return share // size, size


@dataclass(frozen=True)
class Contender:
    """System that is compared with others.

    Attributes:
        name: Name to display.
        kind: Row of the table that creates it.
        ds_config: DeepSpeed configuration, or None if DeepSpeed is not used.
    """

    name: str
    kind: str
    ds_config: dict[str, Any] | None = None


@dataclass(frozen=True)
class Group:
    """Contenders of one workload, measured in the same processes one after the other."""

    workload: Workload
    contenders: tuple[Contender, ...]

    def to_job(self, steps: Mapping[str | None, int], bare: bool = True) -> dict[str, Any]:
        """Return the job of `step_rank`.

        Args:
            steps: Measured steps at each rate.
            bare: Whether the bare model is measured, too.
        """
        settings = {"rates": list(steps), "steps": list(steps.values()), "bare": bare}
        return {"measure": "steps", "group": asdict(self), **settings}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> "Group":
        contenders = tuple(Contender(**contender) for contender in found["contenders"])
        return cls(Workload(**found["workload"]), contenders)


def group_contenders(
    files: Sequence[str], model: str, peers: Sequence[str], sizes: Mapping[str, Any], ranks: int
) -> list[Group]:
    """Return the groups of the configurations `files` on `ranks` ranks.

    Args:
        files: Paths of the configurations.
        model: Path of the model.
        peers: Names of the peers to compare with.
        sizes: `micro_batch` (or None), `seq_len`, `seed`, and perhaps `lora_rank`.
        ranks: Number of ranks.

    Raises:
        ConfigError: A file is invalid, has no section, or does not specify its batch.
    """
    groups: dict[str, tuple[Workload, list[Contender]]] = {}
    for file in files:
        ds_config = read_file(file)
        try:
            workload = _workload(ds_config, model, sizes, ranks)
            given = _effective(ds_config, workload)
            plain = without_section(given)
        except ConfigError as error:
            raise ConfigError(f"--config {file}: {error}") from error
        _, contenders = groups.setdefault(repr(workload), (workload, []))
        found = [Contender(DEEPSPEED, DEEPSPEED, plain)] if DEEPSPEED in peers else []
        found.append(Contender(Path(file).stem, OURS, given))
        contenders += [contender for contender in found if contender not in contenders]
    others = [Contender(peer, peer) for peer in peers if peer != DEEPSPEED]
    if others and any(workload.sequence > 1 for workload, _ in groups.values()):
        raise ConfigError(f"--peers {others[0].name}: cannot divide sequences; write deepspeed, or leave --peers out")
    return [Group(workload, (*sorted(contenders, key=_place), *others)) for workload, contenders in groups.values()]


def stage_of(ds_config: Mapping[str, Any] | None) -> int | None:
    """Return the ZeRO stage of a DeepSpeed configuration, or None without one."""
    if ds_config is None:
        return None
    stage: int = without_section(ds_config).get("zero_optimization", {}).get("stage", 0)
    return stage


def without_section(ds_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `ds_config` without compression. The section's parallelism is kept in DeepSpeed's own keys."""
    written = ds_config.get(SECTION, {})
    section = {"parallelism": written.get("parallelism"), "gradients": {"method": "none"}}
    plain = dict(ds_config) | {SECTION: section}
    return {key: value for key, value in expand(plain, parse_section(plain)).items() if key != SECTION}


def _workload(ds_config: Mapping[str, Any], model: str, sizes: Mapping[str, Any], ranks: int) -> Workload:
    if SECTION not in ds_config:
        raise ConfigError(f'has no /{SECTION}, so there is nothing to compare; write "{SECTION}": {{}}')
    section = parse_section(ds_config)
    parallelism = section.parallelism or Parallelism()
    sequence = ds_config.get("sequence_parallel_size", 1)
    replicas = check_world(section, ranks, ds_config) // sequence
    micro_batch, accumulation = _batch(ds_config, sizes["micro_batch"], replicas)
    tensor, lora_rank = TENSOR.effective(ds_config, parallelism), sizes.get("lora_rank", 0)
    if lora_rank and tensor * parallelism.pipeline > 1:
        raise ConfigError("--lora-rank: adapters need whole layers; leave out tensor and pipeline parallelism")
    return Workload(
        model=model,
        tensor=tensor,
        pipeline=parallelism.pipeline,
        partition=parallelism.partition,
        recompute=parallelism.activation_checkpointing,
        precision=next((name for name in ("bf16", "fp16") if ds_config.get(name, {}).get("enabled")), "fp32"),
        micro_batch=micro_batch,
        accumulation=accumulation,
        clipping=ds_config.get("gradient_clipping", 0.0),
        seq_len=sizes["seq_len"],
        seed=sizes["seed"],
        sequence=sequence,
        lora_rank=lora_rank,
    )


def _batch(ds_config: Mapping[str, Any], micro_batch: int | None, replicas: int) -> tuple[int, int]:
    """Return the sequences of a micro-batch and the micro-batches of a step.

    As in DeepSpeed, two of the three batch keys determine the third.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, steps = (ds_config.get(name) for name in names)
    if micro_batch is not None:
        return micro_batch, steps if isinstance(steps, int) else 1
    if isinstance(micro, int):
        given = steps if isinstance(steps, int) else None
        return micro, given or (max(1, whole // (micro * replicas)) if isinstance(whole, int) else 1)
    if isinstance(whole, int):
        steps = steps if isinstance(steps, int) else 1
        return max(1, whole // (steps * replicas)), steps
    raise ConfigError(f"/{names[1]} is {micro!r}; write a number, or pass --micro-batch N")


def _effective(ds_config: Mapping[str, Any], workload: Workload) -> dict[str, Any]:
    """Return the configuration used for measurements: the file in its steady state, without logging.

    Dense and density warm-ups are removed, because steps are measured from the start. `monitor/every` 1 makes the
    clocks run in every step; nothing is written.
    """
    section = _steady(ds_config[SECTION]) | {"monitor": {"every": 1}}
    kept = {key: value for key, value in ds_config.items() if key not in (*_MONITORS, "train_batch_size")}
    batch = {
        "train_micro_batch_size_per_gpu": workload.micro_batch,
        "gradient_accumulation_steps": workload.accumulation,
    }
    return kept | batch | {"steps_per_print": 10**9, SECTION: section}


def _steady(value: Any) -> Any:
    """Return `value` without the keys of warm-ups at any depth."""
    if isinstance(value, list):
        return [_steady(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _steady(item) for key, item in value.items() if key not in _RAMPS}


def _place(contender: Contender) -> tuple[int | None, bool]:
    """Return the sort key of a contender: the stage, then plain DeepSpeed first."""
    return stage_of(contender.ds_config), contender.kind == OURS
