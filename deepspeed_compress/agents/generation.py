"""Sampling of completions, with the log-probabilities that training needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_UNCHANGED: Mapping[str, Any] = {
    "num_beams": 1,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": None,
    "bad_words_ids": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "exponential_decay_length_penalty": None,
}
"""Settings of `generate` that change the logits. A model's generation_config.json may have others, and
log-probabilities would then not be those of the distribution that is sampled from."""


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Requests with equal ones share a batch.

    Attributes:
        max_tokens: largest number of tokens in a completion.
        temperature: divisor of the logits; 0 always takes the likeliest token.
        top_p: share of the probability from which tokens are taken, the likeliest ones first.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        tokens: its token ids, without padding, with the end token if the model chose it.
        logprobs: log-probability of each token at the temperature of sampling, before `top_p`.
        finished: True if the model ended it; False if it was cut off.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


@torch.no_grad()
def complete(
    model: Any, prompts: Sequence[Sequence[int]], sampling: Sampling, pad: int, end: int | None
) -> list[Completion]:
    """Sample one completion of each prompt with `model.generate` of transformers.

    Args:
        model: a causal language model of transformers.
        prompts: token ids of each prompt.
        sampling: how to sample.
        pad: id of the padding token.
        end: id of the token that ends a completion; None if there is none.
    """
    longest = max(map(len, prompts))
    tokens = torch.tensor([[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=model.device)
    attention = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    greedy = {"do_sample": False}
    cuts = {"top_p": sampling.top_p, "top_k": 0, "min_p": None, "typical_p": 1.0}
    sampled = {"do_sample": True, "temperature": sampling.temperature, **cuts}
    found = model.generate(
        tokens,
        attention_mask=attention.to(model.device),
        max_new_tokens=sampling.max_tokens,
        pad_token_id=pad,
        eos_token_id=end,
        return_dict_in_generate=True,
        output_logits=True,
        **_UNCHANGED,
        **(sampled if sampling.temperature else greedy),
    )
    chosen = found.sequences[:, longest:].cpu()
    logits = torch.stack(found.logits, 1).float().cpu() / (sampling.temperature or 1.0)
    logprobs = logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    return [_ended(*row, end) for row in zip(chosen.tolist(), logprobs.tolist(), strict=True)]


def _ended(tokens: list[int], logprobs: list[float], end: int | None) -> Completion:
    """Return a completion without the padding behind its end."""
    finished = end in tokens
    length = tokens.index(end) + 1 if end is not None and finished else len(tokens)
    return Completion(tuple(tokens[:length]), tuple(logprobs[:length]), finished)
