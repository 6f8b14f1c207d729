"""Toy Llama with tokenizer and data for fine-tuning frameworks, and a check of what they have saved.

The study `frameworks` runs this module with the Python of a framework's environment:

    python -m launch.studies.framework_toy make DIR
    python -m launch.studies.framework_toy merge BASE ADAPTER MERGED
    python -m launch.studies.framework_toy check BASE SAVED [MERGED]
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROWS = 64
SUBJECTS = ("king", "queen", "fool", "ghost", "nurse", "friar", "prince", "witch")
VERBS = ("sees", "hears", "fears", "loves", "mocks", "follows")
SHAPES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
}


def main(arguments: Sequence[str]) -> None:
    """Make the toy, or print the result of the check as JSON."""
    task, *paths = arguments
    if task == "make":
        make(Path(paths[0]))
    elif task == "merge":
        _load(*paths[:2]).merge_and_unload().save_pretrained(paths[2])
    else:
        print(json.dumps(check(*paths)))


def make(directory: Path) -> None:
    """Write `model` with weights and tokenizer, and `data` with the same rows in the format of each framework."""
    data = directory / "data"
    data.mkdir(parents=True, exist_ok=True)
    rows = list(_rows())
    # TRL reads a directory of files, LLaMA-Factory its own table of contents, and ms-swift a file.
    texts = [{"text": f"{row['instruction']} {row['output']}"} for row in rows]
    messages = [
        {"messages": [_message("user", row["instruction"]), _message("assistant", row["output"])]} for row in rows
    ]
    for name, content in (("text/train", texts), ("alpaca", rows), ("messages", messages)):
        file = data / f"{name}.jsonl"
        file.parent.mkdir(exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in content))
    (data / "dataset_info.json").write_text(json.dumps({"toy": {"file_name": "alpaca.jsonl"}}))
    _save_model(directory / "model", [row["text"] for row in texts])


def _rows() -> Any:
    numbers = random.Random(0)
    for _ in range(ROWS):
        subject, verb, other = numbers.choice(SUBJECTS), numbers.choice(VERBS), numbers.choice(SUBJECTS)
        yield {"instruction": f"Who {verb} the {other}?", "input": "", "output": f"The {subject} {verb} the {other}."}


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _save_model(directory: Path, texts: Sequence[str]) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=list(special.values()), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
    fast.save_pretrained(directory)
    torch.manual_seed(0)
    ids = {f"{name}_id": getattr(fast, f"{name}_id") for name in special}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(fast), **SHAPES, **ids)).save_pretrained(directory)


def check(base: str, saved: str, merged: str = "") -> dict[str, float]:
    """Load what training has saved, and compare the logits of an adapter with those of its merged model.

    Returns:
        `change`: largest difference of logits to the base model; `merged`: the same between adapter and merged model.
    """
    before, after = _logits(base), _logits(base, saved)
    found = {"change": float((after - before).abs().max())}
    if merged:
        found["merged"] = float((_logits(merged) - after).abs().max())
    return found


def _logits(model: str, saved: str = "") -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = _load(model, saved).eval()(input_ids=torch.arange(32)[None]).logits
    return logits


def _load(model: str, saved: str = "") -> Any:
    """Return a model, or the one with all its parameters or an adapter that a run has saved."""
    from transformers import AutoModelForCausalLM

    is_adapter = bool(saved) and (Path(saved) / "adapter_config.json").is_file()
    network = AutoModelForCausalLM.from_pretrained(model if is_adapter or not saved else saved).float()
    if not is_adapter:
        return network
    from peft import PeftModel

    return PeftModel.from_pretrained(network, saved)


if __name__ == "__main__":
    main(sys.argv[1:])
