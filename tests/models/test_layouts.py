"""Training in every layout equals training in a single process: the same initial weights and the same losses."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch import Tensor

from deepspeed_compress.model_families import modules_of
from deepspeed_compress.models import Layout, build_model, read_model_config
from deepspeed_compress.training.data.tokens import Windows
from deepspeed_compress.training.stepper import share_of, train_step
from tests.models.families import LENGTH, MODELS, padded, random_tokens, write_config
from tests.models.runs import (
    ADAM,
    ROWS,
    SEED,
    Run,
    expected_names,
    finish,
    start,
    stepper_of,
    train,
    train_alone,
    weight_names,
)
from tests.support.forks import run_forks

pytestmark = pytest.mark.sampled(8)

TOLERANCE = 5e-6
"""Tolerance of losses: ten units in the last place, which are 4.8e-7 each for losses from 4 to 6.

Ranks add the same products in another order, and every sum rounds. Over 20 steps, one process in fp32 differs from fp64
by two units. A wrong gradient, norm or weight makes a difference of at least 1e-4.
"""

TIED = (True, False)
STAGES, SLICES, BOTH = Layout(pipeline=2), Layout(tensor=2), Layout(tensor=2, pipeline=2)
MIDDLE = Layout(pipeline=3)
"""Layout with a stage that has neither the embedding nor the head."""


@dataclass(frozen=True)
class Outcome:
    """Results of one rank. `wrong` names its initial weights that differ from those of a single process."""

    losses: list[float]
    weights: set[str]
    wrong: set[str]
    attention_calls: int


def train_all(rank: int, *runs: Run) -> list[Outcome]:
    return [train_one(run) for run in runs]


def train_one(run: Run) -> Outcome:
    engine, calls = start(run), []
    weights, wrong = weight_names(engine, run)
    attention = modules_of(read_model_config(run.model)).attention
    for name, module in engine.module.named_modules():
        if name.rpartition(".")[2] == attention:
            module.register_forward_hook(lambda *_: calls.append(1))
    losses = train(engine, run)
    finish(engine)
    return Outcome(losses, weights, wrong, len(calls))


def check(run: Run, ranks: Iterable[Outcome]) -> None:
    """Compare all ranks with a single process. All have the same losses: means over the global batch."""
    ranks, (alone, _) = list(ranks), train_alone(run)
    assert set().union(*(rank.weights for rank in ranks)) == expected_names(run)
    assert set().union(*(rank.wrong for rank in ranks)) == set()
    for rank in ranks:
        assert rank.losses == pytest.approx(alone, rel=0, abs=TOLERANCE)


def zero_stage(layout: Layout) -> int:
    return 1 if layout.pipeline > 1 else 0


@pytest.mark.parametrize("layout", [STAGES, SLICES], ids=["pipeline", "tensor"])
@pytest.mark.parametrize("family", MODELS)
def test_two_ranks_match_a_single_process(family: str, layout: Layout, tmp_path: Path) -> None:
    """With activation checkpointing, every attention is computed twice, and the losses have the same bits."""
    tied, untied = (Run(write_config(tmp_path / str(tie), family, tie), layout, zero_stage(layout)) for tie in TIED)
    again = replace(tied, layout=replace(layout, recompute=True))
    ranks = run_forks(2, train_all, tied, untied, again)
    for run, outcomes in zip((tied, untied), zip(*ranks, strict=True), strict=False):
        check(run, outcomes)
    for plain, _, recomputed in ranks:
        assert recomputed.losses == plain.losses
        assert recomputed.attention_calls == 2 * plain.attention_calls > 0


@pytest.mark.parametrize("stage", range(4))
def test_tensor_and_data_parallelism_match_a_single_process(stage: int, tmp_path: Path) -> None:
    models = write_config(tmp_path / "a", "gpt2", tied=True), write_config(tmp_path / "b", "llama", tied=False)
    runs = [Run(model, SLICES, stage, steps=4, accumulation=2, data=2) for model in models]
    ranks = run_forks(4, train_all, *runs)
    for run, outcomes in zip(runs, zip(*ranks, strict=True), strict=True):
        check(run, outcomes)


@pytest.mark.slow
def test_eight_ranks_match_a_single_process_over_twenty_steps(tmp_path: Path) -> None:
    """Gradients are clipped: their norm is above 1 at first."""
    kinds = [(family, tied) for family in ("gpt2", "llama") for tied in TIED]
    models = [write_config(tmp_path / f"{family}-{tied}", family, tied) for family, tied in kinds]
    runs = [Run(model, BOTH, stage=1, steps=20, accumulation=2, data=2) for model in models]
    ranks = run_forks(8, train_all, *runs, timeout=500)
    for run, outcomes in zip(runs, zip(*ranks, strict=True), strict=True):
        check(run, outcomes)
        losses, norms = train_alone(run)
        assert norms[0] > 1.2 * run.clip
        assert losses[-1] < losses[0] - 0.3


def test_stages_without_decoder_layers_match_a_single_process(tmp_path: Path) -> None:
    models = write_config(tmp_path / "a", "gpt2", tied=True), write_config(tmp_path / "b", "llama", tied=False)
    uneven = [Layout(pipeline=2, partition=counts) for counts in ((3, 0), (0, 3))]
    runs = [Run(model, layout, stage=1) for model in models for layout in uneven]
    ranks = run_forks(2, train_all, *runs)
    for run, outcomes in zip(runs, zip(*ranks, strict=True), strict=True):
        check(run, outcomes)


def test_a_pipeline_without_zero_matches_a_single_process(tmp_path: Path) -> None:
    run = Run(write_config(tmp_path, "gpt2"), STAGES, stage=0, clip=0.0)
    check(run, [outcome for (outcome,) in run_forks(2, train_all, run)])


# Padding


def padded_batches() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return the micro-batches (tokens, mask, labels) of one step, one padded on the left and one on the right."""
    pairs = [(random_tokens(ROWS, seed=seed), padded(side, ROWS)) for seed, side in enumerate(("left", "right"))]
    return [(tokens, mask, tokens.masked_fill(mask == 0, -100)) for tokens, mask in pairs]


def train_padded(rank: int, *runs: Run) -> list[list[float]]:
    """Return the mean loss of the micro-batches in each step, for each run."""
    return [step_padded(start(run), run) for run in runs]


def step_padded(engine: Any, run: Run) -> list[float]:
    losses = []
    for _ in range(run.steps):
        if run.layout.pipeline > 1:
            pairs = (((tokens, mask), labels) for tokens, mask, labels in padded_batches())
            losses.append(float(engine.train_batch(pairs)))
            continue
        micro = []
        for tokens, mask, labels in padded_batches():
            loss = engine(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss
            engine.backward(loss)
            engine.step()
            micro.append(float(loss.detach()))
        losses.append(sum(micro) / len(micro))
    finish(engine)
    return losses


def step_padded_alone(run: Run) -> list[float]:
    model: Any = build_model(run.model, read_model_config(run.model), SEED).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses = []
    for _ in range(run.steps):
        micro = [
            model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False).loss
            for tokens, mask, labels in padded_batches()
        ]
        loss: Any = torch.stack(micro).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("layout", [MIDDLE, SLICES, BOTH], ids=["pipeline", "tensor", "both"])
def test_padded_batches_match_a_single_process(layout: Layout, tmp_path: Path) -> None:
    """In a pipeline, each micro-batch is a pair of tokens and mask, and the mask is passed from stage to stage."""
    runs = [
        Run(write_config(tmp_path / family, family), layout, zero_stage(layout), accumulation=2)
        for family in ("gpt2", "mistral")
    ]
    ranks = run_forks(runs[0].ranks, train_padded, *runs)
    for index, run in enumerate(runs):
        for rank in ranks:
            assert rank[index] == pytest.approx(step_padded_alone(run), rel=0, abs=TOLERANCE)


# Dropout

DROPOUT: dict[str, Any] = {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "attn_pdrop": 0.2}


@dataclass(frozen=True)
class Dropped:
    """Results of one rank trained with dropout. `shared` are the parameters of layers that are not split."""

    stage: int
    replica: int
    losses: list[float]
    shared: dict[str, list[float]]


def same_text() -> Windows:
    """Return windows of the same text, so that losses of data-parallel ranks differ only because of dropout."""
    tokens = random_tokens(1)[0].numpy()
    return Windows(SimpleNamespace(tokens=tokens), ((0, LENGTH),), LENGTH)  # type: ignore[arg-type]


def drop(rank: int, *runs: Run) -> list[Dropped]:
    return [drop_one(run) for run in runs]


def drop_one(run: Run) -> Dropped:
    engine = start(run)
    share, stepper, losses = share_of(engine), stepper_of(engine, run), []
    for step in range(1, run.steps + 1):
        loss = train_step(stepper, same_text(), share, SEED, step, engine.device)
        losses.append(float(engine.dp_group_loss if run.layout.pipeline > 1 else loss))
    owners = [(name, m) for name, m in engine.module.named_modules() if not isinstance(m, TensorParallel_Layer)]
    whole = {f"{owner}.{name}": p for owner, m in owners for name, p in m.named_parameters(recurse=False)}
    shared = {name: parameter.detach().flatten().tolist() for name, parameter in whole.items()}
    finish(engine)
    return Dropped(share.stage, share.rank, losses, shared)


def check_dropped(ranks: Iterable[Dropped], replicas: int) -> None:
    ranks = list(ranks)
    for rank in ranks:
        assert rank.shared
        for other in ranks:
            if rank.stage == other.stage:
                assert rank.shared == other.shared
            if rank.replica == other.replica:
                assert rank.losses == other.losses
    assert len({tuple(rank.losses) for rank in ranks}) == replicas


def test_dropout_is_equal_in_tensor_groups_and_different_in_replicas(tmp_path: Path) -> None:
    """If tensor-parallel ranks dropped different elements, their replicated parameters would diverge."""
    run = Run(write_config(tmp_path, "gpt2", **DROPOUT), SLICES, stage=1, data=2)
    check_dropped([dropped for (dropped,) in run_forks(run.ranks, drop, run)], replicas=2)


@pytest.mark.slow
def test_dropout_of_eight_ranks_survives_recomputation(tmp_path: Path) -> None:
    run = Run(write_config(tmp_path, "gpt2", **DROPOUT), BOTH, stage=1, data=2)
    again = replace(run, layout=replace(BOTH, recompute=True))
    ranks = run_forks(run.ranks, drop, run, again, timeout=500)
    for outcomes in zip(*ranks, strict=True):
        check_dropped(outcomes, replicas=2)
    for plain, recomputed in ranks:
        assert recomputed.losses == plain.losses, "recomputed activations have another dropout"
