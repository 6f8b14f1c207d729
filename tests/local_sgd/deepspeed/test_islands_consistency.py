"""State that is equal in all islands at the start, after one has diverged, and after loading."""

import gc
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.moe.layer import MoE
from deepspeed.runtime.engine import DeepSpeedEngine

import deepspeed_compress
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.exchanged_parameters import clear_non_finite, digest_parameters
from tests.support.forks import RankError, run_forks
from tests.support.island_jobs import HEAD, SGD, section
from tests.support.jobs import (
    WIDTH,
    Job,
    data,
    largest_difference,
    make_engine,
    network,
    run,
    start,
    train,
    weights,
)
from tests.support.messages import caught_warnings, refusal
from tests.support.methods import UNCLIPPED
from tests.support.resuming import resume, save_and_continue

SAMPLED = pytest.mark.sampled(12)


@SAMPLED
@pytest.mark.parametrize("threshold", [40, 10**5])
def test_persistent_zero_3_parameters_have_the_values_of_the_mean(threshold: int) -> None:
    kept = {"stage3_param_persistence_threshold": threshold}
    whole = Job(3, zero=kept, extra=SGD, steps=4)
    mean = section(size=2, sync_every=1, exchange={"method": "none"})
    for plain, ours in run_forks(4, train, whole, Job(3, section=mean, zero=kept, extra=SGD, steps=4)):
        assert largest_difference(ours.parameters, plain.parameters) < 1e-6


def sharded(rank: int) -> str:
    job = Job(3, section=section(size=2))
    deepspeed.init_distributed("gloo")
    plain = {key: value for key, value in job.config().items() if key != "deepspeed_compress"}
    with deepspeed.zero.Init(config_dict_or_path=plain):
        model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.Linear(32, 4))
    return refused(model, job)


class Experts(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(WIDTH, 8)
        self.moe = MoE(8, torch.nn.Linear(8, 8), num_experts=2, ep_size=1)


def with_experts(rank: int) -> str:
    deepspeed.init_distributed("gloo")
    return refused(Experts(), Job(0, section=section(size=2)))


def refused(model: torch.nn.Module, job: Job) -> str:
    text = refusal(UnsupportedError, make_engine, model, job.config())
    torch.distributed.barrier()
    return text


@pytest.mark.parametrize(
    ("work", "text"), [(sharded, "zero.Init does over the whole job"), (with_experts, "mixture-of-experts")]
)
def test_parameters_divided_over_the_whole_job_are_refused(work: Any, text: str) -> None:
    for message in run_forks(4, work):
        assert text in message


def collected(rank: int, job: Job) -> tuple[int, int]:
    """Return the group of a second engine; the garbage collector destroys the first one meanwhile."""
    gc.disable()
    engine = start(job)
    run(engine, data(rank, job)[:2])
    engine.destroy()
    del engine
    original = DeepSpeedEngine._configure_checkpointing

    def collecting(engine: Any) -> None:
        if rank == 0:
            gc.collect()
        original(engine)

    DeepSpeedEngine._configure_checkpointing = collecting
    engine = start(job)
    return engine.seq_data_parallel_group.size(), engine.optimizer.dp_process_group.size()


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
def test_an_engine_that_is_collected_late_keeps_the_division_of_the_next_one(stage: int) -> None:
    assert run_forks(4, collected, Job(stage, section=section(size=2, sync_every=2))) == [(2, 2)] * 4


def phase(rank: int, job: Job, directory: str, first: int, tag: str | None) -> tuple[int, dict[str, list[float]]]:
    """Return what is loaded at step `first`, and the weights that are saved four steps later."""
    engine = start(job)
    if first:
        engine.load_checkpoint(directory, tag=tag)
    step = engine.global_steps
    run(engine, data(rank, job)[first : first + 4])
    engine.save_checkpoint(directory)
    return step, weights(engine)


@SAMPLED
@pytest.mark.parametrize("tag", [None, "global_step8"])
def test_directories_of_former_islands_are_not_read(tag: str | None, tmp_path: Path) -> None:
    job = Job(1, section=section(size=1, sync_every=4), steps=12)
    run_forks(4, phase, job, str(tmp_path), 0, None)
    run_forks(2, phase, job, str(tmp_path), 4, None)
    found = run_forks(4, phase, job, str(tmp_path), 8, tag)
    assert [step for step, _ in found] == [8] * 4
    assert all(one == found[0][1] for _, one in found)


def length(found: Mapping[str, list[float]]) -> float:
    return float(torch.tensor(found["4.weight"]).norm())


def frozen(rank: int, job: Job, requires_grad: bool) -> dict[str, list[float]]:
    """Return the initial weights of an island.

    Ranks of different islands initialize the model differently, and the optimizer does not get the first layer.
    """
    model = network()
    torch.manual_seed(rank // 2)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model[0].requires_grad_(requires_grad)
    trained = [parameter for name, parameter in model.named_parameters() if not name.startswith("0.")]
    engine = make_engine(model, job.config(), trained)
    return weights(engine)


@SAMPLED
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize(("stage", "threshold"), [(0, 0), (1, 0), (3, 0), (3, 10**5)])
def test_untrained_weights_are_equal_in_all_islands(stage: int, threshold: int, requires_grad: bool) -> None:
    zero = {"stage3_param_persistence_threshold": threshold}
    first, *others = run_forks(4, frozen, Job(stage, section=section(size=2), zero=zero), requires_grad)
    assert all(other == first for other in others)


COMPRESSED: Mapping[str, Any] = {"method": "topk", "density": 0.1}


def healed(rank: int, job: Job) -> tuple[list[bool], list[str]]:
    """Return whether the weights are finite after every step, and the warnings."""
    engine, seen = start(job), []
    with caught_warnings() as texts:
        for batch in data(rank, job):
            run(engine, [batch])
            seen.append(all(torch.tensor(values).isfinite().all() for values in weights(engine).values()))
    return seen, texts


@SAMPLED
@pytest.mark.parametrize(
    ("shared", "gradients"),
    [
        ({"size": 2, "sync_every": 4, "fragments": 2}, "none"),
        ({"size": 2, "sync_every": 6, "fragments": 3, "delay": 2}, "none"),
        ({"size": 2, "sync_every": 4}, COMPRESSED),
    ],
)
def test_an_island_that_diverged_recovers_completely(shared: Mapping[str, Any], gradients: Any) -> None:
    """Fragments and optimizer states must recover together, or one non-finite element would spoil the others again."""
    inside = {"method": gradients} if isinstance(gradients, str) else gradients
    job = Job(0, section={**section(**shared), "gradients": inside}, steps=16, extra=UNCLIPPED)
    for seen, _ in run_forks(4, healed, replace(job, poison=(1, 2))):
        assert all(seen[6:])


def loaded(rank: int, job: Job, directory: str, how: Mapping[str, Any]) -> list[float]:
    """Return the state of exchanges after only weights were loaded in a run that has continued."""
    engine, batches = start(job), data(rank, job)
    engine.save_checkpoint(directory)
    run(engine, batches)
    engine.load_checkpoint(directory, **how)
    stores = engine.compression.islands.stores.by_name
    return [float(values.abs().sum()) for name in stores if name != "anchor" for _, values in stores[name].items()]


@pytest.mark.parametrize("how", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_weights_loaded_alone_ignore_earlier_momentum(how: Mapping[str, Any], tmp_path: Path) -> None:
    shared = section(size=1, preset="diloco", sync_every=2)
    for sums in run_forks(2, loaded, Job(1, section=shared, steps=4), str(tmp_path), how):
        assert not any(sums)


def test_islands_agree_if_the_state_of_one_was_damaged(tmp_path: Path) -> None:
    shared = {**section(size=1, preset="diloco", sync_every=2), "on_missing_state": "reset"}
    job = Job(1, section=shared, steps=8)
    run_forks(2, save_and_continue, job, str(tmp_path), 4)
    [state] = tmp_path.glob("*/deepspeed_compress_islands_rank_00001.safetensors")
    state.write_bytes(b"damaged")
    (first, _), (second, _) = run_forks(2, resume, job, str(tmp_path), 4)
    assert first == second


def save_last(rank: int, job: Job, directory: str) -> None:
    engine = start(job)
    run(engine, data(rank, job))
    engine.save_checkpoint(directory, tag="last")


def test_islands_do_not_load_a_state_whose_tag_deepspeed_alone_has_saved_since(tmp_path: Path) -> None:
    """The first island has its files where DeepSpeed alone saves."""
    job = Job(0, section=section(size=1, preset="diloco", sync_every=2))
    for one in (job, replace(job, section=None)):
        run_forks(2, save_last, one, str(tmp_path))
    with pytest.raises(RankError, match=r"(?s)StateError: .*islands_rank_00000\.json was left by an earlier save"):
        run_forks(2, resume, job, str(tmp_path), 4, "last")


def detached(rank: int, job: Job) -> str:
    with pytest.raises(UnsupportedError) as caught:
        deepspeed_compress.detach(start(job))
    return str(caught.value)


def test_an_island_of_a_job_cannot_be_detached() -> None:
    [text, _] = run_forks(2, detached, Job(1, section=section(size=1)))
    assert "/deepspeed_compress/islands: DeepSpeed alone would save" in text


def by_host(rank: int, job: Job, hosts: Sequence[str]) -> str:
    os.environ["LOCAL_WORLD_SIZE"] = hosts[rank]
    return refusal(ConfigError, start, job)


@pytest.mark.parametrize("hosts", [("2", "2", "1", "1"), ("3", "3", "3", "1")])
def test_hosts_with_unequal_numbers_of_ranks_are_refused_on_all(hosts: Sequence[str]) -> None:
    for message in run_forks(4, by_host, Job(1, section=section(by_host=True)), hosts):
        assert "allowed: the same number on each" in message


DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int64, torch.uint64, torch.complex64,
    torch.complex128,
)  # fmt: skip


def of_bytes(dtype: torch.dtype, count: int, seed: int = 0) -> torch.Tensor:
    """Return `count` elements of random bytes."""
    if dtype == torch.bool:
        return torch.randint(0, 2, (count,), generator=torch.Generator().manual_seed(seed)).bool()
    size = count * dtype.itemsize
    values = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return values.view(dtype) if size else torch.empty(0, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_digest_depends_on_bits(dtype: torch.dtype) -> None:
    def digest_of(values: torch.Tensor) -> str:
        return digest_parameters([torch.nn.Parameter(values, requires_grad=False)])

    values = of_bytes(dtype, 100)
    same = digest_of(values)
    assert digest_of(torch.stack([values, values], 1)[:, 0]) == same
    assert digest_of(of_bytes(dtype, 100, seed=1)) != same
    assert digest_of(values[:0]) != same


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2])
def test_only_non_finite_elements_are_cleared(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, torch.nan, -2.0]).to(dtype)
    clear_non_finite(values)
    assert values.float().tolist() == [1.0, 0.0, -2.0]


def own_and_not(rank: int, mine: Job, shared: Job, directory: str) -> list[float]:
    """Return norms of a parameter that is no longer local, after loading and after each exchange."""
    engine = start(mine)
    run(engine, data(rank, mine))
    engine.save_checkpoint(directory)
    engine.destroy()
    engine = start(shared)
    engine.load_checkpoint(directory)
    return [length(weights(engine)), *(run_and_measure(engine, batch) for batch in data(rank, shared))]


def run_and_measure(engine: Any, batch: Any) -> float:
    run(engine, [batch])
    return length(weights(engine))


def test_parameters_that_are_no_longer_local_start_from_the_first_island(tmp_path: Path) -> None:
    shared = {"size": 1, "preset": "diloco", "sync_every": 2}
    jobs = [Job(1, section=section(**shared, **more)) for more in ({"own": [HEAD]}, {})]
    first, second = run_forks(2, own_and_not, *jobs, str(tmp_path))
    assert first[0] == second[0]
    assert first[2::2] == second[2::2]
    assert max(first) < 1.2 * first[0]


def test_islands_load_a_later_checkpoint_of_a_job_without_islands(tmp_path: Path) -> None:
    job = Job(1, section=section(size=1, sync_every=4), steps=12)
    run_forks(2, phase, job, str(tmp_path), 0, None)
    run_forks(1, phase, Job(1, steps=12), str(tmp_path), 4, None)
    found = run_forks(2, phase, job, str(tmp_path), 8, None)
    assert [step for step, _ in found] == [8] * 2
    assert found[0][1] == found[1][1]


def test_a_digest_distinguishes_dtypes() -> None:
    bits = of_bytes(torch.float16, 64)
    digests = {
        digest_parameters([torch.nn.Parameter(bits.view(dtype), requires_grad=False)])
        for dtype in (torch.float16, torch.bfloat16, torch.int16)
    }
    assert len(digests) == 3


class Frozen(torch.nn.Module):
    """Return a network with additional untrained weights of `dtype`, as in a quantized base model."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.inner = network()
        self.register_parameter("frozen", torch.nn.Parameter(of_bytes(dtype, 33, seed), requires_grad=False))
        self.register_parameter("empty", torch.nn.Parameter(of_bytes(dtype, 0), requires_grad=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def with_frozen(rank: int, dtype: torch.dtype) -> list[int]:
    job = Job(1, section=section(size=1))
    deepspeed.init_distributed("gloo")
    model = Frozen(dtype, seed=rank)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine = make_engine(model, job.config(), trained)
    return engine.module.frozen.detach().contiguous().view(torch.uint8).tolist()


@SAMPLED
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.bool, torch.int64, torch.complex64])
def test_frozen_weights_of_any_dtype_are_copied_from_the_first_island(dtype: torch.dtype) -> None:
    expected = of_bytes(dtype, 33, seed=0).view(torch.uint8).tolist()
    assert run_forks(2, with_frozen, dtype) == [expected, expected]


@SAMPLED
@pytest.mark.parametrize("moments", [None, {}])
@pytest.mark.parametrize("stage", [0, 1])
def test_an_island_that_diverged_continues_with_the_weights_of_the_others(stage: int, moments: Any) -> None:
    shared = section(size=2, sync_every=3, second_moments=moments)
    ranks = run_forks(4, healed, Job(stage, section=shared, steps=7, poison=(1, 2), extra=UNCLIPPED))
    for seen, texts in ranks[:2]:
        assert all(seen)
        assert not texts
    for seen, texts in ranks[2:]:
        assert all(seen[2:])
        assert all(seen) or any("this island has diverged" in text for text in texts)
    # Without ZeRO, DeepSpeed applies the step.
    assert all(ranks[2][0]) == (stage > 0)
