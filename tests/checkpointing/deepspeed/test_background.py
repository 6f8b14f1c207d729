"""Background checkpoints: they have the same bits as blocking ones, and nothing that they do can stop training."""

import io
import os
import shutil
import signal
import threading
import time
from contextlib import redirect_stderr, suppress
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import zero_to_fp32

import deepspeed_compress
from deepspeed_compress import ConfigError, StateError
from deepspeed_compress.checkpointing.completeness import find_problems, list_paths
from deepspeed_compress.checkpointing.deepspeed import background, engine_files
from deepspeed_compress.checkpointing.deepspeed.checkpoint import load_last
from deepspeed_compress.checkpointing.deepspeed.engine_files import DirectFile
from deepspeed_compress.checkpointing.deepspeed.recovery import find_complete
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.snapshot import Memory
from deepspeed_compress.safe_files import hold
from deepspeed_compress.tools.checkpoint import convert_to_universal
from tests.support.forks import RankError, run_forks
from tests.support.full_disk import full_disk
from tests.support.jobs import Job, data, run, start, weights
from tests.support.messages import caught_warnings, refusal
from tests.support.resuming import resume, resume_all, save_and_continue, save_and_continue_all
from tests.support.transport import until

pytestmark = pytest.mark.sampled(4)

SECTION = {"gradients": {"bits": 4, "block_size": 32}, "checkpointing": {}}
SLOW = {"max_rate": "100 kB/s"}
"""Rate at which a write is slower than the steps of these tests."""


def job(stage: int = 1, steps: int = 8, gradients: dict | None = None, **checkpointing: object) -> Job:
    section = {"gradients": gradients or SECTION["gradients"], "checkpointing": checkpointing}
    return Job(stage, {**section, "weights": {}} if stage in (1, 2) and gradients is None else section, steps=steps)


JOBS = {
    **{f"zero{stage}": job(stage) for stage in range(4)},
    **{f"zero{stage}_none": job(stage, gradients={"method": "none"}) for stage in range(4)},
    "bf16": Job(1, {**SECTION, "weights": {}}, extra={"bf16": {"enabled": True}}, steps=8),
    "waiting": job(1, asynchronous=False),
    "slow": job(2, **SLOW),
}


@pytest.mark.parametrize("part", range(4))
def test_background_checkpoints_hold_the_state_at_the_save(tmp_path, part):
    jobs = {name: JOBS[name] for name in list(JOBS)[part::4]}
    uninterrupted = run_forks(2, save_and_continue_all, jobs, str(tmp_path))
    resumed = run_forks(2, resume_all, jobs, str(tmp_path))
    for one, other in zip(uninterrupted, resumed, strict=True):
        assert {name for name in one if one[name] != other[name]} == set()
    assert not list(tmp_path.rglob("*.tmp"))
    assert all(list(find_problems(file.parent)) == [] for file in tmp_path.rglob("*model_states.pt"))


def save_both_ways(rank: int, directory: str, stage: int) -> list:
    """Save one checkpoint with this package and one with DeepSpeed, and return the weights."""
    for name, one in (("ours", job(stage)), ("deepspeed", job(stage))):
        engine = start(one if name == "ours" else Job(stage, {"gradients": one.section["gradients"]}, steps=8))
        run(engine, data(rank, one)[:4])
        engine.save_checkpoint(f"{directory}/{name}")
        engine.destroy()
    return []


def load_plainly(rank: int, directory: str, stage: int) -> list:
    """Return weights and optimizer states after DeepSpeed has loaded without this package."""
    found = []
    for name in ("ours", "deepspeed"):
        engine = start(Job(stage, None))
        engine.load_checkpoint(f"{directory}/{name}")
        found.append(weights(engine))
        engine.destroy()
    return found


@pytest.mark.parametrize("stage", [0, 3])
def test_deepspeed_alone_reads_them(tmp_path, stage):
    run_forks(2, save_both_ways, str(tmp_path), stage)
    for ours, deepspeeds in run_forks(2, load_plainly, str(tmp_path), stage):
        assert ours == deepspeeds
    if stage:
        one, other = (
            zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / name))
            for name in ("ours", "deepspeed")
        )
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def save_where_nothing_can_be(rank: int, directory: str, on_error: str) -> tuple:
    """Train until some steps after the failure was reported.

    Returns:
        The errors of this rank with their steps, its warnings, and the content of `latest`.
    """
    one = job(1, steps=12, on_error=on_error)
    batches, engine, errors = cycle(data(rank, one)), start(one), []
    run(engine, list(islice(batches, 2)))
    engine.save_checkpoint(directory)
    engine.compression.saving.wait()
    blocked = Path(directory) / "global_step4"
    with caught_warnings() as texts:
        last = 5_000
        for step in range(2, last):
            try:
                run(engine, [next(batches)])
            except StateError as error:
                errors.append((step, str(error)))
            if errors or texts:
                last = min(last, step + 4)
            if step == last:
                break
            if step == 3:
                if rank == 1:
                    # A directory stands where this rank's file goes.
                    (blocked / "zero_pp_rank_1_mp_rank_00_optim_states.pt").mkdir(parents=True, exist_ok=True)
                engine.save_checkpoint(directory)
            # The writers need processor time to fail.
            time.sleep(0.02)
    engine.destroy()
    return errors, texts, (Path(directory) / "latest").read_text()


@pytest.mark.parametrize("on_error", ["warn", "stop"])
def test_a_failed_write_reaches_all_ranks_in_the_same_step(tmp_path, on_error):
    first, second = run_forks(2, save_where_nothing_can_be, str(tmp_path), on_error)
    assert first == second
    errors, ours, latest = first
    assert latest == "global_step2"
    texts = [text for _, text in errors] if on_error == "stop" else ours
    assert any("rank 1" in text and "IsADirectoryError" in text for text in texts)
    assert bool(errors) == (on_error == "stop")


def roll_back_after_a_failed_write(rank: int, directory: str) -> tuple[int, list[str]]:
    one = job(1, on_error="warn")
    engine, batches = start(one), data(rank, one)
    run(engine, batches[:2])
    engine.save_checkpoint(directory)
    run(engine, batches[2:4])
    Path(directory, "global_step4", f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").mkdir(parents=True)
    engine.save_checkpoint(directory)
    with caught_warnings() as texts:
        load_last(engine)
    return engine.global_steps, texts


def test_a_guard_rolls_back_to_the_checkpoint_before_one_that_could_not_be_written(tmp_path):
    for step, warned in run_forks(2, roll_back_after_a_failed_write, str(tmp_path)):
        assert step == 2
        assert any("training rolls back to the checkpoint before" in text for text in warned)


def train_on_a_full_disk(rank: int, directory: str, steps: int) -> tuple[list[str], list[tuple]]:
    """Save in each of `steps` steps on a disk that may be full, and then in two more while it is not.

    Returns:
        The warnings, and the steps of the checkpoints at the end, with True for complete ones.
    """
    flag = Path(directory).with_name("full")
    one = job(1, every=1, directory=directory)
    with full_disk(flag), caught_warnings() as texts:
        engine, batches = start(one), cycle(data(rank, one))
        for _ in range(steps):
            run(engine, [next(batches)])
            engine.compression.saving.wait()
        dist.barrier()
        flag.unlink(missing_ok=True)
        dist.barrier()
        for _ in range(2):
            run(engine, [next(batches)])
            engine.compression.saving.wait()
    engine.destroy()
    return texts, [(found.step, found.complete) for found in CheckpointDirectory(Path(directory)).checkpoints()]


def test_a_full_disk_costs_checkpoints_of_a_later_start_but_not_the_run(tmp_path):
    directory = str(tmp_path / "checkpoints")
    run_forks(2, train_on_a_full_disk, directory, 0)
    shutil.rmtree(tmp_path / "checkpoints" / "global_step2")
    (tmp_path / "full").write_text("checkpoints/")
    (first, found), (second, _) = run_forks(2, train_on_a_full_disk, directory, 3)
    assert first == second
    assert sum("is not saved: rank 0: OSError: [Errno 28]" in text for text in first) == 3
    assert found[-2:] == [(4, True), (5, True)]


def lose_the_writer(rank: int, directory: str) -> tuple:
    one = job(1, steps=9)
    batches, engine = data(rank, one), start(one)
    run(engine, batches[:2])
    with caught_warnings() as texts:
        if rank:
            os.kill(engine.compression.saving._queues[0]._writer.process, signal.SIGKILL)
        engine.save_checkpoint(directory)
        run(engine, batches[2:6])
        engine.compression.saving.wait()
    engine.save_checkpoint(directory)
    engine.destroy()
    dist.barrier()
    ours = texts
    return ours, [(found.step, found.complete) for found in CheckpointDirectory(Path(directory)).checkpoints()]


def test_a_process_that_dies_costs_one_checkpoint(tmp_path):
    first, second = run_forks(2, lose_the_writer, str(tmp_path))
    assert any("rank 1: the writer process of this rank has died" in text for text in first[0])
    assert first[0] == second[0]
    assert second[1][-1] == (6, True)


def every(rank: int, directory: str, interval: object, pause: float) -> list:
    """Take at least twelve steps, and as many as it takes to begin four checkpoints."""
    one = job(2, steps=12, every=interval, directory=directory, keep=2)
    engine = start(one)
    engine.compression.saving.set_client_state(lambda: {"position": engine.global_steps})
    batches, [queue] = cycle(data(rank, one)), engine.compression.saving._queues
    while engine.global_steps < one.steps or queue.begun < 4:
        run(engine, [next(batches)])
        time.sleep(pause)
    engine.compression.saving.wait()
    found = [(one.step, one.complete, one.automatic) for one in CheckpointDirectory(Path(directory)).checkpoints()]
    state = engine.load_checkpoint(directory)[1]
    engine.destroy()
    return [found, state["position"]]


@pytest.mark.parametrize(("interval", "pause"), [(3, 0.1), ("250 ms", 0.1)])
def test_automatic_ones_are_saved_and_the_newest_kept(tmp_path, interval, pause):
    first, second = run_forks(2, every, str(tmp_path), interval, pause)
    assert first == second
    found, position = first
    steps = [step for step, _, _ in found]
    assert all(complete and automatic for _, complete, automatic in found)
    assert len(found) == 2
    assert position == steps[-1]
    if isinstance(interval, int):
        assert steps == [9, 12]


def hold_the_disk(directory: str) -> Path:
    """Make the disk of an engine that is started later stand still until a file exists, whose path is returned."""
    released, finish = Path(directory, "released"), DirectFile.finish

    def late(self: DirectFile) -> str:
        while not released.exists():
            time.sleep(0.01)
        return finish(self)

    # The writer process is a fork of this rank.
    DirectFile.finish = late  # type: ignore[method-assign]
    return released


def train_on(rank: int, directory: str) -> tuple:
    """Return whether `latest` existed after the remaining steps, and after the engine was destroyed."""
    one, released = job(2, steps=10), hold_the_disk(directory)
    batches, engine = data(rank, one), start(one)
    run(engine, batches[:2])
    engine.save_checkpoint(directory)
    run(engine, batches[2:])
    before = (Path(directory) / "latest").exists()
    dist.barrier()
    threading.Timer(0.3, released.touch).start()
    engine.destroy()
    dist.barrier()
    return before, (Path(directory) / "latest").exists()


def test_training_does_not_wait_for_a_slow_disk_but_its_end_does(tmp_path):
    assert run_forks(2, train_on, str(tmp_path)) == [(False, True)] * 2


def die(rank: int, directory: str) -> None:
    hold_the_disk(directory)
    one = job(1)
    batches, engine = data(rank, one), start(one)
    run(engine, batches[:3])
    engine.save_checkpoint(directory)
    engine.compression.saving.before_step()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_taken_checkpoint_is_written_even_if_the_ranks_are_killed(tmp_path):
    with pytest.raises(RankError):
        run_forks(2, die, str(tmp_path))
    assert not (tmp_path / "latest").exists()
    (tmp_path / "released").touch()
    until(lambda: (tmp_path / "latest").exists())
    [found] = CheckpointDirectory(tmp_path).checkpoints()
    assert (found.step, found.complete) == (3, True)
    assert list(find_problems(found.place)) == []


def die_with_the_writer(rank: int, directory: str) -> None:
    """Die with the writer process after the weights are written, and before the optimizer states are."""
    finish, begun = DirectFile.finish, []

    def stand_still(self: DirectFile) -> str:
        begun.append(self)
        while rank or len(begun) > 1:
            time.sleep(0.01)
        return finish(self)

    DirectFile.finish = stand_still  # type: ignore[method-assign]  # in this process, which is killed below
    engine = start(job(1))
    run(engine, data(rank, job(1))[:1])
    engine.save_checkpoint(directory)
    until(lambda: any(Path(directory).rglob("*_model_states.pt")))
    until(lambda: len(list_paths(Path(directory, "global_step1"))) == 2)
    dist.barrier()
    os.kill(engine.compression.saving._queues[0]._writer.process, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_save_that_was_interrupted_is_refused_by_its_tag(tmp_path):
    """DeepSpeed would have loaded its weights before it misses the optimizer states."""
    with pytest.raises(RankError):
        run_forks(2, die_with_the_writer, str(tmp_path))
    assert len([*tmp_path.rglob("*_states.pt")]) == 1
    for problem, _ in run_forks(2, load_damaged, str(tmp_path), "global_step1"):
        assert "rank 1 did not write everything" in str(problem)


def load_damaged(rank: int, directory: str, tag: str | None) -> list:
    one = job(1)
    engine = start(one)
    with caught_warnings() as texts:
        try:
            path = engine.load_checkpoint(directory, tag=tag)[0]
        except StateError as error:
            path = str(error)
    engine.destroy()
    return [path, texts]


def save_twice(rank: int, directory: str) -> None:
    one = job(1)
    batches, engine = data(rank, one), start(one)
    for step in range(2):
        run(engine, batches[step : step + 1])
        engine.save_checkpoint(directory)
    engine.destroy()


def test_a_damaged_checkpoint_is_refused_and_the_one_before_taken(tmp_path):
    run_forks(2, save_twice, str(tmp_path))
    file = tmp_path / "global_step2" / "zero_pp_rank_1_mp_rank_00_optim_states.pt"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    for path, warned in run_forks(2, load_damaged, str(tmp_path), None):
        assert "global_step1" in path
        assert any(file.name in text for text in warned)
    for path, _ in run_forks(2, load_damaged, str(tmp_path), "global_step2"):
        assert file.name in path


def export(rank: int, directory: str) -> list:
    one = job(1, max_rate="1 kB/s")
    engine = start(one)
    run(engine, data(rank, one)[:2])
    with patch.object(engine_files, "DirectFile", wraps=DirectFile) as opened:
        engine.save_16bit_model(directory, "model.bin")
    rates = [call.args[1] for call in opened.call_args_list]
    deepspeed_compress.detach(engine)
    engine.save_checkpoint(directory)
    engine.destroy()
    return [(Path(directory) / "latest").read_text(), sorted(torch.load(Path(directory) / "model.bin")), rates]


def test_exports_are_written_at_once_and_detached_engines_save_like_deepspeed(tmp_path):
    for rank, (latest, names, rates) in enumerate(run_forks(2, export, str(tmp_path))):
        assert latest == "global_step2"
        assert "0.weight" in names
        assert rates == ([] if rank else [None])


def test_every_stage_of_a_pipeline_saves_its_layers(tmp_path):
    section = {"gradients": {"bits": 4, "block_size": 32}, "checkpointing": {}}
    one = Job(0, section, steps=8, accumulation=2, stages=2)
    uninterrupted = run_forks(4, save_and_continue, one, str(tmp_path), 8)
    assert run_forks(4, resume, one, str(tmp_path), 8) == uninterrupted


OTHERS = {
    "offload": Job(
        1, SECTION, {"offload_optimizer": {"device": "cpu"}}, {"zero_force_ds_cpu_optimizer": False}, steps=8
    ),
    "fp16": Job(1, SECTION, extra={"fp16": {"enabled": True, "initial_scale_power": 4}}, steps=8),
    "one_at_a_time": job(3, asynchronous=False),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_other_optimizers_and_one_rank(tmp_path, ranks):
    uninterrupted = run_forks(ranks, save_and_continue_all, OTHERS, str(tmp_path))
    assert uninterrupted == run_forks(ranks, resume_all, OTHERS, str(tmp_path))


def two_engines(rank: int, directory: str) -> list:
    """Save in turn with several engines, one of them without this package, and never destroy one."""
    engines = {"first": start(job(1)), "second": start(job(2)), "plain": start(Job(1, None))}
    batches = data(rank, job(1))
    for name, engine in engines.items():
        run(engine, batches[:2])
        engine.save_checkpoint(f"{directory}/{name}")
    for name in ("first", "second"):
        engines[name].compression.saving.wait()
    return [(Path(directory) / name / "latest").read_text() for name in engines]


def test_several_engines_save_in_one_program(tmp_path):
    assert run_forks(2, two_engines, str(tmp_path)) == [["global_step2"] * 3] * 2


def save_in_one_directory(rank: int, directory: str) -> tuple[str, list[int]]:
    """Return the refusal of the first of two engines after the second has saved, and the steps of that one."""
    one = job(1, every=1, directory=directory)
    first, second = start(one), start(one)
    batches = data(rank, one)
    run(first, batches[:2])
    deepspeed_compress.attach(deepspeed_compress.detach(first))
    run(first, batches[2:4])
    run(second, batches[:2])
    refused = refusal(ConfigError, run, first, batches[4:5])
    run(second, batches[2:3])
    second.compression.saving.wait()
    return refused, [one.step or 0 for one in CheckpointDirectory(Path(directory)).checkpoints()]


def test_a_second_engine_that_saves_in_the_same_directory_is_noticed(tmp_path):
    for refused, steps in run_forks(2, save_in_one_directory, str(tmp_path)):
        assert "/deepspeed_compress/checkpointing/directory" in refused
        assert "another engine of this program" in refused
        assert steps[0] == 1
        assert 3 in steps


def begin_while_one_is_published(rank: int, directory: str) -> object:
    """Return the path that an engine loads if a writer of the former start publishes `latest` after the search."""

    def find(*args: object) -> object:
        found = find_complete(*args)
        if rank == 1:
            (Path(directory) / "latest").write_text("global_step3")
        return found

    background.find_complete = find
    engine = start(job(every=100, directory=directory))
    path, _ = engine.load_checkpoint(directory)
    engine.destroy()
    return path


def test_all_ranks_begin_anew_or_none(tmp_path):
    assert run_forks(2, begin_while_one_is_published, str(tmp_path)) == [None, None]


def leave(rank: int, directory: str, blocked: bool) -> tuple[str, list[str]]:
    """Return the output and the warnings of a rank that SIGTERM ends after its second step."""
    one, shown = job(1, directory=directory, save_on_sigterm=True), io.StringIO()
    engine = start(one)
    if blocked and rank:
        Path(directory, "global_step2", "zero_pp_rank_1_mp_rank_00_optim_states.pt").mkdir(parents=True)
    os.kill(os.getpid(), signal.SIGTERM)
    with caught_warnings() as texts, redirect_stderr(shown), suppress(SystemExit):
        run(engine, data(rank, one))
    engine.destroy()
    return shown.getvalue(), texts


@pytest.mark.parametrize("blocked", [False, True])
def test_a_rank_that_leaves_says_that_it_has_saved_only_if_it_has(tmp_path, blocked):
    (shown, warned), _ = run_forks(2, leave, str(tmp_path), blocked)
    assert (f"saved global_step2 in {tmp_path}" in shown) == (not blocked)
    assert any("global_step2 is not saved" in text for text in warned) == blocked


def start_and_end(rank: int, directory: str) -> None:
    start(job(every=100, directory=directory)).destroy()


def test_a_directory_of_another_job_is_refused_on_all_ranks(tmp_path):
    """This process acts as the other job."""
    with hold(tmp_path), pytest.raises(RankError) as raised:
        run_forks(2, start_and_end, str(tmp_path))
    assert str(raised.value).count("ConfigError: /deepspeed_compress/checkpointing/directory: ") == 2
    run_forks(2, start_and_end, str(tmp_path))


def save_the_same_tag(rank: int, directory: str, checkpointing: bool) -> None:
    section = SECTION if checkpointing else {"gradients": SECTION["gradients"]}
    engine = start(Job(1, section))
    if Path(directory, "latest").exists():
        engine.load_checkpoint(directory)
    run(engine, data(rank, job())[:1])
    engine.save_checkpoint(directory, tag="last")
    engine.destroy()


def load_the_same_tag(rank: int, directory: str) -> str:
    return str(start(job()).load_checkpoint(directory)[0])


def test_a_tag_that_other_ranks_and_other_settings_have_saved_is_saved_again(tmp_path):
    """Saves by fewer ranks, and by a run without `checkpointing`, leave lists of files that no longer exist."""
    for ranks, checkpointing in ((3, True), (2, True), (2, False)):
        run_forks(ranks, save_the_same_tag, str(tmp_path), checkpointing)
        found = run_forks(2, load_the_same_tag, str(tmp_path))
        assert all(path.startswith(str(tmp_path / "last")) for path in found)


def resume_universal(rank: int, directory: str, steps: int) -> tuple[int, int, bool]:
    """Train with `load_universal`; return the steps before and after, and whether the setting is unchanged."""
    one = job(1, directory=directory, every=1, resume=True)
    engine = start(replace(one, extra={"checkpoint": {"load_universal": True}}))
    first = int(engine.global_steps)
    run(engine, data(rank, one)[first : first + steps])
    engine.compression.saving.wait()
    found = first, int(engine.global_steps), engine.load_universal_checkpoint()
    engine.destroy()
    return found


def save_and_convert(rank: int, directory: str, steps: int, tag: str | None = None) -> None:
    one = job(1)
    engine = start(one)
    run(engine, data(rank, one)[:steps])
    engine.save_checkpoint(directory, tag, client_state={"universal_checkpoint_info": {}, "iteration": steps})
    engine.destroy()
    dist.barrier()
    if rank == 0:
        convert_to_universal(Path(directory), None, None, None)


def test_a_run_resumes_from_a_universal_checkpoint_until_it_has_newer_ones(tmp_path):
    """In an empty directory, training starts at step 0."""
    assert run_forks(2, resume_universal, str(tmp_path / "empty"), 1) == [(0, 1, True)] * 2
    run_forks(2, save_and_convert, str(tmp_path / "full"), 2)
    assert run_forks(2, resume_universal, str(tmp_path / "full"), 0) == [(2, 2, True)] * 2
    assert run_forks(2, resume_universal, str(tmp_path / "full"), 2) == [(2, 4, True)] * 2
    assert run_forks(2, resume_universal, str(tmp_path / "full"), 1) == [(4, 5, True)] * 2


def test_a_missing_universal_checkpoint_is_an_error_on_all_ranks(tmp_path):
    (tmp_path / "latest_universal").write_text("gone")
    with pytest.raises(RankError, match=r"gone, which .*latest_universal names, has no mp_rank") as error:
        run_forks(2, resume_universal, str(tmp_path), 1)
    assert str(error.value).count("StateError: ") >= 2


def lose_what_latest_names(rank: int, directory: str) -> tuple:
    engine, batches = start(job()), data(rank, job())
    for tag in (0, 1):
        run(engine, batches[tag : tag + 1])
        engine.save_checkpoint(directory, tag=tag)
    assert engine.load_checkpoint(directory, tag=1)[0] is not None
    dist.barrier()
    if not rank:
        shutil.rmtree(Path(directory, "1"))
    dist.barrier()
    with caught_warnings() as texts:
        path = engine.load_checkpoint(directory)[0]
    return Path(path).parent.name, [text for text in texts if "1 is missing" in text]


def test_a_removed_checkpoint_causes_a_warning_and_the_previous_one_is_loaded(tmp_path):
    """The tags are numbers, which DeepSpeed accepts."""
    for tag, warned in run_forks(2, lose_what_latest_names, str(tmp_path)):
        assert tag == "0"
        assert len(warned) == 1


def test_nothing_is_left_of_a_checkpoint_that_a_rank_could_not_write(tmp_path):
    (tmp_path / "full").write_text("zero_pp_rank_1.*tmp")
    (texts, found), _ = run_forks(2, train_on_a_full_disk, str(tmp_path / "checkpoints"), 2)
    assert sum("is not saved: rank 1: OSError: [Errno 28]" in text for text in texts) == 2
    assert found == [(3, True), (4, True)]
    assert not (tmp_path / "checkpoints" / "global_step1").exists()


def save_one_tag_again(rank: int, directory: str) -> tuple[list[str], list[tuple]]:
    """Save a tag twice on a full disk, and once more while it is not full."""
    flag = Path(directory).with_name("full")
    with full_disk(flag), caught_warnings() as texts:
        engine = start(job(1))
        for number in range(3):
            if number == 2:
                dist.barrier()
                flag.unlink(missing_ok=True)
                dist.barrier()
            engine.save_checkpoint(directory, tag="last")
            engine.compression.saving.wait()
    engine.destroy()
    return texts, [(found.tag, found.complete) for found in CheckpointDirectory(Path(directory)).checkpoints()]


def test_a_tag_is_saved_again_after_a_full_disk(tmp_path):
    (tmp_path / "full").write_text("zero_pp_rank_1.*tmp")
    (texts, found), _ = run_forks(2, save_one_tag_again, str(tmp_path / "checkpoints"))
    assert sum("is not saved: rank 1: OSError: [Errno 28]" in text for text in texts) == 2
    assert found == [("last", True)]


def run_out_of_memory(rank: int, directory: str) -> list:
    one = job(1)
    batches, engine = data(rank, one), start(one)
    if rank:
        engine.compression.saving._queues[0]._free = [Full(), Full()]
    with caught_warnings() as texts:
        run(engine, batches[:2])
        engine.save_checkpoint(directory)
        run(engine, batches[2:])
        engine.compression.saving.wait()
    engine.destroy()
    return texts


class Full(Memory):
    """Memory of a host without any space left."""

    def reserve(self, size: int) -> None:
        raise OSError("no space left")


def test_a_host_without_memory_loses_a_checkpoint_and_trains_on(tmp_path):
    for warned in run_forks(2, run_out_of_memory, str(tmp_path)):
        assert any("rank 1: OSError: no space left" in text for text in warned)
    assert not (tmp_path / "latest").exists()


def save_much_of_the_program(rank: int, directory: str) -> bool:
    """Return whether the first checkpoint was complete once the second had been sent to the writer."""
    released = hold_the_disk(directory)
    engine, batches = start(job(1)), data(rank, job())
    # A rank that waits for the first checkpoint finds it complete in the end.
    threading.Timer(60.0, released.touch).start()
    for step in (0, 1):
        run(engine, batches[step : step + 1])
        engine.save_checkpoint(directory, client_state={"seen": bytes(600_000)})
    engine.compression.saving.before_step()
    before = Path(directory, "latest").exists()
    dist.barrier()
    released.touch()
    engine.destroy()
    return before


def test_training_does_not_wait_for_state_that_the_program_adds(tmp_path):
    """The writer process reads the message about the second checkpoint only after it has written the first, and the
    message is larger than the buffer of their connection."""
    assert run_forks(2, save_much_of_the_program, str(tmp_path)) == [False, False]
    found = torch.load(tmp_path / "global_step2" / "mp_rank_00_model_states.pt", weights_only=False)
    assert found["seen"] == bytes(600_000)


def save_a_late_class(rank: int, directory: str) -> list[str]:
    """Return the warnings about a checkpoint with an object that the writer process does not know."""
    engine = start(job(1))
    globals()["Late"] = type("Late", (), {"__module__": __name__})
    with caught_warnings() as texts:
        engine.save_checkpoint(directory, client_state={"late": globals()["Late"]()})
        engine.compression.saving.wait()
    return texts


def test_a_class_that_is_newer_than_the_engine_is_named(tmp_path):
    for texts in run_forks(2, save_a_late_class, str(tmp_path)):
        assert any("Late" in text for text in texts)


def save_late(rank: int, directory: str) -> list[str]:
    """Return the problems of a checkpoint in a directory that a later start has claimed."""
    engine = start(job())
    run(engine, data(rank, job())[:1])
    claim = CheckpointDirectory(Path(directory, "global_step1"), "0" * 32)
    if rank == 0:
        claim.path.mkdir(parents=True)
        claim.claim()
    engine.save_checkpoint(directory)
    engine.compression.saving.wait()
    with suppress(StateError):
        claim.check()
        return ["the former start may write"]
    engine.destroy()
    return list(find_problems(claim.path))


def test_a_new_start_takes_over_the_tag_of_a_former_one(tmp_path):
    assert run_forks(2, save_late, str(tmp_path)) == [[], []]


def go_elsewhere(rank: int, directory: str) -> list[str]:
    os.chdir(Path(directory, "first"))
    engine, batches = start(job(every=2, directory="own", keep=1)), data(rank, job())
    os.chdir(Path(directory, "second"))
    run(engine, batches[:2])
    engine.save_checkpoint("asked for")
    engine.compression.saving.wait()
    engine.destroy()
    return [str(found.relative_to(directory)) for found in sorted(Path(directory).rglob("latest"))]


def test_relative_directories_are_those_of_the_program(tmp_path):
    """The directory in the section is relative to the directory in which the engine was made."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    expected = ["first/own/latest", "second/asked for/latest"]
    assert run_forks(2, go_elsewhere, str(tmp_path)) == [expected, expected]


def save_by_epoch(rank: int, directory: str, resumed: bool) -> tuple[int, list[str]]:
    """Save tags of several parts next to those of `every`, and return the step and the warnings."""
    os.environ["DS_COMPRESS_MEMORY_DIR"] = f"{directory}/memory"
    one = job(1, directory=directory, every=4, keep=1, resume=resumed, memory={"every": 1})
    with caught_warnings() as texts:
        engine = start(one)
        step = int(engine.global_steps)
        if not resumed:
            for epoch, batch in enumerate(data(rank, one)[:3]):
                run(engine, [batch])
                engine.save_checkpoint(directory, tag=f"epoch/{epoch}")
        engine.compression.saving.wait()
    engine.destroy()
    return step, [text for text in texts if "is loaded" in text]


def test_a_damaged_checkpoint_leads_back_to_one_of_several_parts(tmp_path):
    """Checkpoints in memory have tags of one part, because only `every` saves there."""
    run_forks(2, save_by_epoch, str(tmp_path), False)
    shutil.rmtree(tmp_path / "memory")
    assert (tmp_path / "latest").read_text() == "epoch/2"
    next((tmp_path / "epoch" / "2").glob("*model_states.pt")).unlink()
    for step, [warning] in run_forks(2, save_by_epoch, str(tmp_path), True):
        assert step == 2
        assert warning.endswith(f"{tmp_path}/epoch/1 is loaded")


def test_a_converted_checkpoint_whose_tag_has_several_parts_is_found(tmp_path):
    run_forks(2, save_and_convert, str(tmp_path), 2, "epoch/1")
    assert (tmp_path / "latest_universal").read_text() == "epoch/1_universal"
    assert not (tmp_path / "epoch" / "latest_universal").exists()
    assert run_forks(2, resume_universal, str(tmp_path), 1) == [(2, 3, True)] * 2
