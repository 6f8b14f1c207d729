"""Sums of two numbers: tasks with a reward that a program can check, for a small model that reads characters."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

CHARACTERS = "0123456789+="
PAD, END = len(CHARACTERS), len(CHARACTERS) + 1
LARGEST = 99
LENGTH = len(f"{LARGEST}+{LARGEST}={2 * LARGEST}") + 1
"""Largest number of tokens of a task, its answer, and the end token."""
LAYERS = 4
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Chat template: the contents of messages."""


@dataclass(frozen=True)
class Sum:
    """A task: the sum of two numbers."""

    first: int
    second: int

    @property
    def question(self) -> str:
        return f"{self.first}+{self.second}="

    @property
    def answer(self) -> str:
        return str(self.first + self.second)


def sums(seed: int) -> Iterator[Sum]:
    """Yield random sums."""
    numbers = random.Random(seed)
    while True:
        yield Sum(numbers.randint(0, LARGEST), numbers.randint(0, LARGEST))


def reward(task: Sum, answer: str) -> float:
    """Return 1 for the right answer, else half of the share of its digits that are right."""
    if answer == task.answer:
        return 1.0
    digits = zip(reversed(answer), reversed(task.answer), strict=False)
    return 0.5 * sum(one == other for one, other in digits) / max(len(answer), len(task.answer))


def encode(text: str) -> list[int]:
    """Return the token ids of `text`."""
    return [CHARACTERS.index(character) for character in text]


def make_tokenizer() -> Any:
    """Return a tokenizer of transformers with one token for each character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: number for number, character in enumerate(CHARACTERS)} | {"<pad>": PAD, "<end>": END}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    plain.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<end>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **special, padding_side="left", chat_template=TEMPLATE)


def make_model(seed: int, width: int = 128, layers: int = LAYERS) -> Any:
    """Return a new GPT-2 with `12 * layers * width ** 2` parameters in its layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    sizes = {"n_positions": 2 * LENGTH, "n_embd": width, "n_layer": layers, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=END + 1, bos_token_id=END, eos_token_id=END, **sizes, **dropout))


def teach(model: Any, steps: int, seed: int, batch: int = 64) -> Iterator[float]:
    """Take supervised steps on right answers, and yield the loss of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tasks = sums(seed)
    for _ in range(steps):
        loss = model(**_examples([next(tasks) for _ in range(batch)])).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _examples(tasks: list[Sum]) -> dict[str, torch.Tensor]:
    tokens, labels = torch.full((len(tasks), LENGTH), PAD), torch.full((len(tasks), LENGTH), -100)
    for row, task in enumerate(tasks):
        question, answer = encode(task.question), [*encode(task.answer), END]
        end = len(question) + len(answer)
        tokens[row, :end] = torch.tensor([*question, *answer])
        labels[row, len(question) : end] = torch.tensor(answer)
    return {"input_ids": tokens, "labels": labels}


def save(model: Any, directory: Path) -> None:
    """Write the model and its tokenizer for transformers."""
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
