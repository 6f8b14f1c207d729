"""Group-relative policy optimization (GRPO) with clipped importance ratios.

Source: Shao et al., DeepSeekMath (https://arxiv.org/abs/2402.03300), equations 3 and 4; the ratio and its clipping are
those of PPO (https://arxiv.org/abs/1707.06347), equation 7. The old policy is the one that sampled a completion,
however many versions ago, so the ratio also corrects for rollouts that lag behind. The learner averages losses over
all tokens of an optimizer step, and not over each completion first (DAPO, https://arxiv.org/abs/2503.14476, equation
8), so that long completions count as much per token as short ones.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sample:
    """One completion of a policy, with its reward.

    Attributes:
        prompt: token ids of the prompt.
        completion: token ids that the policy chose.
        logprobs: log-probability of each token of `completion` under the policy that sampled it.
        reward: reward of the episode that the completion belongs to.
        group: name of the task; episodes of one group are compared with each other.
        version: version of the weights that sampled it.
        weight: factor of its loss; 0 for a sample that only fills a batch.
        episode: name of the episode in its group, which all of its turns have; None for an episode of one turn.
    """

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    logprobs: tuple[float, ...]
    reward: float
    group: str
    version: int = 0
    weight: float = 1.0
    episode: str | None = None

    def __post_init__(self) -> None:
        if not self.prompt or not self.completion:
            raise ValueError("a sample needs at least one token in its prompt and in its completion")
        if len(self.logprobs) != len(self.completion):
            counts = f"{len(self.completion)} tokens and {len(self.logprobs)} log-probabilities"
            raise ValueError(f"a completion has {counts}: ask the endpoint for logprobs")
        if not all(map(math.isfinite, (self.reward, *self.logprobs))):
            raise ValueError(f"the reward {self.reward} or a log-probability of a sample is not finite")


def first_turns(samples: Sequence[Sample]) -> list[Sample]:
    """Return the first sample of each episode.

    Raises:
        ValueError: samples of an episode have different rewards.
    """
    firsts: dict[tuple[str, str | int], Sample] = {}
    for number, sample in enumerate(samples):
        first = firsts.setdefault((sample.group, number if sample.episode is None else sample.episode), sample)
        if first.reward != sample.reward:
            raise ValueError(
                f"the episode {sample.episode!r} of the group {sample.group!r} has the rewards {first.reward} and "
                f"{sample.reward} (allowed: one): give all of its turns the reward of the episode"
            )
    return list(firsts.values())


def advantages(samples: Sequence[Sample]) -> list[float]:
    """Return the advantage of each sample: its episode's reward in standard deviations from the mean of its group.

    An episode counts once in its group, however many turns it has. All samples of a group with equal rewards have
    advantage 0.
    """
    groups: defaultdict[str, list[float]] = defaultdict(list)
    for episode in first_turns(samples):
        groups[episode.group].append(episode.reward)
    # Unlike fmean, mean is exact, so equal rewards have it as their mean.
    means = {name: statistics.mean(rewards) for name, rewards in groups.items()}
    spreads = {name: statistics.pstdev(rewards) for name, rewards in groups.items()}
    return [(sample.reward - means[sample.group]) / (spreads[sample.group] + 1e-6) for sample in samples]


@dataclass(frozen=True)
class Batch:
    """Samples as tensors, padded on the right.

    Attributes:
        tokens: prompts and completions, int64 of shape [B, T].
        attention: 1 for tokens, 0 for padding, int64 of shape [B, T].
        weights: factor of the loss of each next token, 0 outside completions, fp32 of shape [B, T - 1].
        logprobs: log-probabilities of the next token when it was sampled, fp32 of shape [B, T - 1].
        advantages: fp32 of shape [B, 1].
    """

    tokens: Tensor
    attention: Tensor
    weights: Tensor
    logprobs: Tensor
    advantages: Tensor


def collate(samples: Sequence[Sample], of_samples: Sequence[float], pad: int | None, device: torch.device) -> Batch:
    """Return `samples`, whose advantages are `of_samples`, as a batch.

    `pad` is the id of the padding token; None if the tokenizer has none. The model does not attend to padding.
    """
    longest = max(len(sample.prompt) + len(sample.completion) for sample in samples)
    tokens = torch.full((len(samples), longest), pad or 0)
    attention = torch.zeros(len(samples), longest, dtype=torch.int64)
    weights, logprobs = torch.zeros(len(samples), longest - 1), torch.zeros(len(samples), longest - 1)
    for row, one in enumerate(samples):
        begin, end = len(one.prompt), len(one.prompt) + len(one.completion)
        tokens[row, :end] = torch.tensor([*one.prompt, *one.completion])
        attention[row, :end] = 1
        weights[row, begin - 1 : end - 1] = one.weight
        logprobs[row, begin - 1 : end - 1] = torch.tensor(one.logprobs)
    parts = (tokens, attention, weights, logprobs, torch.tensor(of_samples, dtype=torch.float32).unsqueeze(1))
    return Batch(*(part.to(device) for part in parts))


def next_token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Return the log-probability of each next token.

    Args:
        logits: the model's output, of shape [B, T, V].
        tokens: int64 of shape [B, T].
        temperature: temperature at which completions are sampled.

    Returns:
        fp32 of shape [B, T - 1].
    """
    scaled = logits[:, :-1].float() / temperature
    chosen = scaled.gather(-1, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
    return chosen - scaled.logsumexp(-1)


def token_losses(logprobs: Tensor, batch: Batch, clip: float, corrected: bool) -> Tensor:
    """Return the negative clipped objective of each token.

    Args:
        logprobs: log-probabilities of the next tokens under the present policy, of shape [B, T - 1].
        batch: the samples.
        clip: largest distance of a ratio from 1 that is rewarded.
        corrected: True to weight each token by its ratio to the policy that sampled it; False to take the present
            policy for that one, which leaves the plain policy gradient.

    Returns:
        fp32 of shape [B, T - 1].
    """
    former = batch.logprobs if corrected else logprobs.detach()
    ratio = (logprobs - former).exp()
    clipped = ratio.clamp(1 - clip, 1 + clip)
    return -torch.minimum(ratio * batch.advantages, clipped * batch.advantages)


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return an unbiased, positive estimate of the KL divergence from the reference, for each token (equation 4)."""
    difference = reference - logprobs
    return difference.exp() - difference - 1
