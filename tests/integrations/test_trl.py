"""Trainers of TRL: supervised fine-tuning and GRPO. They need the extra `trl`."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import deepspeed_compress
from tests.integrations.trainers import AUTO, INT4, LENGTH, WORDS, forget_accelerate, network, sentences, weights
from tests.support.forks import run_forks

pytestmark = pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed: pip install trl")
NONE = {"gradients": {"method": "none"}}


def tokenizer() -> Any:
    """Return a tokenizer with one token per number, and tokens for padding and the end."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(WORDS - 2)} | {"<pad>": WORDS - 2, "<end>": WORDS - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="0"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", padding_side="left")


def settings(directory: str, section: dict[str, Any] | None) -> dict[str, Any]:
    config = {**AUTO, "zero_optimization": {"stage": 2}}
    return {
        "output_dir": directory,
        "deepspeed": config if section is None else {**config, "deepspeed_compress": section},
        "use_cpu": True,
        "bf16": False,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
        "gradient_checkpointing": False,
    }


def sft(directory: str, section: dict[str, Any] | None) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = [" ".join(map(str, row["input_ids"])) for row in sentences(32)]
    args = SFTConfig(**settings(directory, section), max_length=LENGTH)
    rows = Dataset.from_dict({"text": texts})
    return SFTTrainer(network("llama"), args, train_dataset=rows, processing_class=tokenizer())


def small_numbers(completions: list[str], **_: Any) -> list[float]:
    """Return the reward of each completion: the share of numbers in the lower half of the vocabulary."""
    return [sum(int(word) < WORDS // 2 for word in text.split() if word.isdigit()) / 8 for text in completions]


def grpo(directory: str, section: dict[str, Any] | None) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    rows = Dataset.from_dict({"prompt": [f"{number} {number + 1}" for number in range(16)]})
    args = GRPOConfig(**settings(directory, section), num_generations=4, max_completion_length=8)
    return GRPOTrainer(network("llama"), small_numbers, args, train_dataset=rows, processing_class=tokenizer())


MAKERS = {"sft": sft, "grpo": grpo}


def train(rank: int, kind: str, directory: str) -> list[tuple[list[dict[str, Any]], Any]]:
    """Return the logs and parameters of training without this package, with method "none", and with 4 bits."""
    outcomes = []
    for section in (None, NONE, INT4):
        uninstall = deepspeed_compress.install() if section is not None else lambda: None
        trainer = MAKERS[kind](directory, section)
        trainer.train()
        outcomes.append((trainer.state.log_history, weights(trainer.model_wrapped)))
        uninstall()
        trainer.model_wrapped.destroy()
        forget_accelerate()
    return outcomes


@pytest.mark.parametrize("kind", MAKERS)
def test_none_matches_trl_alone_and_four_bits_train(kind: str, tmp_path: Path) -> None:
    ranks = run_forks(2, train, kind, str(tmp_path))
    for alone, none, int4 in ranks:
        assert none[1] == alone[1]
        assert int4[1] != alone[1]
    logs = [entry for entry in ranks[0][2][0] if "loss" in entry]
    assert len(logs) == 3
    assert min(entry["compression_ratio"] for entry in logs) > 12
