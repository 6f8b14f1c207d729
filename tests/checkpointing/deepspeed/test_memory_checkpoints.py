"""Checkpoints in memory outlive ranks and, with copies, a host. They restore the same bits."""

import os
import random
import resource
import shutil
import signal
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

import deepspeed_compress
from deepspeed_compress import StateError
from deepspeed_compress.checkpointing.completeness import VERSION, FileList, list_paths
from deepspeed_compress.checkpointing.deepspeed import recovery
from deepspeed_compress.checkpointing.deepspeed.recovery import Candidate
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, data, run, run_pipeline, start, weights
from tests.support.kills import STEP_SECONDS, Kill
from tests.support.messages import caught_warnings, refusal

GRADIENTS = {"bits": 4, "block_size": 32}


@dataclass(frozen=True)
class Plan:
    """A job whose ranks are on `hosts`, each with a separate directory below `root`."""

    root: str
    stage: int = 1
    stages: int = 1
    every: int | str = 1
    disk: int = 8
    copies: int = 0
    hosts: int = 1
    ranks: int = 2
    steps: int = 24
    weights: bool = False

    def directory(self, host: int) -> Path:
        return Path(self.root, f"host{host}")

    @property
    def disk_directory(self) -> str:
        return str(Path(self.root, "disk"))

    def job(self) -> Job:
        memory = {"every": self.every, "copies": self.copies}
        section = {
            "gradients": GRADIENTS,
            "checkpointing": {"every": self.disk, "directory": self.disk_directory, "memory": memory},
        }
        parts = {"weights": {}} if self.weights else {}
        return Job(self.stage, {**section, **parts}, steps=self.steps, stages=self.stages)

    def start(self, rank: int):
        """Return the engine of `rank`."""
        os.environ["DS_COMPRESS_MEMORY_DIR"] = str(self.directory(rank * self.hosts // self.ranks))
        engine = start(self.job())
        engine.compression.saving.set_client_state(lambda: {"done": engine.global_steps})
        return engine


def batches_of(engine, rank: int, plan: Plan) -> list:
    return data(engine.grid.get_data_parallel_rank() if plan.stages > 1 else rank, plan.job())


def step(engine, plan: Plan, batches: list) -> None:
    (run_pipeline if plan.stages > 1 else run)(engine, batches)


# Before this step all ranks wait until the checkpoints that are on their way are complete.
COMPLETE = 6


def train(rank: int, plan: Plan, resumed: bool = False, kill: Kill | None = None) -> tuple:
    """Train to the last step, and return what was loaded, the warnings about it, and the parameters.

    Args:
        rank: this rank.
        plan: the job.
        resumed: True to load the newest checkpoint first.
        kill: the rank that dies, and when. None kills no rank.
    """
    engine = plan.start(rank)
    with caught_warnings() as texts:
        path, state = engine.load_checkpoint(plan.disk_directory) if resumed else (None, None)
    for number, batch in enumerate(batches_of(engine, rank, plan)[(state or {}).get("done", 0) :], 1):
        if kill is not None:
            if number == COMPLETE:
                engine.compression.saving.wait()
            kill.begin_step(rank, number)
        step(engine, plan, [batch])
    if kill is not None:
        kill.end_training(rank)
    found = weights(engine)
    engine.destroy()
    dist.barrier()
    return path and str(Path(path).relative_to(plan.root)), texts, found


CASES = {
    **{f"zero{stage}": Plan("", stage, every=1 + stage % 2) for stage in range(4)},
    "weights": Plan("", 1, every=2, weights=True),
    "pipeline": Plan("", 0, stages=2, ranks=4, steps=12),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_is_killed_at_any_instant_costs_no_more_than_an_interval(tmp_path, name):
    def plan(part: str) -> Plan:
        (tmp_path / part).mkdir()
        return Plan(**{**vars(CASES[name]), "root": str(tmp_path / part)})

    undisturbed = run_forks(CASES[name].ranks, train, plan("whole"))
    chance = random.Random(name)
    last = CASES[name].steps - 4
    for trial, first in enumerate((1, 1, COMPLETE + 1)):
        one = plan(str(trial))
        kill = Kill(chance.randrange(one.ranks), chance.randint(first, last), chance.uniform(0.0, 3 * STEP_SECONDS))
        with pytest.raises(RankError):
            run_forks(one.ranks, train, one, False, kill, grace=8)
        resumed = run_forks(one.ranks, train, one, True)
        assert [found for *_, found in resumed] == [found for *_, found in undisturbed]
        assert kill.step <= COMPLETE or resumed[0][0].startswith("host0")


def train_and_die(rank: int, plan: Plan, steps: int) -> None:
    """All ranks at once, when all is written and copied."""
    engine = plan.start(rank)
    for batch in batches_of(engine, rank, plan)[:steps]:
        step(engine, plan, [batch])
        # What is on its way to the next host keeps later ones from going there.
        engine.compression.saving.wait()
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)


def interrupted(plan: Plan, steps: int) -> None:
    with pytest.raises(RankError):
        run_forks(plan.ranks, train_and_die, plan, steps)


LOST = {
    "none": ((), "host0"),
    "first": ((0,), "host0"),
    "second": ((1,), "host0"),
    "both": ((0, 1), "disk"),
}


@pytest.mark.parametrize(
    ("stage", "lost_hosts"),
    [
        (1, ("second", "both")),
        pytest.param(1, ("none", "first"), marks=pytest.mark.slow),
        pytest.param(3, tuple(LOST), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_lost_host_is_restored_from_its_neighbor(tmp_path, stage, lost_hosts):
    whole = tmp_path / "whole"
    whole.mkdir()
    plan = Plan(str(tmp_path), stage, every=2, disk=4, copies=1, hosts=2, ranks=4, steps=10)
    undisturbed = run_forks(4, train, Plan(**{**vars(plan), "root": str(whole)}))
    interrupted(plan, 7)
    saved = tmp_path / "saved"
    shutil.copytree(tmp_path, saved, ignore=shutil.ignore_patterns("whole", "saved"))
    for lost, expected in map(LOST.__getitem__, lost_hosts):
        for part in ("host0", "host1", "disk"):
            shutil.rmtree(tmp_path / part, ignore_errors=True)
            shutil.copytree(saved / part, tmp_path / part)
        for host in lost:
            shutil.rmtree(plan.directory(host))
        resumed = run_forks(4, train, plan, True)
        assert resumed[0][0].startswith(expected)
        assert f"global_step{4 if expected == 'disk' else 6}" in resumed[0][0]
        assert [found for *_, found in resumed] == [found for *_, found in undisturbed]


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 8
    file.write_bytes(content)


def test_a_damaged_copy_in_memory_is_refused_and_the_previous_one_is_loaded(tmp_path):
    plan = Plan(str(tmp_path), steps=6)
    undisturbed = None
    interrupted(plan, 5)
    [job] = plan.directory(0).iterdir()
    assert {place.name for place in job.iterdir() if list_paths(place)} >= {"global_step4", "global_step5"}
    flip(job / "global_step5" / "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    resumed = run_forks(2, train, plan, True)
    assert resumed[0][:2] == resumed[1][:2]
    path, warned, undisturbed = resumed[0]
    assert "global_step4" in path
    assert any("zero_pp_rank_1" in text and "damaged" in text for text in warned)
    other = tmp_path / "whole"
    other.mkdir()
    assert run_forks(2, train, Plan(**{**vars(plan), "root": str(other)}))[0][2] == undisturbed


def fill(rank: int, plan: Plan) -> tuple:
    """Train while rank 1 cannot write to memory in steps 3 to 5, and return the warnings and the remaining files."""
    engine = plan.start(rank)
    saving, warned = engine.compression.saving, []
    job = saving._memory.directory
    for number, batch in enumerate(batches_of(engine, rank, plan), 1):
        if number in (3, 6) and rank == 1:
            limit = 1000 if number == 3 else resource.RLIM_INFINITY
            resource.prlimit(saving._queues[-1]._writer.process, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with caught_warnings() as texts:
            step(engine, plan, [batch])
            saving.wait()
        warned.append(texts)
    found = sorted(
        checkpoint.step
        for checkpoint in CheckpointDirectory(Path(plan.disk_directory)).checkpoints()
        if checkpoint.complete
    )
    files = [file for file in job.rglob("*") if file.is_file()]
    held = {file.parent.name for file in files if file.name.startswith("zero_pp_rank_1")}
    private = all(not file.stat().st_mode & 0o077 for file in files)
    dist.barrier()
    engine.destroy()
    return warned, found, held, private


def test_full_memory_causes_warnings_and_the_disk_has_everything(tmp_path):
    plan = Plan(str(tmp_path), every=1, disk=4, steps=8)
    first, second = run_forks(2, fill, plan)
    assert first == second
    warned, found, held, private = first
    assert [bool(one) for one in warned] == [False, False, True, True, True, False, False, False]
    assert "global_step3 is not saved: rank 1" in warned[2][0]
    assert found == [4, 8]
    assert {"global_step7", "global_step8"} <= held
    assert private


def end(rank: int, directory: str, failing: bool) -> str:
    os.environ.pop("DS_COMPRESS_MEMORY_DIR", None)
    section = {
        "gradients": GRADIENTS,
        "checkpointing": {"directory": directory, "memory": {"every": 1, "copies": 1}},
    }
    with caught_warnings() as texts:
        engine = start(Job(1, section, steps=2))
    assert [text for text in texts if "/checkpointing/memory/copies" in text and "one host" in text]
    run(engine, data(rank, Job(1, steps=2)))
    engine.compression.saving.wait()
    dist.barrier()
    found = str(engine.compression.saving._memory.directory)
    assert list(Path(found).iterdir())
    try:
        if failing:
            raise ZeroDivisionError
        engine.destroy()
    except ZeroDivisionError:
        engine.destroy()
    dist.barrier()
    return found


@pytest.mark.parametrize("failing", [False, True])
def test_a_clean_end_leaves_nothing_in_memory_and_a_failure_all(tmp_path, failing):
    found = Path(run_forks(2, end, str(tmp_path / "disk"), failing)[0])
    assert found.is_dir() == failing
    shutil.rmtree(found, ignore_errors=True)


def test_another_number_of_ranks_causes_a_warning_and_loads_from_disk(tmp_path):
    plan = Plan(str(tmp_path), 0, steps=6, disk=4)
    interrupted(plan, 5)
    fewer = Plan(**{**vars(plan), "ranks": 1})
    [(path, warned, _)] = run_forks(1, train, fewer, True)
    assert "disk/global_step4" in path
    assert any("global_step5 in memory is ignored: it was saved by 2 ranks" in text for text in warned)


def test_a_host_that_cannot_list_the_files_it_has_received_tells_the_others(tmp_path):
    """Its memory may be full, or its directory gone."""
    listed = FileList(VERSION, "run", 1, 1, 0, 2, automatic=True, files={})
    failed = recovery._fetch([], Candidate(tmp_path, "gone"), SimpleNamespace(leads=True), {0: listed})
    assert len(failed) == 1
    assert f"{tmp_path / 'gone'}: [Errno 2]" in failed[0]


def groups_left_behind(rank: int, root: str, problem: str) -> tuple[str, int]:
    """Return the error of an engine that gets no host memory, and the number of process groups that it leaves."""
    plan = Plan(root, hosts=2, copies=1)
    place = plan.directory(rank)
    if problem == "directory":
        place.touch()
    os.environ |= {"DS_COMPRESS_MEMORY_DIR": str(place), "DS_COMPRESS_HOSTS": '["127.0.0.1"]'}
    engine = start(replace(plan.job(), section=None))
    engine.config.update(plan.job().config())
    before = len(dist.distributed_c10d._world.pg_map)
    error = refusal(StateError, deepspeed_compress.attach, engine)
    return error, len(dist.distributed_c10d._world.pg_map) - before


@pytest.mark.parametrize(("problem", "words"), [("directory", "cannot be created"), ("hosts", "lists 1 hosts")])
def test_no_group_is_left_behind_if_there_is_no_memory(problem, words, tmp_path):
    for error, left in run_forks(2, groups_left_behind, str(tmp_path), problem):
        assert words in error
        assert left == 0
