"""Elastic islands under DeepSpeed. Each is a job of its own with one or two ranks."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deepspeed_compress
from deepspeed_compress.checkpointing.completeness import read_lists
from deepspeed_compress.compression import state
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import ConfigError, IslandError, StateError
from deepspeed_compress.local_sgd import anchors
from deepspeed_compress.local_sgd.coordinator.client import status
from deepspeed_compress.local_sgd.deepspeed import elastic
from tests.support.coordinators import become_island, coordinator, own_ports, parameter_server
from tests.support.forks import run_forks
from tests.support.island_jobs import HEAD, elastic_section, run_apart, wait_for
from tests.support.jobs import MUON, Job, data, make_engine, moments, network, run, start, train, weights
from tests.support.messages import caught_warnings, refusal

ISLAND_FILES = "deepspeed_compress_islands_rank"

SAMPLED = pytest.mark.sampled(4)

STAGES = (0, 1, 2, 3)
FUSED: Mapping[str, Any] = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
"""DeepSpeed's own AdamW."""


WARM_UP: Mapping[str, Any] = {
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_num_steps": 100, "warmup_max_lr": 0.01, "warmup_type": "linear"},
    }
}
Seen = tuple[int, dict[str, list[float]]]


def apart(rank: int, job: Job, seen_of: Any = weights, late: bool = False) -> list[Seen]:
    """Return the version and the weights after every step that ended with an exchange, for islands of two ranks.

    If `late`, the second island takes a step only if the first one waits for it, so it has made fewer steps at each
    exchange.
    """
    engine, seen = start(job), []
    islands, address = engine.compression.islands, job.section["islands"]["elastic"]["rendezvous"]
    for batch in data(10 * islands.number + rank % 2, job):
        while late and rank == 2 and not any(one["waiting"] for one in status(address)["islands"]):
            time.sleep(0.05)
        run(engine, [batch])
        if len(islands.history) > len(seen):
            seen.append((islands.exchange.version, seen_of(engine)))
        if len(seen) == 3:
            break
    engine.destroy()
    return seen


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_islands_have_the_same_weights_at_every_version(stage: int) -> None:
    first, second, third, fourth = run_apart(2, apart, Job(stage, steps=40), size=2)
    assert first == second
    assert third == fourth
    assert first == third
    assert len(first) == 3
    assert first[0][0] < first[1][0] < first[2][0]


def corrected(engine: Any) -> dict[str, list[float]]:
    """Return bias-corrected second moments, which are equal in islands of unequal age."""
    # DeepSpeed's FusedAdam counts steps only in the state of one parameter.
    steps = max(float(state.get("step", 0)) for state in engine.basic_optimizer.state.values())
    [beta] = {group["betas"][1] for group in engine.basic_optimizer.param_groups if "betas" in group}
    found = moments(engine)
    assert found
    return {"steps": [steps]} | {
        name: [value / (1 - beta**steps) for value in values] for name, values in found.items()
    }


@SAMPLED
@pytest.mark.parametrize(("stage", "extra"), [(0, {}), (1, {}), (0, FUSED), (0, MUON)])
def test_islands_have_the_same_second_moments_at_every_version(stage: int, extra: Mapping[str, Any]) -> None:
    job = Job(stage, extra=extra, steps=40)
    ranks = run_apart(2, apart, job, corrected, True, size=2, second_moments={"block_size": 1})
    first, second, third, fourth = ranks
    assert [seen["steps"] for _, seen in first] != [seen["steps"] for _, seen in third]
    for (version, mine), (same, others) in zip(first + second, third + fourth, strict=True):
        assert version == same
        others["steps"] = mine["steps"]
        assert others == {name: pytest.approx(values, rel=1e-5) for name, values in mine.items()}
    assert (first == second) == (stage == 0)


def test_an_island_keeps_parameters_of_its_own() -> None:
    """They are local at every version, including the first."""
    first, _, third, _ = run_apart(2, apart, Job(1, steps=40), size=2, own=[HEAD])
    for (version, mine), (same, others) in zip(first, third, strict=True):
        assert version == same
        assert {name for name in mine if mine[name] != others[name]} == {"4.weight", "4.bias"}


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_a_single_island_trains_as_deepspeed_does(stage: int) -> None:
    [[plain]] = run_forks(1, train, Job(stage, steps=6))
    [[ours]] = run_apart(1, train, Job(stage, steps=6), minimum=1, exchange={"method": "none"})
    for name, values in plain.parameters.items():
        torch.testing.assert_close(torch.tensor(ours.parameters[name]), torch.tensor(values), atol=1e-6, rtol=1e-5)


def run_until(engine: Any, batches: Iterator[tuple[torch.Tensor, torch.Tensor]], version: int) -> None:
    """Train until `version`. The step at which an exchange happens differs from run to run."""
    while engine.compression.islands.exchange.version < version:
        run(engine, [next(batches)])


def saved(rank: int, job: Job, directories: list[str]) -> tuple[int, list[float]]:
    """Train and save. The second island saves later than the first one. The tag is a number."""
    engine, batches = start(job), cycle(data(rank, job))
    run_until(engine, batches, 2 + rank)
    engine.save_checkpoint(directories[rank], tag=0)
    found = anchor_of(engine)
    run_until(engine, batches, 1 + len(directories))
    engine.destroy()
    return found


def anchor_of(engine: Any) -> tuple[int, list[float]]:
    """Return the version of an island, and its anchor, which is empty before its first exchange without one."""
    exchange = engine.compression.islands.exchange
    return exchange.version, exchange.shared_anchor.copy(1)[2]["anchor"].tolist() if exchange.version else []


def resumed(rank: int, job: Job, directories: list[str]) -> tuple[int, list[float]]:
    engine = start(job)
    path, _ = engine.load_checkpoint(directories[rank])
    assert path is not None
    found = anchor_of(engine)
    run(engine, data(rank + 7, job))
    engine.destroy()
    return found


@SAMPLED
@pytest.mark.parametrize("more", [{}, {"checkpointing": {}}], ids=["at once", "in the background"])
def test_all_islands_restart_from_the_newest_checkpoint(tmp_path: Path, more: Mapping[str, Any]) -> None:
    directories = [str(tmp_path / name) for name in "ab"]
    before = run_apart(2, saved, Job(1, more, steps=40), directories)
    after = run_apart(2, resumed, Job(1, more, steps=3), directories)
    newest = max(before, key=lambda one: one[0])
    assert newest == before[1] != before[0]
    assert after == [newest] * 2


def follows(rank: int, job: Job, directory: str) -> float:
    """Return the learning rate of the first of two islands after some steps, or of the second one when it joins.

    The ranks of the second island receive different steps.
    """
    place, begun = rank % 2, Path(directory, "begun")
    if rank >= 2:
        wait_for(begun.parent, begun.name)
        original = anchors.fetch_anchor

        def fetch(*given: Any) -> Any:
            version, about, tensors = original(*given)
            return version, {**about, "step": about["step"] + place}, tensors

        anchors.fetch_anchor = fetch
    engine = start(job)
    if rank < 2:
        run(engine, data(place, job)[:5])
        begun.touch()
    found = float(engine.get_lr()[0])
    wait_for(begun.parent, "there" if rank < 2 else begun.name)
    begun.with_name("there").touch()
    engine.destroy()
    return found


def test_all_ranks_of_a_joining_island_follow_one_schedule(tmp_path: Path) -> None:
    ranks = run_apart(2, follows, Job(1, extra=WARM_UP), str(tmp_path), size=2, minimum=1)
    assert ranks[0] > 0
    assert ranks == [ranks[0]] * 4


def goes_on(
    rank: int, job: Job, directories: list[str], version: int, marks: Path, islands: int
) -> dict[int, list[float]]:
    """Return the anchors of an island by version, beginning with the one it starts from.

    An island without a checkpoint joins as a new one. All islands train once the others have loaded their checkpoints.
    """
    engine, batches = start(job), cycle(data(rank + 7, job))
    exchange, seen = engine.compression.islands.exchange, {}
    marks.joinpath(f"there{rank}").touch()
    if rank < len(directories):
        engine.load_checkpoint(directories[rank])
        marks.joinpath(f"loaded{rank}").touch()
    wait_for(marks, "loaded", len(directories))
    seen.update([anchor_of(engine)])
    while exchange.version < version:
        run(engine, [next(batches)])
        seen.update([anchor_of(engine)])
    marks.joinpath(f"done{rank}").touch()
    # A late island needs the others, so each of them continues until the last one is done.
    with contextlib.suppress(IslandError):
        while len(list(marks.glob("done*"))) < islands:
            run(engine, [next(batches)])
            seen.update([anchor_of(engine)])
    engine.destroy()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 4)])
def test_the_number_of_islands_may_change_when_all_restart(before: int, after: int, tmp_path: Path) -> None:
    come_back(goes_on, before, after, tmp_path)


def come_back(work: Any, before: int, after: int, tmp_path: Path, timeout: str = "5 s") -> list[dict[int, list[float]]]:
    """Restart all islands and return the results of `work`. Islands without a checkpoint join the others."""
    directories = [str(tmp_path / f"{rank}") for rank in range(before)]
    # An island that is left out of the last round continues alone.
    kept = run_apart(before, saved, Job(1, steps=60), directories, minimum=1)
    loaded, marks = min(before, after), tmp_path / "marks"
    marks.mkdir()
    newest, anchor = max(kept[:loaded], key=lambda one: one[0])
    asked = (directories[:loaded], newest + 3, marks, after)
    found = run_apart(after, work, Job(1, steps=60), *asked, minimum=loaded, timeout=timeout)
    assert [seen[newest] for seen in found[:loaded]] == [anchor] * loaded
    first = found[0]
    for seen in found:
        common = first.keys() & seen.keys()
        assert common
        assert all(first[version] == seen[version] for version in common)
    return found


def end_together(engine: Any, rank: int, marks: Path) -> None:
    """End the engine once the other of two islands is done as well."""
    marks.joinpath(f"done{rank}").touch()
    wait_for(marks, f"done{1 - rank}")
    engine.destroy()


def saved_at_once(rank: int, job: Job, marks: Path) -> list[str]:
    """Return the errors of two islands that save into the same directory."""
    engine, texts = start(job), []
    for number in range(5):
        place = marks / str(number)
        place.mkdir(exist_ok=True)
        (place / f"there{rank}").touch()
        while not (place / f"there{1 - rank}").exists():
            pass
        texts.append(refusal(StateError, engine.save_checkpoint, str(place)))
    end_together(engine, rank, marks)
    return texts


def test_one_of_two_islands_that_save_in_one_directory_at_once_is_refused(tmp_path: Path) -> None:
    found = run_apart(2, saved_at_once, Job(1), tmp_path)
    for number, texts in enumerate(zip(*found, strict=True)):
        saved, refused = sorted(texts)
        assert saved == ""
        assert f"another running job saves in {tmp_path / str(number)}, and this is island " in refused


def comes_late(rank: int, job: Job, marks: Path) -> tuple[float, float, list[int], Mapping[str, float]]:
    """Return learning rates and the order of the data.

    The learning rates are the first one, the one after the last step, and those after loading a checkpoint in several
    ways.
    """
    if rank == 1:
        wait_for(marks, "done")
    model = network()
    engine, _, loader, _ = deepspeed_compress.initialize(
        model=model, model_parameters=list(model.parameters()), training_data=list(range(24)), config=job.config()
    )
    rates = [engine.get_lr()[0]]
    run(engine, data(rank, job))
    if rank == 0:
        rates.append(engine.get_lr()[0])
        marks.joinpath("done").touch()
        while engine.compression.islands.exchange._connections.client.version and not marks.joinpath("joined").exists():
            time.sleep(0.02)
    loaded = {} if rank == 0 else rates_after_loading(engine, str(marks / "saved"))
    marks.joinpath("joined").touch()
    order = list(loader.data_sampler)
    engine.destroy()
    return rates[0], rates[-1], order, loaded


def rates_after_loading(engine: Any, directory: str) -> dict[str, float]:
    found, restore = {"before": engine.get_lr()[0]}, state.restore

    def restored(*given: Any) -> Any:
        # No other island may take the anchor of this one before it is complete.
        assert engine.compression.islands.exchange.version == 0
        return restore(*given)

    state.restore = restored
    engine.save_checkpoint(directory)
    for name, options in LOADED.items():
        engine.load_checkpoint(directory, **options)
        found[name] = engine.get_lr()[0]
    return found


LOADED: Mapping[str, Mapping[str, bool]] = {
    "all": {},
    "no states": {"load_optimizer_states": False},
    "no schedule": {"load_lr_scheduler_states": False},
    "module": {"load_module_only": True},
}


def test_an_island_that_joins_late_follows_the_schedule_and_reads_its_own_data(tmp_path: Path) -> None:
    monitor = {"announce": False, "path": str(tmp_path / "api_key=hidden")}
    job = Job(1, {"monitor": monitor}, steps=5, extra=WARM_UP)
    # The round at the end of the late island waits so long for the first one, which takes no more steps.
    first, late = run_apart(2, comes_late, job, tmp_path, minimum=1, timeout="5 s")
    assert late[0] == pytest.approx(first[1])
    assert sorted(first[2]) == sorted(late[2]) == list(range(24))
    assert first[2] != late[2]
    # The schedule of the late island was ahead of its own step count when it was saved.
    assert set(late[3]) == {"before", *LOADED}
    assert set(late[3].values()) == {late[3]["before"]}
    files = list((tmp_path / "saved").rglob("*islands*.json"))
    assert files
    assert not [file for file in files if "hidden" in file.read_text()]


def save_as_one_job(rank: int, job: Job, directory: str) -> None:
    engine = start(job)
    run(engine, data(rank, job))
    engine.save_checkpoint(directory)


def load_of_one_job(rank: int, job: Job, directory: str) -> tuple[int, list[str]]:
    engine = start(job)
    with caught_warnings() as texts:
        engine.load_checkpoint(directory)
    step = engine.global_steps
    run(engine, data(rank, job))
    engine.destroy()
    return step, [text for text in texts if "islands of one job" in text]


def test_a_checkpoint_of_islands_of_one_job_is_loaded_without_its_residuals(tmp_path: Path) -> None:
    job = Job(1, section={**elastic_section("127.0.0.1:1"), "islands": {"size": 1, "sync_every": 2}})
    run_forks(2, save_as_one_job, job, str(tmp_path))
    [(step, texts)] = run_apart(1, load_of_one_job, Job(1), str(tmp_path), minimum=1)
    assert step == 4
    assert len(texts) == 1


def refused(rank: int, job: Job, marks: Path) -> str:
    """Return the error of this island. If it has joined, it stays until the other one was refused."""
    try:
        engine = start(job if rank == 0 else replace(job, stage=2))
    except ConfigError as error:
        marks.joinpath("refused").touch()
        return str(error)
    wait_for(marks, "refused")
    engine.destroy()
    return ""


def test_islands_with_different_settings_are_refused(tmp_path: Path) -> None:
    joined, error = sorted(run_apart(2, refused, Job(1, steps=6), tmp_path, minimum=1))
    assert joined == ""
    assert "zero_stage is" in error


@pytest.mark.parametrize(
    ("islands", "text"),
    [
        ({"size": 2}, "/deepspeed_compress/islands/size: 2 only applies to islands of one job"),
        ({"delay": 1}, "/deepspeed_compress/islands/delay: 1 only applies to islands of one job"),
        ({"sync_every": "30 parsecs"}, "/deepspeed_compress/islands/sync_every"),
    ],
)
def test_invalid_settings_are_refused_by_name(islands: Mapping[str, Any], text: str) -> None:
    found = elastic_section("127.0.0.1:1", **islands)
    with pytest.raises(ConfigError, match=text):
        deepspeed_compress.config.parse_section({"deepspeed_compress": found})


def test_an_interval_in_seconds_requires_elastic_islands() -> None:
    with pytest.raises(ConfigError, match='sync_every: "30 s" is a time'):
        deepspeed_compress.config.parse_section({"deepspeed_compress": {"islands": {"size": 1, "sync_every": "30 s"}}})


def diverges(rank: int, job: Job, ports: list[int]) -> list[bool]:
    """Return for every step whether the weights are finite; one batch of the second island is NaN."""
    become_island(rank, 1, ports)
    engine, seen = start(job), []
    for inputs, labels in data(rank, job):
        given = torch.full_like(inputs, float("nan")) if rank and len(seen) == 1 else inputs
        time.sleep(0.05)
        run(engine, [(given, labels)])
        seen.append(all(torch.tensor(values).isfinite().all() for values in weights(engine).values()))
    engine.destroy()
    return seen


@SAMPLED
@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_island_that_diverged_continues_with_the_weights_of_the_others(asynchronous: bool) -> None:
    """Without ZeRO, DeepSpeed applies non-finite steps, and the optimizer keeps the values in its state."""
    served = parameter_server() if asynchronous else coordinator()
    with served as there, own_ports(2) as ports:
        address = f"127.0.0.1:{there.port}" if asynchronous else there
        more = {"parameter_server": {}} if asynchronous else {"minimum": 2}
        shared = elastic_section(address)
        islands = shared["islands"]
        elastic = {key: value for key, value in islands["elastic"].items() if key != "minimum"} | more
        job = Job(0, section={**shared, "islands": {**islands, "elastic": elastic}}, steps=40)
        first, second = run_forks(2, diverges, replace(job, extra={"gradient_clipping": 0.0}), ports)
    assert all(first)
    assert not all(second)
    assert all(second[-8:])


def counted(rank: int, job: Job, directory: str, load: bool) -> int:
    """Return the number of samples since the last exchange, four steps after it, when saving or loading."""
    engine = start(job)
    if load:
        engine.load_checkpoint(directory)
    else:
        run(engine, data(rank, job))
        engine.save_checkpoint(directory)
    kept = int(engine.global_samples) - engine.compression.islands.exchange.describe()["samples"]
    engine.destroy()
    return kept


def test_samples_since_the_last_exchange_survive_a_resume(tmp_path: Path) -> None:
    job, alone = Job(1, steps=9), {"minimum": 1, "sync_every": 5}
    [saved], [loaded] = (run_apart(1, counted, job, str(tmp_path), load, **alone) for load in (False, True))
    assert saved == loaded > 0


def continued(rank: int, job: Job, directory: Path) -> dict[int, dict[str, list[float]]]:
    """Return the weights after each of the first versions of the anchor. The first island meanwhile fails to load."""
    engine, batches = start(job), data(rank, job)
    islands = engine.compression.islands
    run(engine, batches[:6])
    if rank == 0:
        engine.save_checkpoint(directory, tag="t")
        run(engine, batches[6:12])
        damage(directory / "t")
        with pytest.raises(StateError, match="damaged"):
            engine.load_checkpoint(directory)
    seen = {}
    for batch in cycle(batches[12:]):
        run(engine, [batch])
        seen[islands.exchange.version] = weights(engine)
        if islands.exchange.version == 9:
            break
    engine.destroy()
    return seen


def damage(place: Path) -> None:
    """Cut the file of the first rank's state of exchanges."""
    [file] = place.glob(f"{ISLAND_FILES}_00000.safetensors")
    file.write_bytes(file.read_bytes()[:100])


def test_islands_agree_after_a_load_that_failed(tmp_path: Path) -> None:
    first, second = run_apart(2, continued, Job(1, steps=20), tmp_path, exchange={"method": "none"})
    assert first[9] == second[9]
    assert len(first) > 2


def with_a_fixed_layer(rank: int, job: Job) -> str:
    """Return the error for an island whose frozen layer differs; empty if it joins."""
    model = network()
    model[0].requires_grad_(False)
    model[0].weight.data.add_(rank)
    given = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return refusal((ConfigError, IslandError), make_engine, model, job.config(), given)


def test_islands_with_other_frozen_weights_are_refused() -> None:
    texts = run_apart(2, with_a_fixed_layer, Job(1), minimum=1)
    refused, joined = sorted(texts, reverse=True)
    assert "weights that are not trained" in refused
    assert joined == ""


def saved_where_nothing_can_be(rank: int, job: Job, directory: Path) -> tuple[list[str], list[str]]:
    """Return the warnings of two failing checkpoints, and the files that the list of a third one names."""
    engine, blocked = start(job), directory / "0" / f"{ISLAND_FILES}_00000.safetensors"
    blocked.mkdir(parents=True)
    directory.with_name("a file").touch()
    with caught_warnings() as texts:
        for place in (directory, directory.with_name("a file")):
            engine.save_checkpoint(str(place), tag=0)
            engine.compression.saving.wait()
    run(engine, data(rank, job))
    engine.save_checkpoint(str(directory), tag=1)
    engine.destroy()
    return texts, [name for one in read_lists(directory / "1") for name in one.files]


def test_an_island_trains_on_if_its_state_cannot_be_written_in_the_background(tmp_path: Path) -> None:
    job = Job(1, {"checkpointing": {}}, steps=3)
    [(warned, written)] = run_apart(1, saved_where_nothing_can_be, job, tmp_path / "saves", minimum=1)
    assert [text.partition(" is not saved")[0] for text in warned] == [f"{tmp_path}/saves/0", f"{tmp_path}/a file/0"]
    assert {f"{ISLAND_FILES}_00000{kind}" for kind in (".safetensors", ".json")} < {*written}


def resumed_late(rank: int, *args: Any) -> tuple[int, list[float]]:
    """Resume. The second island fetches its anchor after the first one has started to load its checkpoint."""
    if rank:
        original = anchors.fetch_anchor
        anchors.fetch_anchor = lambda *given: (time.sleep(1.0), original(*given))[1]
    return resumed(rank, *args)


def test_an_island_that_returns_slowly_does_not_stop_the_others(tmp_path: Path) -> None:
    directories = [str(tmp_path / name) for name in "ab"]
    before = run_apart(2, saved, Job(1, steps=40), directories)
    assert run_apart(2, resumed_late, Job(1, steps=3), directories, timeout="2 s") == [before[1]] * 2


def goes_on_alone(rank: int, job: Job, directories: list[str], version: int, marks: Path, islands: int) -> Any:
    """Run `goes_on` with islands that join in an unfavorable order.

    The third island is fetching the anchor of the first one when that loads its checkpoint. The second one joins after
    the third one has started alone.
    """
    if rank == 1:
        wait_for(marks, "there2")
    if rank == 2:
        while not status(job.section["islands"]["elastic"]["rendezvous"])["islands"]:
            time.sleep(0.02)
        original = anchors.fetch_anchor
        anchors.fetch_anchor = lambda *given: (time.sleep(1.0), original(*given))[1]
    return goes_on(rank, job, directories, version, marks, islands)


@pytest.mark.slow
def test_an_island_without_checkpoint_or_anchor_joins_the_others_later(tmp_path: Path) -> None:
    third = come_back(goes_on_alone, 2, 3, tmp_path, timeout="2 s")[2]
    assert third[0] == []


def patience(rank: int) -> timedelta:
    """Return how long the ranks of an island wait for the first one."""
    dist.init_process_group("gloo")
    settings = Islands.model_validate(elastic_section("localhost:1", give_up="12 h")["islands"])
    group = elastic._make_group(settings)
    return group._get_backend(torch.device("cpu")).options._timeout


def test_ranks_wait_for_the_first_one_longer_than_it_waits_for_others() -> None:
    assert min(run_forks(2, patience)) > timedelta(hours=12)
