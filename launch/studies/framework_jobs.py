"""Training runs of fine-tuning frameworks on a toy model: the command of each framework, and its settings."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from deepspeed_compress.config import SECTION

RANKS, STEPS, SAVE_EVERY = 2, 4, 2
SECTIONS: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "none": {"gradients": {"method": "none"}},
    "4 bits": {"gradients": {"bits": 4}},
    "resumed": {"gradients": {"bits": 4}},
}
"""Section of each variant of a run. "plain" runs without `ds-compress run`, and "resumed" continues "4 bits"."""
_TRAINER = {
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "learning_rate": 0.01,
    "lr_scheduler_type": "constant",
    "max_steps": STEPS,
    "save_steps": SAVE_EVERY,
    "logging_steps": 1,
    "report_to": "none",
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
}
"""Settings that all frameworks pass to `TrainingArguments`."""


@dataclass(frozen=True)
class Job:
    """One training run."""

    framework: str
    tuning: Literal["lora", "full"]
    stage: int
    variant: str

    @property
    def name(self) -> str:
        return f"{self.framework}-{self.tuning}-zero{self.stage}-{self.variant.replace(' ', '_')}"


@dataclass(frozen=True)
class Paths:
    """Absolute paths of a run: the toy, and the directories of its settings and of its checkpoints."""

    toy: Path
    run: Path

    @property
    def output(self) -> Path:
        return self.run / "output"

    @property
    def model(self) -> str:
        return str(self.toy / "model")

    def write(self, name: str, content: Mapping[str, Any]) -> str:
        """Write settings as JSON or YAML, and return the path."""
        file = self.run / name
        file.write_text(json.dumps(content, indent=2) if name.endswith(".json") else yaml.safe_dump(dict(content)))
        return str(file)


@dataclass(frozen=True)
class Command:
    """Command of a framework, as users type it, and environment variables that it reads."""

    words: Sequence[str]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Framework:
    """Fine-tuning framework.

    Attributes:
        package: requirement for pip.
        train: function that writes the settings of a run, and returns the command.
        merge: function that returns the command which merges an adapter into a directory; None if PEFT does it.
    """

    package: str
    train: Callable[[Job, Paths], Command]
    merge: Callable[[Paths, Path, Path], Command] | None = None


def ds_config(job: Job) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a run."""
    section = SECTIONS[job.variant]
    zero = {"stage": job.stage}
    if job.stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": zero,
    }
    return config if section is None else {**config, SECTION: section}


def _common(job: Job, paths: Paths) -> dict[str, Any]:
    checkpoint = str(paths.output / f"checkpoint-{SAVE_EVERY}")
    resume = {"resume_from_checkpoint": checkpoint} if job.variant == "resumed" else {}
    return {**_TRAINER, **resume, "output_dir": str(paths.output)}


def _train_llamafactory(job: Job, paths: Paths) -> Command:
    settings = {
        **_common(job, paths),
        "model_name_or_path": paths.model,
        "stage": "sft",
        "do_train": True,
        "finetuning_type": job.tuning,
        "dataset": "toy",
        "dataset_dir": str(paths.toy / "data"),
        "template": "default",
        "cutoff_len": 64,
        "deepspeed": paths.write("ds_config.json", ds_config(job)),
    }
    words = ("llamafactory-cli", "train", paths.write("train.yaml", settings))
    return Command(words, {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(RANKS), "DISABLE_VERSION_CHECK": "1"})


def _merge_llamafactory(paths: Paths, adapter: Path, merged: Path) -> Command:
    settings = {
        "model_name_or_path": paths.model,
        "adapter_name_or_path": str(adapter),
        "finetuning_type": "lora",
        "template": "default",
        "export_dir": str(merged),
        "export_device": "cpu",
        "infer_dtype": "float32",
    }
    words = ("llamafactory-cli", "export", paths.write("merge.yaml", settings))
    return Command(words, {"DISABLE_VERSION_CHECK": "1"})


def _train_swift(job: Job, paths: Paths) -> Command:
    settings = {
        **_common(job, paths),
        "model": paths.model,
        "model_type": "llama",
        "template": "dummy",
        "dataset": str(paths.toy / "data" / "messages.jsonl"),
        "tuner_type": job.tuning,
        "torch_dtype": "float32",
        "fp16": False,
        "max_length": 64,
        "add_version": False,
        "dataset_num_proc": 1,
        "dataloader_num_workers": 0,
        "deepspeed": paths.write("ds_config.json", ds_config(job)),
    }
    return Command(("swift", "sft", paths.write("train.yaml", settings)), {"NPROC_PER_NODE": str(RANKS)})


def _merge_swift(paths: Paths, adapter: Path, merged: Path) -> Command:
    words = ("swift", "export", "--adapters", str(adapter), "--merge_lora", "true", "--output_dir", str(merged))
    return Command(words, {})


def _train_trl(job: Job, paths: Paths) -> Command:
    accelerate = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {
            "deepspeed_config_file": paths.write("ds_config.json", ds_config(job)),
            "zero3_init_flag": job.stage == 3,
        },
        "machine_rank": 0,
        "num_machines": 1,
        "num_processes": RANKS,
    }
    adapter = {"use_peft": True, "lora_target_modules": "all-linear"} if job.tuning == "lora" else {}
    settings = {
        **_common(job, paths),
        **adapter,
        "model_name_or_path": paths.model,
        "dtype": "float32",
        "dataset_name": str(paths.toy / "data" / "text"),
        "max_length": 64,
        "gradient_checkpointing": False,
        "accelerate_config": paths.write("accelerate.yaml", accelerate),
    }
    return Command(("trl", "sft", "--config", paths.write("train.yaml", settings)), {})


def _train_axolotl(job: Job, paths: Paths) -> Command:
    settings = {
        "base_model": paths.model,
        "datasets": [{"path": str(paths.toy / "data" / "alpaca.jsonl"), "ds_type": "json", "type": "alpaca"}],
        "adapter": "lora" if job.tuning == "lora" else None,
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_linear": True,
        "sequence_len": 256,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_steps": STEPS,
        "save_steps": SAVE_EVERY,
        "logging_steps": 1,
        "learning_rate": 0.01,
        "optimizer": "adamw_torch",
        "lr_scheduler": "constant",
        "bf16": False,
        "output_dir": str(paths.output),
        "deepspeed": paths.write("ds_config.json", ds_config(job)),
    }
    words = ("axolotl", "train", paths.write("train.yaml", settings), "--launcher", "torchrun")
    return Command((*words, "--", "--nproc_per_node", str(RANKS)), {"AXOLOTL_DO_NOT_TRACK": "1"})


FRAMEWORKS: Mapping[str, Framework] = {
    "LLaMA-Factory": Framework("llamafactory==0.9.5", _train_llamafactory, _merge_llamafactory),
    "ms-swift": Framework("ms-swift==4.6.0", _train_swift, _merge_swift),
    "TRL": Framework("trl[peft]==1.16.0", _train_trl),
    "axolotl": Framework("axolotl==0.19.0", _train_axolotl),
}
"""Frameworks, by the name in the table."""
