"""Results of a trained model: sample text, and a directory that transformers loads, with its tokenizer."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerFast

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.models import save_pretrained, whole_logits
from deepspeed_compress.training.data.tokenizer import end_token, load_tokenizer
from deepspeed_compress.training.options import Options

TEMPERATURE = 0.8
TOP_K = 40


def sample_text(engine: Any, tokenizer: Tokenizer, prompt: Tensor, count: int, context: int, seed: int) -> str:
    """Return `prompt` (n,) continued by `count` tokens, as text.

    Collective: with ZeRO 3, each forward pass gathers weights from all ranks, so all must pass the same arguments. No
    key-value cache is used, and the context is at most the last `context` tokens.
    """
    engine.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = prompt[None]
    for _ in range(count):
        with torch.no_grad(), whole_logits(engine.module):
            logits = engine(input_ids=tokens[:, -context:], use_cache=False).logits[0, -1]
        tokens = torch.cat([tokens, _draw(logits, generator).to(tokens.device)[None]], dim=1)
    return str(tokenizer.decode(tokens[0].tolist()))


def _draw(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Return one of the TOP_K likeliest tokens, (1,). Rank 0 decides, so that ranks cannot diverge."""
    best = logits.float().cpu().topk(min(TOP_K, logits.numel()))
    chosen = torch.multinomial((best.values / TEMPERATURE).softmax(0), 1, generator=generator)
    drawn = best.indices[chosen].to(logits.device)
    dist.broadcast(drawn, src=0)
    return drawn


def check_export(options: Options) -> None:
    """Check that the directory of `--export` can be written, and that it holds no other model.

    Raises:
        ConfigError: if the export would overwrite a model that this run has not exported, or the directory cannot be
            written.
    """
    directory = options.export
    if directory is None:
        return
    if directory.resolve() == options.model.resolve():
        raise ConfigError(f"--export {directory}: would overwrite --model; choose another directory")
    if (directory / "config.json").exists() and not options.resume:
        raise ConfigError(f"--export {directory}: already holds a model; choose another directory, or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--export {directory}: cannot be created ({error.strerror}); choose another") from None


def export_model(engine: Any, config: PretrainedConfig, tokenizer: Path, directory: Path) -> None:
    """Write the weights, `config`, and the tokenizer in the directory `tokenizer`. Collective."""
    save_pretrained(engine, config, directory)
    if dist.get_rank() == 0:
        read_tokenizer(tokenizer).save_pretrained(directory)


def read_tokenizer(directory: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer with its own configuration, or with only the end-of-document token if it has none."""
    if (directory / "tokenizer_config.json").is_file():
        loaded: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)
        return loaded
    tokenizer = load_tokenizer(directory)
    end = tokenizer.id_to_token(end_token(directory, tokenizer))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end)
