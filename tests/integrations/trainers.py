"""Training of toy models with Hugging Face Trainer, with and without compression, for the tests of integrations."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import deepspeed_compress
from deepspeed_compress.config import SECTION
from tests.support.jobs import weights

WORDS = 64
LENGTH = 16
AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "train_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto", "torch_adam": True},
    },
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
}
"""DeepSpeed configuration that transformers recommends: every value that Trainer also knows is "auto"."""
INT4 = {"gradients": {"bits": 4}, "monitor": {"every": 1}}
BY_LENGTH: Mapping[str, Any] = (
    {"train_sampling_strategy": "group_by_length"}
    if int(transformers.__version__.split(".")[0]) >= 5
    else {"group_by_length": True}
)
"""Arguments with which Trainer puts sequences of similar length into a batch."""
WARMUP: Mapping[str, Any] = {} if Version(transformers.__version__) >= Version("5.23") else {"warmup_steps": 1}
"""DeepSpeed 0.19.3 and newer refuse schedulers without a warmup, which transformers 5.0 and older write by default."""
SAVING = {"save_strategy": "steps", "save_steps": 2}


@dataclass(frozen=True)
class Job:
    """One training run.

    With `section` None, Trainer runs without this package. `args` are for TrainingArguments, and `extra` are DeepSpeed
    keys.
    """

    directory: str
    stage: int = 2
    section: Mapping[str, Any] | None = None
    args: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    model: str = "gpt2"
    resume: bool = False

    def ds_config(self) -> dict[str, Any]:
        zero = {"stage": self.stage, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 0}
        config = {**AUTO, "zero_optimization": zero, **self.extra}
        return config if self.section is None else {**config, SECTION: dict(self.section)}

    def arguments(self) -> TrainingArguments:
        settings = {
            "output_dir": self.directory,
            "deepspeed": self.ds_config(),
            "use_cpu": True,
            "max_steps": 4,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-2,
            "logging_steps": 1,
            "save_strategy": "no",
            "disable_tqdm": True,
            "report_to": "none",
            **WARMUP,
            **self.args,
        }
        return TrainingArguments(**settings)


@dataclass(frozen=True)
class Outcome:
    """Results of one rank: its parameters (gathered with ZeRO 3) as lists, and the logs of Trainer."""

    parameters: dict[str, list[float]]
    logs: list[dict[str, Any]]

    def of(self, key: str) -> list[float]:
        """Return the values of `key` in the logs that have it."""
        return [entry[key] for entry in self.logs if key in entry]


def network(kind: str) -> Any:
    """Return a toy causal language model without dropout, which is the same on every rank."""
    torch.manual_seed(0)
    if kind == "llama":
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, **sizes))
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2, **off))


def sentences(count: int, varied: bool = False) -> list[dict[str, list[int]]]:
    """Return counting sequences, which a model learns fast; with `varied`, they have several lengths."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.randint(0, WORDS, (count,), generator=generator).tolist()
    lengths = [LENGTH - 4 * (index % 3) if varied else LENGTH for index in range(count)]
    return [
        {"input_ids": [(start + offset) % WORDS for offset in range(length)]}
        for start, length in zip(starts, lengths, strict=True)
    ]


def collate(rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    """Pad the rows on the right. Padding has no labels."""
    longest = max(len(row["input_ids"]) for row in rows)
    ids = torch.tensor([row["input_ids"] + [0] * (longest - len(row["input_ids"])) for row in rows])
    real = torch.tensor([[index < len(row["input_ids"]) for index in range(longest)] for row in rows])
    return {"input_ids": ids, "attention_mask": real.long(), "labels": ids.masked_fill(~real, -100)}


def trainer_of(job: Job) -> Trainer:
    """Return a Trainer, made as a user would make it."""
    args = job.arguments()
    varied = BY_LENGTH.items() <= job.args.items()
    return Trainer(
        network(job.model),
        args,
        data_collator=collate,
        train_dataset=sentences(48, varied),
        eval_dataset=sentences(8),
    )


def train(rank: int, *jobs: Job) -> list[Outcome]:
    """Run the jobs one after the other in this rank, each after `install()` if it has a section."""
    return [train_one(job) for job in jobs]


def train_one(job: Job) -> Outcome:
    uninstall = deepspeed_compress.install() if job.section is not None else lambda: None
    trainer = trainer_of(job)
    trainer.train(resume_from_checkpoint=job.resume or None)
    assert ("compression" in vars(trainer.model_wrapped)) == (job.section is not None)
    outcome = Outcome(weights(trainer.model_wrapped), trainer.state.log_history)
    uninstall()
    trainer.model_wrapped.destroy()
    forget_accelerate()
    return outcome


def forget_accelerate() -> None:
    """Reset Accelerate's global state, so that the next run begins as in a new process."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()


def keep_checkpoint(directory: str, step: int) -> None:
    """Remove all checkpoints except that of `step`, as if the run had been killed after it."""
    for path in Path(directory).glob("checkpoint-*"):
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path)


def statistics_lines(directory: str) -> list[str]:
    """Return the lines of compression.jsonl."""
    return (Path(directory) / "compression.jsonl").read_text(encoding="utf-8").splitlines()


def train_with_accelerate(accelerator: Any, directory: str, resumed: bool) -> Any:
    """Train eight steps and save after four, or, if `resumed`, train the last four. Return the prepared model."""
    model: Any = network("gpt2")
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows: Any = sentences(64)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=4, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if resumed:
        accelerator.load_state(directory)
    for step, batch in enumerate(loader):
        if resumed and step < 4:
            continue
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            accelerator.save_state(directory)
    return model
