"""Islands inside one job, compared with DeepSpeed alone and with data parallelism, saved and resumed."""

import atexit
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, inject_adapter_in_model

import deepspeed_compress
from deepspeed_compress.config import parse_section
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import ConfigError, StateError, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed import divided
from deepspeed_compress.tools.plan import plans
from tests.support.forks import run_forks
from tests.support.island_jobs import HEAD, SGD, section
from tests.support.jobs import (
    BATCH,
    MUON,
    Job,
    by_step,
    data,
    figures_of,
    largest_difference,
    make_engine,
    moments,
    network,
    run,
    start,
    train,
    train_on,
    warned,
    weights,
)
from tests.support.messages import check_contained, refusal
from tests.support.methods import BF16
from tests.support.resuming import resume, save_and_continue

SAMPLED = pytest.mark.sampled(12)

OFFLOADED: Mapping[str, Any] = {"zero": {"offload_optimizer": {"device": "cpu"}}, "extra": {}}
WHOLE: Mapping[str, Any] = {"reduce_scatter": False}
"""Keys that DeepSpeed's Muon requires under ZeRO 3."""
STAGES = (0, 1, 2, 3)


@SAMPLED
@pytest.mark.parametrize(
    ("stage", "extra"),
    # Without ZeRO, only fp32 master weights are supported.
    [*product(STAGES, ({}, MUON)), *product(STAGES[1:], (BF16,))],
)
def test_one_island_that_averages_every_step_equals_deepspeed(stage: int, extra: Mapping[str, Any]) -> None:
    alone = Job(stage, extra=extra, zero=WHOLE if extra is MUON else {})
    one = replace(alone, section=section(size=2, sync_every=1, exchange={"method": "none"}, second_moments={}))
    for plain, ours in run_forks(2, train, alone, one):
        assert ours == plain


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_two_islands_that_average_every_step_equal_data_parallelism(stage: int) -> None:
    """With SGD, the mean of the steps equals the step along the mean gradient."""
    whole = Job(stage, extra=SGD)
    divided = replace(whole, section=section(size=2, sync_every=1, exchange={"method": "none"}))
    for plain, ours in run_forks(4, train, whole, divided):
        assert largest_difference(plain.parameters, ours.parameters) < 1e-6
        assert plain.losses == pytest.approx(ours.losses, abs=1e-6)


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_islands_agree_only_after_an_exchange(stage: int) -> None:
    job = Job(stage, section=section(size=2, sync_every=3, exchange={"method": "blockwise", "bits": 4}), steps=6)
    ranks = run_forks(4, by_step, job)
    for step, (first, second, third, fourth) in enumerate(zip(*ranks, strict=True), 1):
        assert first == second
        assert third == fourth
        assert (first == third) == (step % 3 == 0), step


def with_heads(rank: int, job: Job) -> list[dict[str, list[float]]]:
    """Return weights of initially different models before and after attach, and after every step."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(rank // 2)
    seen = [{name: value.detach().flatten().tolist() for name, value in model.named_parameters()}]
    engine = make_engine(model, job.config())
    seen.append(weights(engine))
    for batch in data(rank, job):
        run(engine, [batch])
        seen.append(weights(engine))
    return seen


def names_apart(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> set[str]:
    return {name for name in one if one[name] != other[name]}


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_an_island_keeps_parameters_of_its_own(stage: int) -> None:
    """They are local from the first step on; the other parameters agree after exchanges."""
    job = Job(stage, section=section(size=2, sync_every=2, own=[HEAD], exchange={"method": "none"}), steps=2)
    first, same, second, _ = run_forks(4, with_heads, job)
    assert first == same
    own = {"4.weight", "4.bias"}
    assert names_apart(first[0], second[0]) == first[0].keys()
    assert [names_apart(a, b) for a, b in zip(first[1:], second[1:], strict=True)] == [own, first[0].keys(), own]
    assert {name: second[1][name] for name in own} == {name: second[0][name] for name in own}


def test_a_rank_can_have_nothing_to_exchange() -> None:
    """Under ZeRO 1, the second of two ranks has only the later layers, which are all local."""
    job = Job(1, section=section(size=2, sync_every=1, own=[r"^[245]\."]), steps=2)
    first, _, second, _ = run_forks(4, with_heads, job)
    assert names_apart(first[-1], second[-1]) == {name for name in first[0] if not name.startswith("0.")}


@SAMPLED
@pytest.mark.parametrize(("stage", "extra"), [(0, {}), (1, {}), (1, BF16), (2, OFFLOADED), (3, {})])
def test_islands_have_the_same_second_moments_after_an_exchange(stage: int, extra: Mapping[str, Any]) -> None:
    shared = section(size=2, sync_every=2, second_moments={"block_size": 1})
    job = Job(stage, section=shared, steps=4, extra=extra.get("extra", extra), zero=extra.get("zero", {}))
    first, second, third, fourth = run_forks(4, by_step, job, moments)
    for step in range(4):
        for one, other in ((first, third), (second, fourth)):
            assert one[step].keys() == other[step].keys() != set()
            assert (one[step] == other[step]) == (step % 2 == 1), step
    if stage == 0:
        assert first == second


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_islands_with_muon_exchange_second_moments_of_adam_parameters_only(stage: int) -> None:
    shared = section(size=2, sync_every=2, second_moments={"block_size": 1})
    job = Job(stage, section=shared, extra=MUON, zero=WHOLE)
    ranks = run_forks(4, by_step, job, moments)
    for step in range(4):
        for one, other in zip(ranks[:2], ranks[2:], strict=True):
            assert (one[step] == other[step]) == (step % 2 == 1), step
    assert set().union(*(rank[1] for rank in ranks)) == {"0.bias", "2.bias", "4.bias"}


@SAMPLED
@pytest.mark.parametrize(("delay", "fragments"), [(0, 1), (1, 1), (1, 2)])
def test_second_moments_are_scaled_to_the_mean_of_their_sums(delay: int, fragments: int) -> None:
    """Compared with two ranks that never exchange, whose moments equal those before the first exchange."""
    job = Job(1, section=section(size=1, sync_every=2, delay=delay, fragments=fragments), steps=2 + delay)
    shared = {**job.section["islands"], "second_moments": {"block_size": 10**6}}
    own = run_forks(2, by_step, job, moments)
    found = run_forks(2, by_step, replace(job, section={**job.section, "islands": shared}), moments)
    for name in own[0][0]:
        sums = [sum(one[1][name]) for one in own]
        for mine, others in zip(own, found, strict=True):
            ratio = sum(sums) / 2 / sum(mine[1][name])
            assert others[1][name] == pytest.approx([one * (1 if delay else ratio) for one in mine[1][name]])
            # Moments whose exchange is in flight are scaled on arrival, and updates made meanwhile are kept.
            if delay:
                now, came = sum(mine[2][name]), max(0.0, sum(mine[2][name]) - sum(mine[1][name]))
                target = sum(sums) / 2 + came
                assert others[2][name] == pytest.approx([one * target / now for one in mine[2][name]])


def words_of_a_rare_row(rank: int, stage: int, delay: int) -> list[float]:
    """Return the largest weight after every step.

    A word occurs for the first time while an exchange of moments is in flight.
    """
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(8, 4), torch.nn.Flatten(), torch.nn.Linear(8, 1))
    job = Job(stage, section=section(size=1, sync_every=4, delay=delay, second_moments={"block_size": 4}))
    engine = make_engine(model, job.config())
    found = []
    for step in range(10):
        words = torch.tensor([[1 + rank, 3], [2, 4]]) if step != 4 else torch.tensor([[7, 7], [1, 2]])
        train_on(engine, (engine(words) - 1.0).square().mean())
        found.append(max(max(map(abs, values)) for values in weights(engine).values()))
    return found


@SAMPLED
@pytest.mark.parametrize("delay", [0, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_row_first_seen_while_moments_are_in_flight_takes_normal_steps(stage: int, delay: int) -> None:
    for largest_by_step in run_forks(2, words_of_a_rare_row, stage, delay):
        assert max(largest_by_step) < largest_by_step[0] + 0.2


def with_optimizer(rank: int, kind: str, options: Mapping[str, Any]) -> str:
    """Return the error for an optimizer of the program, at the start or at the first exchange of moments."""
    deepspeed.init_distributed("gloo")
    model = network()
    job = Job(
        1, section=section(size=1, sync_every=2, second_moments={}), extra={"zero_allow_untested_optimizer": True}
    )
    config = {key: value for key, value in job.config().items() if key != "optimizer"}
    optimizer = getattr(torch.optim, kind)(model.parameters(), **options)
    try:
        engine = deepspeed_compress.initialize(model=model, optimizer=optimizer, config=config)[0]
        assert kind == "Adamax"
        run(engine, data(rank, job))
    except UnsupportedError as error:
        return str(error)
    return ""


@SAMPLED
@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        ("SGD", {"lr": 0.1}, "SGD has betas ['None'] and amsgrad False"),
        ("Adadelta", {}, "Adadelta has betas ['None']"),
        ("AdamW", {"amsgrad": True}, "AdamW has betas ['(0.9, 0.999)'] and amsgrad True"),
        ("Adamax", {}, "the state of Adamax has ['exp_avg', 'exp_inf', 'step']"),
    ],
)
def test_an_optimizer_without_second_moments_is_refused(kind: str, options: Mapping[str, Any], text: str) -> None:
    for found in run_forks(2, with_optimizer, kind, options):
        assert found.startswith("/deepspeed_compress/islands/second_moments: ")
        assert text in found


def drift(rank: int, *jobs: Job) -> list[list[list[float]]]:
    """Return weights [steps, 12] after every step of a model whose gradient does not depend on them."""
    found = []
    for job in jobs:
        torch.manual_seed(0)
        model = torch.nn.Linear(12, 1, bias=False)
        engine = make_engine(model, job.config())
        seen = []
        for _ in range(job.steps):
            train_on(engine, engine(torch.full((1, 12), 1.0 + rank)).sum())
            seen.append(weights(engine)["weight"])
        found.append(seen)
        engine.destroy()
    return found


def test_a_delayed_fragment_is_applied_without_losing_updates() -> None:
    """Updates add up whenever they are exchanged, so the mean takes the same path."""
    settings = {"size": 1, "sync_every": 4, "exchange": {"method": "none"}}
    jobs = [Job(1, extra=SGD, steps=8, section=section(**settings, fragments=2, delay=delay)) for delay in (0, 1)]
    first, second = (torch.tensor(rank) for rank in run_forks(2, drift, *jobs))
    mean, apart = (first + second) / 2, (first - second).abs()
    torch.testing.assert_close(mean[1], mean[0], atol=1e-6, rtol=0)
    # Without a delay, a fragment is exchanged at step 8. With a delay of one step, none is.
    assert float(apart[0][7].min()) == 0.0
    assert float(apart[1][7].min()) > 0.0


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
def test_gradient_traffic_inside_an_island_equals_that_of_a_job_of_its_size(stage: int) -> None:
    """Each of two islands sends as many bytes as a job of its size, compressed."""
    methods = {"gradients": {"bits": 4}, "monitor": {"announce": False}}
    alone = Job(stage, section=methods, steps=3)
    divided = replace(alone, section={**methods, "islands": {"size": 2, "sync_every": 100}})
    sizes = ("bytes_sent", "bytes_uncompressed")
    expected, found = run_forks(2, figures_of, alone, *sizes)[0], run_forks(4, figures_of, divided, *sizes)[0]
    assert found == expected
    assert all(3 * sent < uncompressed for sent, uncompressed in found)


def test_warm_up_steps_end_with_the_mean() -> None:
    job = Job(1, section=section(size=1, sync_every=100, warmup_steps=2), steps=4)
    first, second = run_forks(2, by_step, job)
    assert [one == other for one, other in zip(first, second, strict=True)] == [True, True, False, False]


def kept_back(rank: int, job: Job) -> list[list[float]]:
    """Return residuals before and after an exchange. The second island's master weights are set to NaN."""
    engine = start(job)
    run(engine, data(rank, job))
    islands = engine.compression.islands
    if rank == 1:
        with torch.no_grad():
            engine.optimizer.single_partition_of_fp32_groups[0].fill_(float("nan"))
    found = []
    for _ in range(2):
        found.append([value for _, part in islands.stores.by_name["gradients"].items() for value in part.tolist()])
        islands.step_ended(job.steps + 2)
    return found


def test_residuals_of_an_island_that_diverged_are_not_sent() -> None:
    """The mean is over the other islands only, so such a residual would get too much weight."""
    job = Job(1, section=section(size=1, sync_every=2, exchange={"method": "topk", "density": 0.05}))
    (before, after), (spoilt_before, spoilt_after) = run_forks(2, kept_back, job)
    assert any(spoilt_before)
    assert spoilt_after == spoilt_before
    assert after != before


def continued(rank: int, job: Job, directory: str) -> list[dict[str, list[float]]]:
    """Return the weights after each exchange that follows a load for which one of two islands has a damaged file."""
    engine, batches = start(job), data(rank, job)
    run(engine, batches[:4])
    engine.save_checkpoint(directory, tag="t")
    if rank == 0:
        [file] = Path(directory, "t").glob("deepspeed_compress_islands_rank_00001.safetensors")
        file.write_bytes(file.read_bytes()[:100])
    dist.barrier()
    with pytest.raises(StateError, match="damaged"):
        engine.load_checkpoint(directory, tag="t")
    seen = []
    for place in (4, 6):
        run(engine, batches[place : place + 2])
        seen.append(weights(engine))
    return seen


def test_islands_agree_after_a_load_that_failed(tmp_path: Path) -> None:
    job = Job(1, section=section(size=1, sync_every=2, exchange={"method": "blockwise", "bits": 8}), steps=8)
    first, second = run_forks(2, continued, job, str(tmp_path))
    assert first == second
    assert first[0] != first[1]


DILOCO = section(size=2, preset="diloco", sync_every=4, fragments=2, delay=1, own=[HEAD], second_moments={})


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_a_resumed_run_continues_bit_for_bit(stage: int, tmp_path: Path) -> None:
    job = Job(stage, section=DILOCO, steps=9)
    straight = run_forks(4, save_and_continue, job, str(tmp_path), 5)
    assert run_forks(4, resume, job, str(tmp_path), 5) == straight
    assert (tmp_path / "latest").read_text() == (tmp_path / "island_0001" / "latest").read_text()


@SAMPLED
@pytest.mark.parametrize("stage", [0, 2])
def test_a_resumed_run_with_muon_continues_up_to_rounding(stage: int, tmp_path: Path) -> None:
    """DeepSpeed's own Muon does not resume bit for bit either."""
    outer = {"optimizer": "nesterov", "lr": 0.7}
    islands = section(size=1, sync_every=4, outer=outer, exchange={"method": "none"}, second_moments={})
    job = Job(stage, section=islands, steps=9, extra=MUON)
    straight = run_forks(2, save_and_continue, job, str(tmp_path), 5)
    for (one, _), (other, _) in zip(run_forks(2, resume, job, str(tmp_path), 5), straight, strict=True):
        assert largest_difference(one, other) < 1e-6


@SAMPLED
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 3)])
def test_the_number_of_islands_may_change_on_resume(saved: int, loaded: int, tmp_path: Path) -> None:
    job = Job(1, section=section(size=1, preset="sparseloco", sync_every=2), steps=8)
    run_forks(saved, save_and_continue, job, str(tmp_path), 4)
    ranks = run_forks(loaded, resume, job, str(tmp_path), 4)
    assert all(one == ranks[0][0] for one, _ in ranks)


@SAMPLED
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("tag", ["epoch/1", "a.b", "run.tmp", "epoch/1/step.7", "e p", "./x"])
def test_a_tag_may_be_a_path(tag: str, named: bool, tmp_path: Path) -> None:
    """Anchors, momentum and residuals are loaded from the same tag."""
    islands = section(size=1, preset="diloco", sync_every=4, fragments=2, delay=1)
    job = Job(1, section=islands, steps=9)
    straight = run_forks(2, save_and_continue, job, str(tmp_path), 5, tag)
    assert run_forks(2, resume, job, str(tmp_path), 5, tag if named else None) == straight


def refused_tags(rank: int, job: Job, directory: str, tags: list[str]) -> list[str]:
    engine, texts = start(job), []
    for tag in tags:
        texts.append(refusal(ConfigError, engine.save_checkpoint, directory, tag=tag))
    return texts


def test_a_tag_with_which_islands_would_overwrite_each_other_is_refused(tmp_path: Path) -> None:
    tags = [str(tmp_path / "here"), "../up", "a/../../b", "island_0001", "x/island_0000"]
    for texts in run_forks(2, refused_tags, Job(1, section=section(size=1)), str(tmp_path / "d"), tags):
        check_contained((f"save_checkpoint: tag {tag!r} is not below" for tag in tags), texts)
    assert not (tmp_path / "here").exists()


def be_slower(rank: int, job: Job, ending: str) -> int:
    """Train islands of which the second one is slower. Both end while an exchange is in flight."""
    ends: list[Any] = []
    atexit.register = lambda work, *given: ends.append(work)  # type: ignore[assignment]
    engine = start(job)
    for batch in data(rank, job):
        time.sleep(0.15 * rank)
        run(engine, [batch])
    match ending:
        case "destroy":
            engine.destroy()
        case "exit":
            # Programs do this, and then the interpreter does. A forked process does not.
            dist.destroy_process_group()
            for work in ends:
                if getattr(work, "func", None) is divided._end:
                    work()
    return int(engine.global_steps)


@SAMPLED
@pytest.mark.parametrize("ending", ["destroy", "exit"])
def test_an_island_that_ends_first_waits_for_pending_exchanges(ending: str) -> None:
    job = Job(1, section=section(size=1, sync_every=4, delay=3, exchange={"method": "blockwise", "bits": 4}))
    assert run_forks(2, be_slower, job, ending) == [job.steps] * 2


def from_plain(rank: int, alone: Job, divided: Job, directory: str) -> list[dict[str, list[float]]]:
    """Return the weights that a job without islands saved, and those from which every island starts."""
    engine = start(alone)
    run(engine, data(0, alone))
    engine.save_checkpoint(directory)
    before = weights(engine)
    engine.destroy()
    islands = start(divided)
    islands.load_checkpoint(directory, load_optimizer_states=False)
    return [before, weights(islands)]


def test_a_checkpoint_without_islands_is_loaded_by_all(tmp_path: Path) -> None:
    divided = Job(1, section=section(size=1))
    for before, after in run_forks(2, from_plain, Job(1), divided, str(tmp_path)):
        assert after == before


def sampled(rank: int, job: Job) -> list[int]:
    config = {**job.config(), "train_batch_size": 4 * BATCH}
    model = network()
    engine, _, loader, _ = deepspeed_compress.initialize(
        model=model, model_parameters=list(model.parameters()), training_data=list(range(24)), config=config
    )
    assert engine.train_micro_batch_size_per_gpu() * 2 == engine.train_batch_size()
    return list(loader.data_sampler)


def test_data_and_batch_size_are_those_of_the_whole_job() -> None:
    ranks = run_forks(4, sampled, Job(1, section=section(size=2)))
    assert sorted(number for rank in ranks for number in rank) == list(range(24))


def refused(rank: int, job: Job) -> str:
    # Wait until all ranks are connected. A rank that ends earlier would cause another error in the others.
    deepspeed.init_distributed()
    dist.barrier()
    return refusal((ConfigError, UnsupportedError), start, job)


INVALID: tuple[tuple[Mapping[str, Any], str], ...] = (
    ({"size": 2}, "islands/size: islands of 2 do not divide the 3 ranks"),
    ({}, "/deepspeed_compress/islands/size: null with by_host: false"),
    ({"size": 1, "delay": 30}, "/deepspeed_compress/islands/delay: 30 is too large for sync_every 30"),
    ({"size": 1, "outer": {"momentum": 0.5}}, "/deepspeed_compress/islands/outer/momentum: 0.5 has no effect"),
    ({"size": 1, "exchange": {"method": "powersgd"}}, "/deepspeed_compress/islands/exchange: powersgd"),
    (
        {"size": 1, "exchange": {"method": "blockwise", "error_feedback": {"reset_interval": 2}}},
        "/deepspeed_compress/islands/exchange/error_feedback/reset_interval: 2 has no effect",
    ),
    ({"size": 1, "own": ["."]}, "/deepspeed_compress/islands/own: ['.'] names all 7 parameters"),
)


def all_refused(rank: int) -> list[str]:
    return [refused(rank, Job(1, section=section(**islands))) for islands, _ in INVALID]


def test_invalid_settings_are_refused_by_name() -> None:
    for messages in run_forks(3, all_refused):
        check_contained((text for _, text in INVALID), messages)


def test_a_pattern_of_own_without_effect_is_reported() -> None:
    for [text] in run_forks(2, warned, Job(1, section=section(size=1, own=[HEAD, "heads"]))):
        assert "/deepspeed_compress/islands/own/1: 'heads' matches none of the 7 parameters" in text


def attached_late(rank: int) -> str:
    config = Job(1, section(size=1)).config()
    engine = deepspeed.initialize(model=network(), config=config)[0]
    text = refusal(ConfigError, deepspeed_compress.attach, engine)
    dist.barrier()
    return text


def test_an_existing_engine_cannot_be_divided() -> None:
    assert all("divides ranks before an engine is made" in text for text in run_forks(2, attached_late))


def test_steps_with_an_exchange_report_no_ratio() -> None:
    """DeepSpeed alone has no such traffic, so the ratio of a step with an exchange would be 0."""
    job = Job(1, section={**section(size=2, sync_every=2), "monitor": {"announce": False, "every": 1}}, steps=5)
    first, *_ = run_forks(4, figures_of, job, "total_ratio")
    assert first == [(1.0,), (1.0,), (None,), (1.0,), (None,)]


def bytes_by_step(rank: int, job: Job) -> list[tuple[int, int, bool]]:
    """Return the bytes of islands and of gradients by step, and whether the islands were compared."""
    engine, found = start(job), []
    meter = engine.compression.meter
    for batch in data(rank, job):
        run(engine, [batch])
        found.append((meter.bytes_islands, meter.bytes_sent, meter.islands_cosine is not None))
    return found


def test_bytes_of_islands_are_counted_separately_and_match_the_plan() -> None:
    """Exchanges after every second step are reported by the step that follows."""
    exchange = {"method": "blockwise", "bits": 4}
    job = Job(1, section=section(size=1, sync_every=2, exchange=exchange, second_moments={"block_size": 8}), steps=6)
    settings = parse_section(job.config()).islands
    assert settings is not None
    size = sum(parameter.numel() for parameter in network().parameters())
    planned = {plan.sync_every: plan for plan in plans(settings, 2, size, 1e8, 1.0)}[2].bytes_a_step * 2
    for rank in run_forks(2, bytes_by_step, job):
        assert [sent for _, sent, _ in rank] == [0] * 6
        assert [compared for *_, compared in rank] == [False, True] * 3
        assert [size for size, *_ in rank] == pytest.approx([0, planned] * 3, rel=0.1)


def with_adapters(rank: int, *jobs: Job) -> list[dict[str, list[float]]]:
    """Return the weights after each job, which trains adapters and a layer next to frozen weights."""
    seen = []
    for job in jobs:
        lora = LoraConfig(r=2, target_modules=["0", "2"], init_lora_weights=False)
        model = inject_adapter_in_model(lora, network())
        model[4].requires_grad_(True)
        engine = make_engine(model, job.config())
        before = weights(engine)
        run(engine, data(rank, job))
        seen.append(weights(engine))
        assert names_apart(before, seen[-1]) == {name for name in before if "lora" in name or name.startswith("4.")}
    return seen


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_adapters_of_two_islands_equal_those_of_data_parallelism(stage: int) -> None:
    whole = Job(stage, extra=SGD)
    divided = replace(whole, section=section(size=2, sync_every=1, exchange={"method": "none"}))
    for plain, ours in run_forks(4, with_adapters, whole, divided):
        assert largest_difference(plain, ours) < 1e-6


def test_second_moments_are_refused_if_adam_steps_no_parameter() -> None:
    job = Job(0, section=section(size=1, second_moments={}), extra=MUON)
    for found in run_forks(2, of_matrices_alone, job):
        assert found.startswith("/deepspeed_compress/islands/second_moments: MuonWithAuxAdam has betas []")


def of_matrices_alone(rank: int, job: Job) -> str:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 1, bias=False))
    return refusal(UnsupportedError, make_engine, model, job.config())


@pytest.mark.parametrize("optimizer", ["AdamW", ["AdamW"], {"type": 3}])
def test_an_invalid_optimizer_entry_is_not_reported_by_islands(optimizer: Any) -> None:
    job = Job(1, section=section(size=1, second_moments={}), extra={"optimizer": optimizer})
    assert not [one for one in find_problems(job.config()) if "second_moments" in str(one)]


def test_a_configuration_without_second_moments_is_refused() -> None:
    [found] = find_problems(Job(1, section=section(size=1, second_moments={}), extra=SGD).config())
    assert str(found).startswith(
        '/deepspeed_compress/islands/second_moments: has no effect with optimizer "SGD", which has no second moments'
    )


def save_by_epoch(rank: int, job: Job, directory: str) -> list[str]:
    engine = start(job)
    engine.save_checkpoint(directory, tag=0)
    run(engine, data(rank, job))
    engine.save_checkpoint(directory, tag=1)
    path, _ = engine.load_checkpoint(directory, tag=0)
    return [Path(path).parent.name, str(engine.global_steps)]


def test_a_tag_may_be_zero(tmp_path: Path) -> None:
    assert run_forks(2, save_by_epoch, Job(1, section=section(size=1)), str(tmp_path)) == [["0", "0"]] * 2
    assert {found.name for found in tmp_path.iterdir() if found.is_dir()} == {"0", "1", "island_0001"}
