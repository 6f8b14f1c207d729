"""GRPO's advantages, batches and losses, against values computed by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from deepspeed_compress.agents.grpo import (
    Batch,
    Sample,
    advantages,
    collate,
    divergence,
    next_token_logprobs,
    token_losses,
)


def sample(reward: float = 1.0, group: str = "a", completion: tuple[int, ...] = (5, 6), **others: Any) -> Sample:
    return Sample((1, 2, 3), completion, (-1.0,) * len(completion), reward, group, **others)


def test_advantages_are_standard_deviations_from_the_mean_of_a_group() -> None:
    samples = [sample(1.0, "a"), sample(3.0, "a"), sample(7.0, "b"), sample(7.0, "b")]
    assert advantages(samples) == pytest.approx([-1.0, 1.0, 0.0, 0.0], abs=1e-5)


def test_an_episode_counts_once_in_its_group_and_all_its_turns_have_its_advantage() -> None:
    turns = [sample(1.0, episode="long")] * 5 + [sample(3.0, episode="short"), sample(5.0), sample(5.0)]
    long, short, single, other = advantages([sample(1.0), sample(3.0), sample(5.0), sample(5.0)])
    assert advantages(turns) == [long] * 5 + [short, single, other]
    assert advantages([sample(1.0, "a", episode="e"), sample(3.0, "b", episode="e")]) == [0.0, 0.0]


def test_episodes_of_one_turn_have_the_same_advantages_with_and_without_names() -> None:
    samples = [sample(0.1 * (number % 7) ** 2, f"{number % 3}") for number in range(30)]
    named = [replace(one, episode=f"{number}") for number, one in enumerate(samples)]
    assert advantages(named) == advantages(samples)


def test_turns_of_an_episode_with_different_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'e' of the group 'a' has the rewards 1\.0 and 2\.0 \(allowed: one\)"):
        advantages([sample(1.0, episode="e"), sample(2.0, episode="e")])


@pytest.mark.parametrize("reward", [0.1, 0.7, 1000.1, -1e9 / 3])
@pytest.mark.parametrize("number", [1, 3, 6, 7])
def test_equal_rewards_have_no_advantage(reward: float, number: int) -> None:
    """A rounding error of their mean, divided by a spread of 0 + 1e-6, would be a step of Adam in its direction."""
    assert advantages([sample(reward)] * number) == [0.0] * number


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_rewards_and_log_probabilities_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="is not finite"):
        sample(value)
    with pytest.raises(ValueError, match="is not finite"):
        Sample((1,), (5,), (value,), 1.0, "a")


@pytest.mark.parametrize(("completion", "logprobs"), [((), ()), ((5, 6), (-1.0,))])
def test_a_sample_without_tokens_or_log_probabilities_is_refused(completion: Any, logprobs: Any) -> None:
    with pytest.raises(ValueError, match=r"at least one token|log-probabilities"):
        Sample((1,), completion, logprobs, 1.0, "a")


def test_a_batch_has_weights_only_where_completions_are_predicted() -> None:
    samples = [sample(), sample(completion=(5, 6, 7, 8), weight=0.5)]
    batch = collate(samples, [1.0, -1.0], 0, torch.device("cpu"))
    assert batch.tokens.tolist() == [[1, 2, 3, 5, 6, 0, 0], [1, 2, 3, 5, 6, 7, 8]]
    assert batch.attention.tolist() == [[1, 1, 1, 1, 1, 0, 0], [1] * 7]
    assert batch.weights.tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 0.5, 0.5, 0.5, 0.5]]
    assert batch.logprobs.tolist() == [[0, 0, -1, -1, 0, 0], [0, 0, -1, -1, -1, -1]]


def test_a_tokenizer_without_a_padding_token_pads_outside_of_attention() -> None:
    batch = collate([sample(), sample(completion=(5, 6, 7, 8))], [1.0, -1.0], None, torch.device("cpu"))
    assert batch.tokens.masked_fill(batch.attention == 0, -1).tolist()[0] == [1, 2, 3, 5, 6, -1, -1]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probabilities_are_those_of_the_softmax(temperature: float) -> None:
    logits, tokens = torch.randn(2, 4, 9), torch.randint(9, (2, 4))
    expected = torch.distributions.Categorical(logits=logits[:, :-1] / temperature).log_prob(tokens[:, 1:])
    torch.testing.assert_close(next_token_logprobs(logits, tokens, temperature), expected)


def batch_of(former: float, advantage: float) -> Batch:
    one = torch.ones(1, 1)
    return Batch(one, one, one, one * former, one * advantage)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),
        (1.5, 2.0, -2.4, 0.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.5, -2.0, 3.0, 3.0),
    ],
)
def test_ratios_beyond_the_clip_are_not_rewarded(ratio: float, advantage: float, loss: float, slope: float) -> None:
    logprobs = torch.full((1, 1), math.log(ratio), requires_grad=True)
    found = token_losses(logprobs, batch_of(0.0, advantage), clip=0.2, corrected=True)
    found.sum().backward()
    assert found.item() == pytest.approx(loss)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(slope)


def test_uncorrected_samples_count_as_the_present_policys_own() -> None:
    logprobs = torch.full((1, 1), -3.0, requires_grad=True)
    found = token_losses(logprobs, batch_of(-0.1, 2.0), clip=0.2, corrected=False)
    found.sum().backward()
    assert found.item() == pytest.approx(-2.0)
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(-2.0)


def test_the_divergence_is_zero_for_equal_policies_and_unbiased_for_others() -> None:
    policy = torch.distributions.Categorical(logits=torch.tensor([0.0, 1.0, 2.0]))
    reference = torch.distributions.Categorical(logits=torch.tensor([1.0, 1.0, 0.0]))
    every = torch.arange(3)
    estimates = divergence(policy.log_prob(every), reference.log_prob(every))
    assert (estimates >= 0).all()
    expected = torch.distributions.kl_divergence(policy, reference)
    torch.testing.assert_close((policy.probs * estimates).sum(), expected)
    assert divergence(policy.log_prob(every), policy.log_prob(every)).abs().max() == 0
