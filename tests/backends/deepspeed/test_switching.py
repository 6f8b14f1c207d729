"""Settings that alternate during a run: methods of gradients and settings of weights, with the same residuals."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_compress.backends.deepspeed import engine_facts
from deepspeed_compress.collectives.buckets import even_partition
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.collectives.reduction import Groups, ReductionContext, Reductions
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.config import CompressConfig, brief, parse_section
from deepspeed_compress.monitor import Meter
from deepspeed_compress.policy.measurement import WeightCosts
from deepspeed_compress.session.residual_state import ResidualState
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start, weights
from tests.support.methods import FP16, NO_MOMENTUM
from tests.support.threads import run_threads

pytestmark = pytest.mark.sampled(8)

BITS, RANK2, RANK4 = {"bits": 4}, {"method": "powersgd", "rank": 2}, {"method": "powersgd", "rank": 4}
THREE = {"method": "sign", "levels": 3, "block_size": 64}
TOPK = {"method": "topk", "density": 0.2, "values": {"bits": 4}}
ADAPTIVE = {"probe_every": 2, "candidates": [{"bits": 2}, {"method": "sign"}, TOPK]}
OF_WEIGHTS = {**ADAPTIVE, "weights": [{"method": "none"}, {"bits": 8}, {"bits": 3}, THREE]}
SLOW = 100.0
"""Codec seconds of every candidate that is not to be chosen."""
TOPK_TEXT = "topk density=0.2 values=blockwise bits=4"
GRADIENTS = {2: "sign", 5: "blockwise bits=2", 8: TOPK_TEXT, 11: "none", 14: "sign"}
WEIGHTS = {2: "sign levels=3", 5: "none", 8: "blockwise bits=3", 11: "blockwise bits=8", 14: "sign levels=3"}
"""Settings chosen after these steps, all of which are measured."""
STEPS = 17


def wanted(table: Mapping[int, str], step: int) -> str:
    return table[max(first for first in table if first <= step)]


def steer(engine: Any) -> None:
    """Replace measurements, so that all candidates except the intended one are slow."""
    prober, adaptive = engine.compression.prober, engine.compression.policy.adaptation.selector
    measure = prober.measure

    def measured(*args: Any) -> Any:
        seen, step = measure(*args), engine.global_steps
        prober.last_seen = seen
        slow = tuple(SLOW * (brief(candidate) != wanted(GRADIENTS, step)) for candidate in adaptive.candidates)
        weights = tuple(SLOW * (brief(weight) != wanted(WEIGHTS, step)) for weight in adaptive.weights)
        costs = WeightCosts(seen.weights.sizes, weights if len(weights) > 1 else (0.0,), seen.weights.overlap)
        # The shares of parameters in a codec's time are proportional to their bytes.
        ones = tuple((1.0,) * len(row) for row in seen.sizes)
        return replace(seen, codec_seconds=slow, sizes=ones, weights=costs, step=0.1)

    prober.measure = measured


def begin(job: Job) -> Any:
    # Overlapped reductions without ZeRO require buckets of at least this size.
    engine_facts.SMALLEST_BUCKET = 100
    engine = start(job)
    steer(engine)
    return engine


def follow(engine: Any, batches: Any) -> tuple[list[float], list[str]]:
    losses, settings = [], []
    for batch in batches:
        session = engine.compression
        settings.append(f"{session.settings}, {brief(session.weights)}")
        losses += run(engine, [batch])
    return losses, settings


def switch(rank: int, job: Job, directory: str, saved: int) -> tuple[Any, Any, Any]:
    """Return the results of continuing after a save, and of a new engine that loads it."""
    batches, first = data(rank, job), begin(job)
    before = follow(first, batches[:saved])[1]
    first.save_checkpoint(directory)
    went_on = (*follow(first, batches[saved:]), weights(first))
    first.destroy()
    second = begin(job)
    second.load_checkpoint(directory)
    resumed = (*follow(second, batches[saved:]), weights(second))
    return before, went_on, resumed


SECTION = {"gradients": BITS, "adaptive": ADAPTIVE}


def job(stage: int, **zero: Any) -> Job:
    section = {**SECTION, "weights": BITS, "adaptive": OF_WEIGHTS} if stage in (1, 2) else SECTION
    return Job(stage, section, zero=zero, steps=STEPS)


@pytest.mark.parametrize("saved", [6, 9, 12])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_resumed_run_switches_methods_with_the_same_bits(stage: int, saved: int, tmp_path: Path) -> None:
    """The method at the save differs from the next one."""
    found = run_forks(2, switch, job(stage), str(tmp_path), saved)
    before, went_on, resumed = found[0]
    assert went_on == resumed
    assert found[1][1] == found[1][2]
    assert went_on[2] == found[1][1][2]
    settings = [*before, *went_on[1]]
    assert [settings[step].split(", ")[0] for step in GRADIENTS] == [*GRADIENTS.values()]
    # Weights are uncompressed if gradients are.
    of_weights = {step: "none" if GRADIENTS[step] == "none" else text for step, text in WEIGHTS.items()}
    assert stage in (0, 3) or [settings[step].split(", ")[1] for step in WEIGHTS] == [*of_weights.values()]


def test_weights_on_their_way_change_their_settings_too(tmp_path: Path) -> None:
    section = {**SECTION, "weights": {**BITS, "overlap": True}, "adaptive": OF_WEIGHTS}
    found = run_forks(2, switch, Job(1, section, steps=STEPS), str(tmp_path), 9)
    assert found[0][1] == found[0][2]
    assert found[0][1][2] == found[1][1][2]


def skipped(rank: int, job: Job, begins: Any = begin) -> tuple[list[str], dict[str, list[float]], int]:
    engine = begins(job)
    settings = follow(engine, data(rank, job))[1]
    return settings, weights(engine), engine.skipped_steps


@pytest.mark.parametrize("stage", [1, 2])
def test_a_step_that_is_not_finite_is_skipped_in_the_middle_of_turns(stage: int) -> None:
    """The step with the NaN is a measured one. It changes nothing, and the next step is measured."""
    first, second = run_forks(2, skipped, replace(job(stage), extra=FP16, poison=(4, 1)))
    assert first == second
    settings, parameters, count = first
    assert count == 1
    assert all(value == value for values in parameters.values() for value in values)
    assert settings[5].startswith("sign")
    assert settings[6].startswith("blockwise bits=2")


def test_a_gradient_that_is_not_finite_is_so_on_all_ranks_whatever_is_in_force() -> None:
    """In fp32 without ZeRO no step is skipped.

    Ranks must decide alike, and unknown figures must not choose anything.
    """
    first, second = run_forks(2, skipped, replace(job(0), poison=(3, 0)))
    assert first[0] == second[0]
    assert repr(first[1]) == repr(second[1])
    assert any(value != value for values in first[1].values() for value in values)
    assert set(first[0][2:]) == {"sign, none"}


def test_one_rank_sends_nothing_and_chooses_without_waiting() -> None:
    [(settings, _, _)] = run_forks(1, skipped, job(1), start)
    assert settings[-1] == "none, none"


SHAPES = {"a": (24, 20), "b": (24,), "c": (30, 16), "d": (5,)}
SIZES = [(name, int(torch.Size(shape).numel())) for name, shape in SHAPES.items()]
TURNS = ({"bits": 2}, RANK2, {"bits": 4, "block_size": 32}, RANK4, {"method": "sign"}, RANK2)


def take_turns(everywhere: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums over all steps of inputs and of outputs, with a last step that sends all residuals."""
    partition, ranks, steps = even_partition(SIZES, 3), 3, 5

    def work(group: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        run = Run(StepClock(), Meter())
        stores, generator = ResidualStores(False), torch.Generator().manual_seed(rank)
        reductions = Reductions(ReductionContext(Groups(group), Parameters(SHAPES, list(SHAPES)), stores, run))
        put, came = torch.zeros(partition.numel), torch.zeros(partition.numel)
        own = torch.cat([torch.arange(s.offset, s.offset + s.numel) for s in partition.owned_by(rank)])
        for number in range(len(TURNS) * steps + 1):
            run.clock.begin(number)
            turn = TURNS[min(number // steps, len(TURNS) - 1)]
            settings = parse_section({"deepspeed_compress": {"gradients": {**EXACT, **turn}}}).gradients
            found, last = reductions.at(settings, number), number == len(TURNS) * steps
            if number and number % steps == 0 and turn.get("method") == "powersgd":
                ResidualState(stores, CompressConfig()).hand_over_means(1 / ranks)
            bucket = torch.randn(partition.numel, generator=generator)
            put += bucket
            reducer = found.flushing if last else found.compressed
            (reducer.all_reduce if everywhere else reducer.reduce_scatter)(bucket, partition, 1 / ranks)
            came[own] += bucket[own]
            for store in stores.by_name.values():
                store.commit()
            assert turn.get("method") != "powersgd" or not any(waiting(stores, ("b", "d")))
        return put / ranks, came

    found = run_threads(ranks, work)
    return sum(put for put, _ in found), sum(came for _, came in found)


def waiting(stores: ResidualStores, names: tuple[str, ...]) -> list[float]:
    """Return the largest residuals of the parameters `names`."""
    kept = (store for name, store in stores.by_name.items() if name != "factors")
    return [float(values.abs().max()) for store in kept for piece, values in store.items() if piece[0] in names]


EXACT = {"error_feedback": {"dtype": "fp32"}}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("everywhere", [True, False])
def test_nothing_is_lost_when_methods_take_turns(everywhere: bool) -> None:
    """The sum of outputs equals the sum of inputs up to rounding once residuals were sent.

    Residuals of vectors from other methods must not wait for the end of PowerSGD, which sends vectors uncompressed.
    """
    put, came = take_turns(everywhere)
    torch.testing.assert_close(came, put, atol=2e-5, rtol=0)


def test_memories_of_a_state_are_made_where_settings_may_ask_for_them() -> None:
    saved = {"gradients": "bf16", "means": "bf16", "factors": "fp32", "velocity": "bf16", "node": "bf16"}
    section = {"gradients": {"bits": 4, "error_feedback": {"device": "cpu"}}}
    for adaptive, made in (({}, {"gradients", "means", "factors"}), (None, set())):
        stores = ResidualStores(True)
        ResidualState(stores, parse_section({"deepspeed_compress": {**section, "adaptive": adaptive}})).expect(saved)
        assert stores.by_name.keys() == made


def test_factors_follow_no_loss_scale_and_stay_on_the_accelerator() -> None:
    stores = ResidualStores(False)
    section = {"gradients": {"error_feedback": {"device": "cpu"}}, "adaptive": {}}
    state = ResidualState(stores, parse_section({"deepspeed_compress": section}))
    state.expect({"factors": "fp32", "means": "int8"})
    factors, means = stores.by_name["factors"], stores.by_name["means"]
    assert (factors.dtype, factors.scaled, factors.on_host) == ("fp32", False, False)
    assert (means.dtype, means.scaled, means.on_host) == ("int8", True, True)


def bytes_of_steps(rank: int, job: Job) -> tuple[dict[str, int], dict[str, int], dict[str, float], dict[str, float]]:
    """Return the bytes of gradients and weights that this rank sends per step, by settings, and the predicted ones."""
    engine = begin(job)
    session, policy = engine.compression, engine.compression.policy
    observe, gradients, of_weights = policy.observe, {}, {}

    def observed(seen: Any) -> Any:
        sizes = session.meter.sizes()
        gradients[session.settings] = sizes["bytes_sent"]
        of_weights[brief(session.weights)] = sizes["bytes_weights"]
        return observe(seen)

    policy.observe = observed
    follow(engine, data(rank, job))
    adaptive, seen = policy.adaptation.selector, session.prober.last_seen
    predicted = {brief(candidate): sum(row) for candidate, row in zip(adaptive.candidates, seen.sizes, strict=True)}
    predicted_of_weights = zip(map(brief, adaptive.weights), seen.weights.sizes, strict=True)
    return gradients, of_weights, predicted, dict(predicted_of_weights)


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.sampled(1)), 1, 2, 3])
def test_the_bytes_that_are_predicted_are_those_that_are_sent(stage: int) -> None:
    """Compares means over ranks. Short messages have headers and incomplete blocks."""
    found = run_forks(2, bytes_of_steps, replace(job(stage), accumulation=2, steps=STEPS))
    predicted, predicted_of_weights = found[0][2:]
    gradients, of_weights = (
        {name: (sent[name] + found[1][part][name]) / 2 for name in sent} for part, sent in enumerate(found[0][:2])
    )
    for name in ("blockwise bits=2", "sign"):
        assert gradients[name] == pytest.approx(predicted[name], rel=0.5)
    for name in of_weights if stage in (1, 2) else ():
        assert of_weights[name] == pytest.approx(predicted_of_weights[name], rel=0.5)
    assert stage in (0, 3) or of_weights["none"] == predicted_of_weights["none"]


def usual(rank: int, job: Job, threads: int) -> tuple[list[str], list[str], dict[str, list[float]]]:
    """Return settings by step, candidates and weights, with default candidates and real measurements."""
    torch.set_num_threads(1 + rank * threads)
    engine = start(job)
    candidates = [brief(candidate) for candidate in engine.compression.policy.adaptation.selector.candidates]
    return follow(engine, data(rank, job))[1], candidates, weights(engine)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_usual_candidates_are_measured_and_chosen_alike(stage: int) -> None:
    section = {"gradients": BITS, "adaptive": {"probe_every": 2}, **({"weights": BITS} if stage in (1, 2) else {})}
    first, second = run_forks(2, usual, Job(stage, section, steps=9, accumulation=2), 0)
    assert first == second
    assert {"blockwise bits=2", "sign", "topk density=0.01 values=blockwise bits=4"} < set(first[1])
    assert all(value == value for values in first[2].values() for value in values)


def test_with_a_momentum_method_only_weights_are_chosen() -> None:
    section = {"gradients": {"method": "demo"}, "weights": BITS, "adaptive": OF_WEIGHTS | {"candidates": None}}
    job = Job(1, section, steps=STEPS, extra=NO_MOMENTUM)
    first, second = run_forks(2, skipped, job)
    assert first == second
    assert {one.split(", ")[0] for one in first[0]} == {"demo density=0.01 values=blockwise bits=4"}
    assert [first[0][step].split(", ")[1] for step in WEIGHTS] == [*WEIGHTS.values()]


PHASES = {
    "phases": [
        {"until": 0.3, "weights": {"method": "none"}},
        {"until": 0.6, "gradients": RANK2, "weights": THREE},
        {"gradients": RANK4, "weights": {"method": "sign", "block_size": 64}},
    ],
    "total_steps": 12,
}
OF_GRADIENTS = {**PHASES, "phases": [{"until": 0.3}, {"until": 0.6, "gradients": RANK2}, {"gradients": {"bits": 2}}]}
METHODS = ["blockwise bits=4"] * 4 + ["powersgd rank=2"] * 4


def by_schedule(rank: int, job: Job, directory: str) -> list[Any]:
    """Return the weights after twelve steps, also with a resume after seven steps, and the settings by step."""
    engine_facts.SMALLEST_BUCKET = 100
    batches, engine, settings = data(rank, job), start(job), []
    for step, batch in enumerate(batches):
        settings.append((engine.compression.settings, brief(engine.compression.weights)))
        run(engine, [batch])
        if step == 6:
            engine.save_checkpoint(directory)
    whole = weights(engine)
    engine.destroy()
    resumed = start(job)
    resumed.load_checkpoint(directory)
    run(resumed, batches[7:])
    found = [settings, whole, weights(resumed)]
    resumed.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_phases_with_powersgd_resume_bit_for_bit(stage: int, tmp_path: Path) -> None:
    of_weights = stage in (1, 2)
    section = {"gradients": BITS, "schedule": PHASES if of_weights else OF_GRADIENTS}
    job = Job(stage, {**section, "weights": BITS} if of_weights else section, steps=12)
    for settings, whole, resumed in run_forks(2, by_schedule, job, str(tmp_path)):
        last = ["powersgd rank=4"] if of_weights else ["blockwise bits=2"]
        assert [gradients for gradients, _ in settings] == METHODS + last * 4
        if of_weights:
            assert [text for _, text in settings] == ["none"] * 4 + ["sign levels=3"] * 4 + ["sign"] * 4
        assert whole == resumed
