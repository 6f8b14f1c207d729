"""Train a small model by TRL's GRPO with 4-bit gradients, and publish its weights as exact changes.

    torchrun --nproc_per_node 2 -m launch.train_trl --output-dir runs/trl

Each rank samples its completions in process, on the CPU. The model first learns sums of two numbers from supervised
steps, and then from rewards. Needs TRL: pip install -e ".[trl,rollout]". See docs/huggingface.md.
"""

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import deepspeed_compress
from launch.agents.sums import Sum, make_model, make_tokenizer, reward, sums, teach


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small model by TRL's GRPO with compressed gradients.")
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for all files of the run")
    add("--supervised-steps", type=int, default=300, metavar="N", help="steps before rewards; default: 300")
    add("--steps", type=int, default=20, metavar="N", help="steps of GRPO; default: 20")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    return parser.parse_args(argv)


def ds_config(weights: Path) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
        "deepspeed_compress": {"gradients": {"bits": 4}, "rollout": {"directory": str(weights)}},
    }


def rewards(completions: list[str], first: list[int], second: list[int], **_: Any) -> list[float]:
    """Return the reward of each completion, as TRL calls it with the columns of the data set."""
    answers = [text.replace("<end>", "").strip() for text in completions]
    return [reward(Sum(*task), answer) for *task, answer in zip(first, second, answers, strict=True)]


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    # Before TrainingArguments, so that Trainer attaches the section.
    deepspeed_compress.install()
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model = make_model(options.seed)
    for _ in teach(model, options.supervised_steps, options.seed):
        pass
    tasks = [
        {"prompt": one.question, "first": one.first, "second": one.second} for one in islice(sums(options.seed), 2000)
    ]
    args = GRPOConfig(
        output_dir=str(options.output_dir),
        deepspeed=ds_config(options.output_dir / "weights"),
        use_cpu=True,
        bf16=False,
        max_steps=options.steps,
        per_device_train_batch_size=64,
        num_generations=8,
        max_completion_length=4,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        activation_checkpointing=False,
        seed=options.seed,
    )
    trainer = GRPOTrainer(model, rewards, args, Dataset.from_list(tasks), processing_class=make_tokenizer())
    trainer.train()
    published = trainer.model_wrapped.rollout.wait()
    if trainer.is_world_process_zero():
        found = [float(entry["reward"]) for entry in trainer.state.log_history if "reward" in entry]
        first, last = fmean(found[:5]), fmean(found[-5:])
        print(f"reward {first:.2f} in the first steps, {last:.2f} in the last ones")
        print(f"version {published.version}: {published.change_bytes / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
