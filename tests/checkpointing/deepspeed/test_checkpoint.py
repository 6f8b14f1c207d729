"""A resumed run equals one that did not stop, for every method. Every rank reports a state that does not fit."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress import StateError
from deepspeed_compress.compression import state
from deepspeed_compress.compression.state import VERSION
from deepspeed_compress.compression.state_description import Moment, Position
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, data, run, start, weights
from tests.support.messages import caught_warnings
from tests.support.methods import METHODS, NO_MOMENTUM, WITHOUT_MOMENTUM, by_stage
from tests.support.resuming import residuals_of, resume_all, save_and_continue_all, save_and_resume

pytestmark = pytest.mark.sampled(4)

INT4 = {"gradients": {"bits": 4, "block_size": 32, "rounding": "stochastic"}}
HIERARCHY = {"ranks_per_node": 2, "inside": {"method": "blockwise", "block_size": 32}}
SMALL_BUCKETS = {"reduce_bucket_size": 600}


EVERY = {**METHODS, **WITHOUT_MOMENTUM}


def jobs(stage: int, names: Sequence[str]) -> dict[str, Job]:
    """Return jobs for the methods `names`, and for every method of weights if the stage has them."""
    found = {
        name: Job(
            stage, {"gradients": EVERY[name]}, SMALL_BUCKETS, NO_MOMENTUM if name in WITHOUT_MOMENTUM else {}, steps=8
        )
        for name in names
    }
    if stage in (1, 2):
        for method in ({"method": "blockwise"}, {"method": "sign"}, {"method": "topk", "density": 0.2}):
            section = {**INT4, "weights": method}
            found["weights_" + method["method"]] = Job(stage, section, SMALL_BUCKETS, steps=8)
        section = {**INT4, "weights": {}}
        found["weights_bf16"] = Job(stage, section, SMALL_BUCKETS, {"bf16": {"enabled": True}}, steps=8)
    return found


@pytest.mark.parametrize(("stage", "names"), by_stage(list(EVERY)))
def test_resuming_is_bit_identical_to_going_on(stage, names, tmp_path):
    uninterrupted = run_forks(2, save_and_continue_all, jobs(stage, names), str(tmp_path))
    resumed = run_forks(2, resume_all, jobs(stage, names), str(tmp_path))
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert {name for name in one if one[name] != other[name]} == set()
    assert not list(tmp_path.rglob("*.tmp"))


INT8_WEIGHTS = {**INT4, "weights": {"bits": 8, "block_size": 32}}
BY_DEFAULT = {
    stage: [Job(stage, INT4, accumulation=2, defaults=True), Job(stage, INT8_WEIGHTS, accumulation=2, defaults=True)]
    for stage in (1, 2, 3)
}
"""Jobs with DeepSpeed's own values."""
# Some parameters are persistent, and some are not.
BY_DEFAULT[3].append(replace(BY_DEFAULT[3][1], zero={"stage3_param_persistence_threshold": 60}))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*weights has no effect:deepspeed_compress.CompressWarning")
def test_resuming_is_bit_identical_with_own_values_of_deepspeed(stage: int, tmp_path: Path) -> None:
    for number, job in enumerate(BY_DEFAULT[stage]):
        directory = str(tmp_path / str(number))
        for uninterrupted, resumed in run_forks(2, save_and_resume, job, directory, 4):
            assert uninterrupted == resumed


def test_two_levels_resume(tmp_path):
    job = {"levels": Job(2, {"gradients": {"bits": 4, "block_size": 32, "hierarchy": HIERARCHY}}, steps=8)}
    assert run_forks(4, save_and_continue_all, job, str(tmp_path)) == run_forks(4, resume_all, job, str(tmp_path))


def save(rank: int, directory: str, section: dict = INT4, stage: int = 2) -> dict[str, list]:
    """Save after two steps, and return the residuals of a rank."""
    job = Job(stage, section, steps=2, extra=NO_MOMENTUM)
    engine = start(job)
    run(engine, data(rank, job))
    engine.save_checkpoint(directory)
    return residuals_of(engine)


def load(rank: int, directory: str, section: dict = INT4, options: dict | None = None, stage: int = 2) -> tuple:
    """Return our warnings while loading, and the residuals afterwards."""
    engine = start(Job(stage, section, extra=NO_MOMENTUM))
    with caught_warnings() as texts:
        engine.load_checkpoint(directory, **(options or {}))
    return texts, residuals_of(engine)


def test_memories_come_back_or_start_empty_when_asked(tmp_path):
    saved = run_forks(2, save, str(tmp_path))
    for before, (quiet, after) in zip(saved, run_forks(2, load, str(tmp_path)), strict=True):
        assert quiet == []
        assert before == after
        assert any(any(values) for _, values in after["gradients"])
    for options in ({"load_optimizer_states": False}, {"load_module_only": True}):
        assert run_forks(2, load, str(tmp_path), INT4, options)[0] == ([], {"gradients": [], "means": []})


def json_of(directory: Path, rank: int) -> Path:
    [file] = directory.rglob(f"deepspeed_compress_rank_{rank:05d}.json")
    return file


def cut_off(directory: Path) -> None:
    file = json_of(directory, 1).with_suffix(".safetensors")
    file.write_bytes(file.read_bytes()[:100])


def change_a_bit(directory: Path) -> None:
    file = json_of(directory, 1).with_suffix(".safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def remove(directory: Path) -> None:
    json_of(directory, 1).unlink()


def of_another_version(directory: Path) -> None:
    file = json_of(directory, 1)
    file.write_text(json.dumps({**json.loads(file.read_text()), "version": 99}))


def foreign(directory: Path) -> None:
    json_of(directory, 1).write_text(json.dumps({"version": VERSION, "made_by": "another program"}))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (cut_off, "damaged"),
        (change_a_bit, "digest"),
        (remove, "does not exist"),
        (of_another_version, "version 99"),
        (foreign, "not a state of this package"),
    ],
)
def test_a_state_that_cannot_be_used_stops_all_ranks_or_none(harm, words, tmp_path):
    """Rank 1 has the problem. Rank 0 must not enter a collective alone."""
    run_forks(2, save, str(tmp_path))
    harm(tmp_path)
    with pytest.raises(RankError, match=f"(?s){StateError.__name__}.*{words}.*on_missing_state"):
        run_forks(2, load, str(tmp_path))
    results = run_forks(2, load, str(tmp_path), {**INT4, "on_missing_state": "reset"})
    for texts, after in results:
        assert words in texts[0]
        assert "empty residuals" in texts[0]
        assert after == {"gradients": [], "means": []}


def save_alone(rank: int, directory: str, tag: str, steps: int, section: dict | None) -> None:
    """Save by DeepSpeed alone, or with a section that has no state."""
    job = Job(2, section, steps=steps, extra=NO_MOMENTUM)
    engine = start(job)
    run(engine, data(rank, job))
    engine.save_checkpoint(directory, tag=tag)


@pytest.mark.parametrize("section", [None, {"gradients": {"method": "none"}}])
@pytest.mark.parametrize("steps", [2, 3])
def test_a_state_that_an_earlier_save_of_the_tag_has_left_is_not_read(steps, section, tmp_path):
    """The later save replaces DeepSpeed's files only, also after as many steps as the earlier one."""
    run_forks(2, save, str(tmp_path))
    run_forks(2, save_alone, str(tmp_path), "global_step2", steps, section)
    with pytest.raises(RankError, match=f"(?s){StateError.__name__}.*earlier save of this tag.*on_missing_state"):
        run_forks(2, load, str(tmp_path))
    for texts, after in run_forks(2, load, str(tmp_path), {**INT4, "on_missing_state": "reset"}):
        assert "earlier save of this tag" in texts[0]
        assert after == {"gradients": [], "means": []}


def states_of(rank: int, directory: str) -> list[str]:
    """Save with a state of the program, and return the keys of what is loaded."""
    engine = start(Job(2, INT4, extra=NO_MOMENTUM))
    engine.save_checkpoint(directory, client_state={"epoch": 3})
    return sorted(engine.load_checkpoint(directory)[1])


def test_programs_do_not_see_the_name_of_the_save(tmp_path):
    for keys in run_forks(2, states_of, str(tmp_path)):
        assert "epoch" in keys
        assert not [key for key in keys if key.startswith("deepspeed_compress")]


GUARDED = {**INT4, "guard": {}, "on_missing_state": "reset"}


def poisoned(rank: int, directory: str) -> str:
    """Save after a NaN, from which the guard sends everything uncompressed."""
    job = Job(2, GUARDED, steps=2, poison=(1, 0))
    engine = start(job)
    run(engine, data(rank, job))
    engine.save_checkpoint(directory)
    return engine.compression.settings


def go_on_from(rank: int, directory: str) -> tuple[str, dict]:
    job = Job(2, GUARDED, steps=2)
    engine = start(job)
    engine.load_checkpoint(directory)
    settings = engine.compression.settings
    run(engine, data(rank, job))
    return settings, weights(engine)


def test_ranks_decide_alike_after_a_state_that_one_of_them_has_lost(tmp_path):
    assert run_forks(2, poisoned, str(tmp_path)) == ["none", "none"]
    assert [settings for settings, _ in run_forks(2, go_on_from, str(tmp_path))] == ["none", "none"]
    remove(tmp_path)
    one, other = run_forks(2, go_on_from, str(tmp_path))
    assert one == other
    assert one[0] == "blockwise bits=4"


def totals(per_rank: list[dict[str, list]], name: str) -> dict[tuple[str, int], float]:
    """Return the sums of a store over the ranks, by parameter and element."""
    found: dict[tuple[str, int], float] = {}
    for rank in per_rank:
        for (parameter, begin, _), values in rank[name]:
            for index, value in enumerate(values):
                key = (parameter, begin + index)
                found[key] = found.get(key, 0.0) + value
    return {key: value for key, value in found.items() if value}


ADDITIVE = {
    "int4": ({"bits": 4, "block_size": 32, "error_feedback": {"dtype": "fp32"}}, ["gradients"]),
    "dgc": ({"method": "dgc", "density": 0.1, "memory": {"dtype": "fp32"}}, ["gradients", "velocity"]),
    "demo": ({"method": "demo", "density": 0.1, "tile": 16, "memory": {"dtype": "fp32"}}, ["gradients"]),
    "powersgd": ({"method": "powersgd", "rank": 2, "error_feedback": {"dtype": "fp32"}}, ["gradients"]),
}


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4), (3, 2)])
@pytest.mark.parametrize("method", ADDITIVE)
def test_another_number_of_ranks_keeps_the_sum_over_them(method, before, after, tmp_path):
    """Load the compression state alone, because DeepSpeed needs a universal checkpoint for another size."""
    gradients, names = ADDITIVE[method]
    saved = run_forks(before, save, str(tmp_path), {"gradients": gradients})
    loaded = run_forks(after, load_state_alone, str(tmp_path), {"gradients": gradients}, 2)
    for name in names:
        old, new = totals(saved, name), totals(loaded, name)
        assert max(map(abs, old.values())) > 1e-4
        # fp32 sums of at most four values of this magnitude.
        bound = 4 * 2**-24 * max(abs(value) for rank in saved for _, values in rank[name] for value in values)
        assert all(abs(old.get(key, 0.0) - new.get(key, 0.0)) <= bound for key in old | new)


def load_state(engine: Any, directory: str) -> None:
    """Load the compression state, and nothing else, of the checkpoint in `directory`."""
    from deepspeed_compress.checkpointing.deepspeed.checkpoint import find_place
    from deepspeed_compress.session.state_files import load_state_files

    [file] = Path(directory).rglob("deepspeed_compress_rank_00000.json")
    session = engine.compression
    load_state_files(session, file.parent, find_place(engine, session.config), 1.0)


def load_state_alone(rank: int, directory: str, section: dict, stage: int) -> dict[str, list]:
    engine = start(Job(stage, section, extra=NO_MOMENTUM))
    load_state(engine, directory)
    return residuals_of(engine)


def train_on_after_load(rank: int, directory: str, section: dict) -> tuple[dict, dict]:
    """Return the residuals before and after a step with another number of ranks."""
    job = Job(0, section, steps=3)
    engine = start(job)
    load_state(engine, directory)
    before = residuals_of(engine)
    run(engine, data(rank, job))
    return before, residuals_of(engine)


def test_memories_with_owners_go_to_the_new_owners(tmp_path):
    """Every rank loads all residuals of means. The first step leaves each element on the rank that now owns it."""
    section = {"gradients": {"bits": 4, "block_size": 32, "error_feedback": {"dtype": "fp32"}}}
    saved = run_forks(4, save, str(tmp_path), section, 0)
    results = run_forks(2, train_on_after_load, str(tmp_path), section)
    elements = totals(saved, "means").keys()
    for before, _ in results:
        assert totals([before], "means").keys() == elements
    after = [after for _, after in results]
    owned = [{(name, begin + i) for (name, begin, n), _ in rank["means"] for i in range(n)} for rank in after]
    assert owned[0].isdisjoint(owned[1])


def test_no_compression_of_gradients_has_no_state(tmp_path):
    section = {"gradients": {"method": "none"}}
    assert run_forks(2, save, str(tmp_path), section) == [{}, {}]
    assert not list(tmp_path.rglob("deepspeed_compress_*"))
    assert run_forks(2, load, str(tmp_path), section)[0] == ([], {})


def test_a_state_that_more_ranks_have_left_under_the_same_tag_is_not_read(tmp_path):
    for size in (3, 2):
        for rank in range(size):
            kept = state.contents({}, Position(rank, size, 0, 1), Moment(1, 1), {}, {})
            state.write(kept, state.state_file(tmp_path, rank))
    for rank in range(3):
        found = state.sources(tmp_path, rank, Position(rank, 3, 0, 1))
        assert [description.position.size for _, description in found] == [2, 2]
