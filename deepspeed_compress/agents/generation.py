"""Sampling of completions, with the log-probabilities that training needs."""

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.session.patches import replaced

_GREEDY_BELOW = 1e-5
"""Temperature below which the likeliest token is taken, as in vLLM. Divided by it, logits could be infinite."""


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
        places = [place for string in self.strings if (place := text.find(string)) >= 0]
        return text[: min(places, default=len(text))]

    def end(self, tokens: Sequence[int]) -> bool:
        """Return True if one of the strings is in the text of `tokens`."""
        text = self._decode(tokens)
        return any(string in text for string in self.strings)

    def _decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling. Requests with equal ones share a batch.

    Attributes:
        max_tokens: largest number of tokens in a completion.
        temperature: divisor of the logits; 0, or less than 1e-5, always takes the likeliest token.
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


def end_tokens(model: Any, end: int | Iterable[int] | None) -> frozenset[int]:
    """Return the ids of all tokens that end a completion: `end`, and those of the model's configurations.

    A tokenizer names one token, but chat models may end a turn with another one, which generation_config.json lists.
    """
    settings = (model.config.get_text_config(), model.generation_config)
    found = (end, *(getattr(setting, "eos_token_id", None) for setting in settings))
    return frozenset().union(*map(_ids, found))


def _ids(end: int | Iterable[int] | None) -> Iterable[int]:
    if end is None:
        return ()
    return (end,) if isinstance(end, int) else end


class _Steps:
    """Parts of `generate` that are called in each of its steps, and keep nothing that grows with the vocabulary.

    As a criterion, it ends the rows that are canceled, and those whose text after `begin` tokens has a stop string.
    The criterion of transformers would also find strings that begin in the prompt.

    Attributes:
        logprobs: log-probabilities of the tokens of each step, of shape [B].
        lengths: number of sampled tokens of each row that a stop string ended.
    """

    def __init__(self, sampling: Sampling, begin: int, canceled: Callable[[int], bool]) -> None:
        self._stop, self._begin, self._canceled = sampling.stop, begin, canceled
        self._temperature = sampling.temperature if sampling.temperature >= _GREEDY_BELOW else 1.0
        self._logits = torch.empty(0)
        self.logprobs: list[Tensor] = []
        self.lengths: dict[int, int] = {}

    def keep_logits(self, tokens: Tensor, logits: Tensor) -> Tensor:
        """Keep the logits of this step, of shape [B, V], until its tokens are chosen. Return them unchanged."""
        self._logits = logits.float() / self._temperature
        return logits

    def __call__(self, tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        chosen = self._logits.gather(-1, tokens[:, -1:]).squeeze(-1)
        self.logprobs.append(chosen - self._logits.logsumexp(-1))
        if self._stop.strings:
            for row, sampled in enumerate(tokens[:, self._begin :].tolist()):
                if row not in self.lengths and self._stop.end(sampled):
                    self.lengths[row] = len(sampled)
        ended = [row in self.lengths or self._canceled(row) for row in range(len(tokens))]
        return torch.tensor(ended, device=tokens.device)


def _never(_: int) -> bool:
    return False


@torch.no_grad()
def complete(
    model: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    pad: int | None,
    end: int | Iterable[int] | None,
    canceled: Callable[[int], bool] = _never,
) -> list[Completion]:
    """Sample one completion of each prompt with `model.generate` of transformers.

    Args:
        model: a causal language model of transformers.
        prompts: token ids of each prompt.
        sampling: how to sample.
        pad: id of the padding token; None if the tokenizer has none. The model does not attend to padding.
        end: ids of the tokens that end a completion, or one id; None if there is none. See `end_tokens`.
        canceled: tells after each token if the completion of a prompt, by its number, is no longer needed. It then ends
            early.
    """
    from transformers import GenerationConfig

    ends, padding, longest = frozenset(_ids(end)), pad or 0, max(map(len, prompts))
    rows = [[padding] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    attention = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings: dict[str, Any] = {"max_new_tokens": sampling.max_tokens, "pad_token_id": padding}
    if sampling.temperature >= _GREEDY_BELOW:
        settings |= {"do_sample": True, "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
    steps = _Steps(sampling, longest, canceled)
    # Settings of the model's own generation_config.json may change what is sampled. Log-probabilities would then not be
    # those of the distribution that is sampled from.
    with replaced(model, generation_config=GenerationConfig(eos_token_id=sorted(ends) or None, **settings)):
        sequences = model.generate(
            torch.tensor(rows, device=model.device),
            attention_mask=attention.to(model.device),
            logits_processor=[steps.keep_logits],
            stopping_criteria=[steps],
        )
    chosen = sequences[:, longest:].tolist()
    logprobs = torch.stack(steps.logprobs, 1).tolist()
    return [
        _ended(*row, ends, steps.lengths.get(number)) for number, row in enumerate(zip(chosen, logprobs, strict=True))
    ]


def _ended(tokens: list[int], logprobs: list[float], ends: Container[int], stopped: int | None) -> Completion:
    """Return a completion without the padding behind its end, of `stopped` tokens if a stop string ended it."""
    tokens = tokens[:stopped]
    length = next((place for place, token in enumerate(tokens, 1) if token in ends), None)
    kept = tokens[:length]
    return Completion(tuple(kept), tuple(logprobs[: len(kept)]), stopped is not None or length is not None)
