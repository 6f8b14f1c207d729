"""Sampling of completions, with the log-probabilities that training needs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
class StopStrings:
    """Strings that end a completion with the token that completes one of them in its text.

    Attributes:
        strings: the strings, none of them empty.
        tokenizer: a tokenizer of transformers; needed if there are strings.
    """

    strings: tuple[str, ...] = ()
    tokenizer: Any = None

    def text(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens` before the first of the strings."""
        text = self._decode(tokens)
        places = [place for one in self.strings if (place := text.find(one)) >= 0]
        return text[: min(places, default=len(text))]

    def end(self, tokens: Sequence[int]) -> bool:
        """Return True if one of the strings is in the text of `tokens`."""
        text = self._decode(tokens)
        return any(one in text for one in self.strings)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Requests with equal ones share a batch.

    Attributes:
        max_tokens: largest number of tokens in a completion.
        temperature: divisor of the logits; 0 always takes the likeliest token.
        top_p: share of the probability from which tokens are taken, the likeliest ones first.
        stop: strings that end a completion.
    """

    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    stop: StopStrings = StopStrings()


@dataclass(frozen=True)
class Completion:
    """One sampled completion.

    Attributes:
        tokens: its token ids, without padding, with the end token if the model chose it, and all tokens of the string
            that ended it.
        logprobs: log-probability of each token at the temperature of sampling, before `top_p`.
        finished: True if the end token or a stop string ended it; False if it was cut off.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool


class _StopCriterion:
    """Criterion of `generate` that ends the rows whose text after `begin` tokens has a stop string.

    That of transformers would also find strings that begin in the prompt.

    Attributes:
        lengths: number of sampled tokens of each such row.
    """

    def __init__(self, stop: StopStrings, begin: int) -> None:
        self._stop, self._begin = stop, begin
        self.lengths: dict[int, int] = {}

    def __call__(self, tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        for row, sampled in enumerate(tokens[:, self._begin :].tolist()):
            if row not in self.lengths and self._stop.end(sampled):
                self.lengths[row] = len(sampled)
        return torch.tensor([row in self.lengths for row in range(len(tokens))], device=tokens.device)


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
    criterion = _StopCriterion(sampling.stop, longest)
    found = model.generate(
        tokens,
        attention_mask=attention.to(model.device),
        max_new_tokens=sampling.max_tokens,
        pad_token_id=pad,
        eos_token_id=end,
        stopping_criteria=[criterion] if sampling.stop.strings else None,
        return_dict_in_generate=True,
        output_logits=True,
        **_UNCHANGED,
        **(sampled if sampling.temperature else greedy),
    )
    chosen = found.sequences[:, longest:].cpu()
    logits = torch.stack(found.logits, 1).float().cpu() / (sampling.temperature or 1.0)
    logprobs = logits.log_softmax(-1).gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
    rows = enumerate(zip(chosen.tolist(), logprobs.tolist(), strict=True))
    return [_ended(*row, end, criterion.lengths.get(number)) for number, row in rows]


def _ended(tokens: list[int], logprobs: list[float], end: int | None, stopped: int | None) -> Completion:
    """Return a completion without the padding behind its end, of `stopped` tokens if a stop string ended it."""
    tokens = tokens[:stopped]
    length = tokens.index(end) + 1 if end is not None and end in tokens else len(tokens)
    return Completion(tuple(tokens[:length]), tuple(logprobs[:length]), stopped is not None or end in tokens)
