"""Gradients without ZeRO are treated by parameter, whatever buffers DeepSpeed collects them in."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, make_engine, network, run, start, weights
from tests.support.messages import caught_warnings
from tests.support.methods import FP32_SUMS, NONE, RAW, UNCLIPPED

CHOSEN = {"bits": 4, "block_size": 32, "overrides": [{"parameters": "bias|^0", "method": "none"}]}


def remembered(rank: int, job: Job) -> tuple[dict[str, int], dict[str, int]]:
    """Return the number of elements with residuals by parameter, and the sizes of all parameters."""
    engine = start(job)
    assert isinstance(engine.optimizer, BF16_Optimizer)
    run(engine, data(rank, job))
    ends: dict[str, int] = {}
    for store in engine.compression.residuals.by_name.values():
        for (name, begin, numel), _ in store.items():
            ends[name] = max(ends.get(name, 0), begin + numel)
    return ends, {name: parameter.numel() for name, parameter in engine.module.named_parameters()}


def test_the_bf16_optimizer_has_many_parameters_in_a_buffer() -> None:
    for ends, sizes in run_forks(2, remembered, Job(1, {"gradients": CHOSEN}, extra=FP32_SUMS, steps=2)):
        chosen = {name: numel for name, numel in sizes.items() if "bias" not in name and not name.startswith("0")}
        assert ends == chosen


class Words(nn.Module):
    """Sparse embedding. Every rank uses other rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.rest = nn.Embedding(50, 12, sparse=True), network()

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.rest(self.embedding(words))
        return found


@dataclass(frozen=True)
class Seen:
    losses: list[float]
    parameters: dict[str, list[float]]
    sent: int
    """Bytes sent in the last step."""


def train_words(rank: int, *sections: dict[str, Any] | None) -> list[Seen]:
    return [train_once(rank, section) for section in sections]


def train_once(rank: int, section: dict[str, Any] | None) -> Seen:
    job = Job(0, section, extra={**UNCLIPPED, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}})
    engine, losses, sent = make_engine(Words(), job.config()), [], 0
    for step in range(4):
        words = torch.randint(50, (3 + rank,), generator=torch.Generator().manual_seed(10 * step + rank))
        loss = engine(words).square().mean()
        engine.backward(loss)
        sent = engine.compression.meter.bytes_sent if section is not None else 0
        engine.step()
        losses.append(float(loss.detach()))
    seen = Seen(losses, weights(engine), sent)
    engine.destroy()
    return seen


@pytest.mark.filterwarnings("ignore:.*matches every parameter:deepspeed_compress.CompressWarning")
def test_sparse_gradients_go_deepspeeds_way() -> None:
    int4 = {"gradients": {"bits": 4, "block_size": 32}}
    ranks = run_forks(2, train_words, None, NONE, RAW, int4, {**int4, "guard": {}})
    for plain, ours, uncompressed, compressed, guarded in ranks:
        assert (guarded.losses, guarded.parameters) == (compressed.losses, compressed.parameters)
        assert (ours.losses, ours.parameters) == (plain.losses, plain.parameters)
        assert (uncompressed.losses, uncompressed.parameters) == (plain.losses, plain.parameters)
        # The other rank sends at most four rows of 12 numbers, and their indices.
        rows = 4 * (12 * 4 + 8)
        assert 0 < compressed.sent - rows < (uncompressed.sent - rows) / 2
    assert ranks[0][3].parameters == ranks[1][3].parameters


def warned_of(rank: int, *jobs: Job) -> list[list[str]]:
    found = []
    for job in jobs:
        with caught_warnings() as texts:
            engine = start(job)
        found.append([text for text in texts if "communication_data_type" in text])
        engine.destroy()
    return found


def test_a_type_of_communication_that_nobody_heeds_is_named() -> None:
    """Only ZeRO 1 and 2 use this type, for uncompressed messages."""
    typed = {"communication_data_type": "bf16"}
    jobs = [Job(stage, {"gradients": {"bits": 4}}, extra=typed) for stage in (0, 1, 2, 3)]
    none, silent = Job(0, NONE, extra=typed), Job(0, {"gradients": {"bits": 4}})
    for first, *middle, last, with_none, without in run_forks(2, warned_of, *jobs, none, silent):
        assert middle == [[], []]
        assert with_none == without == []
        for [text] in (first, last):
            assert 'communication_data_type: "bf16" has no effect' in text
