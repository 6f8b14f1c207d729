"""Command line of the training program."""

import argparse
import dataclasses
from pathlib import Path
from textwrap import dedent

from deepspeed_compress.tools.arguments import integer_from, share

EXAMPLES = """
examples:
  train with two processes on this machine's CPU (DS_ACCELERATOR=cpu) or on two GPUs:
    deepspeed --num_gpus 2 launch/train_gpt.py --deepspeed_config configs/zero2_int4.json \\
        --data data/shakespeare --model configs/models/gpt_2m.json --output-dir runs/int4 --steps 300

  resume from the newest checkpoint of runs/int4 (the same command with --resume):
    deepspeed --num_gpus 2 launch/train_gpt.py --deepspeed_config configs/zero2_int4.json \\
        --data data/shakespeare --model configs/models/gpt_2m.json --output-dir runs/int4 --steps 600 \\
        --save-every 100 --resume

  train a pipeline of two stages with four processes, and export the model for AutoModelForCausalLM:
    deepspeed --num_gpus 4 launch/train_gpt.py --deepspeed_config configs/pipeline2_zero1_int4.json \\
        --data data/shakespeare --output-dir runs/pipeline --steps 300 --export runs/pipeline/model

  train in one process, without a launcher:
    python launch/train_gpt.py --deepspeed_config configs/zero2_none.json --data my.txt --output-dir runs/one
"""
MODEL = Path("configs/models/gpt_2m.json")


@dataclasses.dataclass(frozen=True)
class Options:
    """Values of the command-line options, named as in --help."""

    deepspeed_config: str
    data: tuple[Path, ...]
    output_dir: Path
    model: Path
    tokenizer: Path
    cache_dir: Path
    vocab_size: int | None
    held_out: float
    steps: int
    seq_len: int
    seed: int
    eval_every: int
    eval_batches: int
    save_every: int
    log_every: int
    export: Path | None
    resume: bool
    local_rank: int


def parse_options(argv: list[str] | None = None) -> Options:
    """Return the options from `argv`, or from sys.argv. Exits with status 2 if they are wrong."""
    parser = argparse.ArgumentParser(
        prog="train_gpt.py",
        description="Train a Hugging Face causal language model with DeepSpeed and compressed gradients.",
        epilog=dedent(EXAMPLES),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    _add_run(parser.add_argument_group("what to train"))
    _add_length(parser.add_argument_group("length and output"))
    launchers = parser.add_argument_group("options of launchers")
    launchers.add_argument("--local_rank", "--local-rank", type=int, default=-1, help="set by the deepspeed launcher")
    what = "accepted for launchers that pass it; it has no effect"
    launchers.add_argument("--deepspeed", action="store_true", help=what)
    values = vars(parser.parse_args(argv))
    values.pop("deepspeed")
    output_dir: Path = values["output_dir"]
    values["tokenizer"] = values["tokenizer"] or output_dir / "tokenizer"
    values["cache_dir"] = values["cache_dir"] or values["tokenizer"] / "tokens"
    return Options(**values | {"data": tuple(values["data"])})


def _add_run(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--deepspeed_config", required=True, metavar="FILE", help="DeepSpeed configuration, JSON or HJSON")
    add("--data", type=Path, nargs="+", required=True, metavar="PATH", help="text files or directories: .txt, .jsonl")
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for the results of the run")
    what = "model config in JSON, or a local Hugging Face directory (default %(default)s)"
    add("--model", type=Path, default=MODEL, metavar="PATH", help=what)
    what = "directory with a tokenizer.json; trained when missing (default OUTPUT_DIR/tokenizer)"
    add("--tokenizer", type=Path, metavar="DIR", help=what)
    what = "vocabulary size of a tokenizer that is trained (default: the model's)"
    add("--vocab-size", type=integer_from(257), metavar="N", help=what)
    add("--cache-dir", type=Path, metavar="DIR", help="directory for the encoded text (default TOKENIZER/tokens)")
    what = "share at the end of each file that is used only for evaluation (default %(default)s)"
    add("--held-out", type=share, default=0.05, metavar="SHARE", help=what)


def _add_length(group: argparse._ArgumentGroup) -> None:
    counts = [
        ("--steps", 300, 0, "total optimizer steps, including those before a resume"),
        ("--seq-len", 128, 2, "tokens in a sequence"),
        ("--seed", 0, 0, "seed of the weights, the batches and dropout"),
        ("--eval-every", 50, 0, "steps between evaluations; 0 evaluates only at the end"),
        ("--eval-batches", 8, 1, "held-out batches of train_batch_size in an evaluation"),
        ("--save-every", 0, 0, "steps between checkpoints, with one at the end; 0 saves none"),
        ("--log-every", 10, 1, "steps between lines of metrics.jsonl"),
    ]
    for name, default, least, text in counts:
        what = f"{text} (default {default})"
        group.add_argument(name, type=integer_from(least), default=default, metavar="N", help=what)
    what = "write the trained model and its tokenizer as a Hugging Face directory (default: not written)"
    group.add_argument("--export", type=Path, metavar="DIR", help=what)
    what = "resume from the newest checkpoint in OUTPUT_DIR, or start at step 0 if there is none"
    group.add_argument("--resume", action="store_true", help=what)
