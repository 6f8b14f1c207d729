"""Train a causal language model on text files with Hugging Face Trainer.

This is an ordinary script without any compression code. The configuration asks for compression, and `ds-compress run`
adds it:

    python -m deepspeed_compress.training.data data/shakespeare
    ds-compress run --num_gpus 2 launch/run_trainer.py --deepspeed configs/huggingface/zero2_int4.json \\
        --train_files data/shakespeare --output_dir runs/trainer --max_steps 300 --learning_rate 1e-3 \\
        --per_device_train_batch_size 4 --logging_steps 10 --do_eval --use_cpu

It takes all options of TrainingArguments and those of `Options`; see --help. Omit --use_cpu on GPUs.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    HfArgumentParser,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)
from transformers.trainer_utils import get_last_checkpoint

from deepspeed_compress.training.data.corpus import text_files
from deepspeed_compress.training.data.tokens import train_tokenizer

Rows = list[dict[str, list[int]]]


@dataclass
class Options:
    """Options that TrainingArguments does not have."""

    train_files: list[str] = field(metadata={"help": "text files, or directories to search for them"})
    model: str = field(
        default="configs/models/gpt_2m.json",
        metadata={"help": "config of a new model in JSON, or a local Hugging Face directory with a trained one"},
    )
    tokenizer: str | None = field(
        default=None, metadata={"help": "directory with tokenizer.json; by default, one is trained on the files"}
    )
    block_size: int = field(default=128, metadata={"help": "tokens per sequence"})
    held_out: float = field(default=0.05, metadata={"help": "share at the end of the text that is used for evaluation"})


def main() -> None:
    """Train, evaluate if asked to, and save the model."""
    options, args = HfArgumentParser((Options, TrainingArguments)).parse_args_into_dataclasses()
    # Trainer sets the seed too, but only after the weights are drawn.
    set_seed(args.seed)
    files = text_files([Path(name) for name in options.train_files])
    tokenizer = find_tokenizer(options, args, files)
    rows = blocks(files, tokenizer, options.block_size)
    kept = len(rows) - int(len(rows) * options.held_out)
    trainer = Trainer(
        model=load_model(options.model, len(tokenizer)),
        args=args,
        train_dataset=rows[:kept],
        eval_dataset=rows[kept:],
        data_collator=default_data_collator,
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint or last_checkpoint(args.output_dir))
    trainer.save_model()
    if args.do_eval:
        metrics = trainer.evaluate()
        trainer.save_metrics("eval", {**metrics, "perplexity": math.exp(metrics["eval_loss"])})
    trainer.save_state()


def find_tokenizer(options: Options, args: TrainingArguments, files: list[Path]) -> PreTrainedTokenizerFast:
    """Return the given tokenizer, or train one with the vocabulary size of the model; the first process trains it."""
    directory = Path(options.tokenizer or Path(args.output_dir) / "tokenizer")
    with args.main_process_first(desc="tokenizer"):
        if not (directory / "tokenizer.json").is_file():
            train_tokenizer(files, directory, json.loads(Path(options.model).read_text())["vocab_size"])
    return PreTrainedTokenizerFast.from_pretrained(directory)


def blocks(files: list[Path], tokenizer: PreTrainedTokenizerFast, size: int) -> Rows:
    """Join the text of all files and cut it into rows of `size` tokens. An incomplete last row is dropped."""
    tokens = [token for file in files for token in encoded(file, tokenizer)]
    starts = range(0, len(tokens) - size + 1, size)
    return [{"input_ids": tokens[start : start + size], "labels": tokens[start : start + size]} for start in starts]


def encoded(file: Path, tokenizer: PreTrainedTokenizerFast) -> Iterator[int]:
    """Yield the tokens of `file`, followed by the end-of-sequence token."""
    yield from tokenizer(file.read_text(encoding="utf-8"))["input_ids"]
    yield tokenizer.eos_token_id


def load_model(place: str, words: int) -> AutoModelForCausalLM:
    """Load the model from a directory, or make a new one from a config with a vocabulary of `words` tokens."""
    if Path(place).is_dir():
        return AutoModelForCausalLM.from_pretrained(place)
    settings = json.loads(Path(place).read_text())
    config = AutoConfig.for_model(settings.pop("model_type"), **{**settings, "vocab_size": words})
    return AutoModelForCausalLM.from_config(config)


def last_checkpoint(directory: str) -> str | None:
    """Return the newest checkpoint of an earlier run of the same command, or None if there is none."""
    return get_last_checkpoint(directory) if Path(directory).is_dir() else None


if __name__ == "__main__":
    main()
