"""Samples of episodes, and the step that a learner should take on them."""

from collections.abc import Sequence
from typing import Any

import torch

from deepspeed_compress.agents.grpo import Sample, advantages, collate, next_token_logprobs, token_losses
from tests.agents.models import PAD

RATE = 0.1


def samples(number: int) -> list[Sample]:
    """Return samples of different lengths, sampled by another policy, in groups of four."""
    random = torch.Generator().manual_seed(3)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(10, (count,), generator=random).tolist())

    def one(index: int) -> Sample:
        completion = tokens(2 + index % 5)
        return Sample(
            tokens(3 + index % 3), completion, (-2.5,) * len(completion), float(index % 3), f"{index // 4}", index % 2
        )

    return [one(index) for index in range(number)]


def step_of_one_process(model: Any, chosen: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return the parameters of `model` after one step of SGD on the mean loss of a token."""
    batch = collate(chosen, advantages(chosen), PAD, torch.device("cpu"))
    logits = model(input_ids=batch.tokens, attention_mask=batch.attention).logits
    losses = token_losses(next_token_logprobs(logits, batch.tokens, 1.0), batch, 0.2, True)
    ((losses * batch.weights).sum() / batch.weights.sum()).backward()
    return {name: parameter.detach() - RATE * parameter.grad for name, parameter in model.named_parameters()}
