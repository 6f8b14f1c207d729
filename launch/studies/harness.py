"""Harness of the studies: options, the text that is encoded once for all runs, kept results, and tables."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from deepspeed_compress.errors import CompressError, DataError
from deepspeed_compress.models import read_model_config
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.training.data.corpus import text_files
from deepspeed_compress.training.data.tokens import build_cache, cache_key, train_tokenizer

ROOT = Path(__file__).parents[2]
CPU: Mapping[str, str] = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Environment of runs on this machine."""


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows the docstring of a study with its examples."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_text_options(
    parser: argparse.ArgumentParser, model: str = "configs/models/gpt_10m.json", required: bool = True
) -> None:
    """Add the options of a study that trains a model on a text."""
    add = parser.add_argument
    add("--data", type=Path, nargs="+", required=required, help="text files or directories")
    add("--output-dir", type=Path, required=required, metavar="DIR", help="directory for runs and results")
    add("--model", type=Path, default=Path(model), help="config of the model (default: %(default)s)")


def add_run_options(parser: argparse.ArgumentParser, steps: int, seeds: Sequence[int] = ()) -> None:
    """Add the options of runs, which differ in their seeds if there are several."""
    if seeds:
        parser.add_argument("--seeds", type=int, nargs="+", default=list(seeds), help="(default: %(default)s)")
    parser.add_argument("--steps", type=positive_integer, default=steps, help="(default: %(default)s)")
    parser.add_argument("--seq-len", type=positive_integer, default=64, help="tokens of a sequence (default: 64)")


def cache_dir(options: argparse.Namespace) -> Path:
    """Return the directory of the tokens."""
    path: Path = options.output_dir / "tokenizer" / "tokens"
    return path


def prepare_data(options: argparse.Namespace) -> str:
    """Train the tokenizer and encode the text unless that is done. Return the key of the tokens."""
    files, tokenizer = text_files(options.data), options.output_dir / "tokenizer"
    if not (tokenizer / "tokenizer.json").is_file():
        train_tokenizer(files, tokenizer, read_model_config(options.model).vocab_size)
    key = cache_key(files, tokenizer)
    build_cache(files, tokenizer, cache_dir(options), key)
    return key


def run_study(
    study: Callable[[argparse.Namespace], bool], options: argparse.Namespace, environment: Mapping[str, str] = CPU
) -> int:
    """Run a study, which returns True if all of its runs are finished. Return the exit status.

    It is 0, 1 if a run failed, or 2 if an option is wrong.
    """
    # Set these before the processes of the runs import torch.
    os.environ |= environment
    try:
        return 0 if study(options) else 1
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def read_result(file: Path, key: str, wanted: Any) -> dict[str, Any] | None:
    """Return the result of a finished run, or None. Its description, a dataclass, is under `key`.

    Raises:
        DataError: The run was made with other options than `wanted`.
    """
    if not file.is_file():
        return None
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    described: Mapping[str, Any] = json.loads(json.dumps(asdict(wanted)))
    differing = ", ".join(name for name, value in described.items() if result[key].get(name) != value)
    if differing:
        raise DataError(f"{file}: made with another {differing}; remove it, or use another --output-dir")
    return result


def tracked(runs: Sequence[Any]) -> Iterable[Any]:
    """Yield runs, with a progress bar."""
    return track(runs, "runs", console=Console(stderr=True))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown. The first column is text."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
