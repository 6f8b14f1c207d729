"""A checkpoint is complete, or its problems are named."""

import errno
import random
import shutil
import threading
from dataclasses import replace

import pytest

from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing.completeness import Save, find_problems
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import temporary
from tests.support.checkpoints import WORLD, publish, save, write
from tests.support.mutations import damage


def test_a_checkpoint_is_whole_when_all_ranks_have_listed_their_files(tmp_path):
    one = write(save(tmp_path, 4), ranks=(0,))
    assert CheckpointDirectory(tmp_path).missing(one) == [1]
    assert any("1 of 2 ranks" in problem for problem in find_problems(one.place))
    write(one, ranks=(1,))
    assert CheckpointDirectory(tmp_path).missing(one) == []
    assert list(find_problems(one.place)) == []


def test_the_same_tag_again_is_not_whole_before_all_have_written_again(tmp_path):
    write(save(tmp_path, 4))
    again = Save(tmp_path, "global_step4", "other", 1, 4, WORLD)
    write(again, ranks=(1,))
    assert CheckpointDirectory(tmp_path).missing(again) == [0]
    assert any("of 2 saves" in problem for problem in find_problems(again.place))


def test_the_same_tag_again_from_fewer_ranks_is_whole(tmp_path):
    write(replace(save(tmp_path, 4), world=3), ranks=(0, 1, 2))
    again = write(Save(tmp_path, "global_step4", "other", 1, 4, WORLD))
    assert CheckpointDirectory(tmp_path).missing(again) == []
    assert list(find_problems(again.place)) == []


def test_a_rank_that_has_begun_the_next_of_the_same_tag_is_not_waited_for(tmp_path):
    first = write(save(tmp_path, 4), ranks=(0,))
    second = replace(first, number=5)
    CheckpointDirectory(tmp_path).begin(second, 1)
    assert CheckpointDirectory(tmp_path).missing(first) == [1]
    write(second, ranks=(1,))
    assert CheckpointDirectory(tmp_path).missing(first) == []
    assert CheckpointDirectory(tmp_path).missing(second) == [0]


def test_only_states_that_no_rank_lists_are_removed(tmp_path):
    one = write(save(tmp_path, 4))
    listed, stale = sorted(one.place.glob("*.pt")), one.place / "mp_rank_01_model_states.pt"
    stale.touch()
    CheckpointDirectory(tmp_path).begin(replace(one, number=5), 1)
    CheckpointDirectory(tmp_path).tidy(one, None)
    assert sorted(one.place.glob("*.pt")) == [stale, *listed]
    write(one, ranks=(1,))
    CheckpointDirectory(tmp_path).tidy(one, None)
    assert sorted(one.place.glob("*.pt")) == listed


def test_a_rank_that_has_failed_is_not_waited_for(tmp_path):
    one = write(save(tmp_path, 4), ranks=(0,))
    files.write_list(one.place, files.listed(one, 1, {}, "OSError: disk full"))
    with pytest.raises(StateError, match="rank 1: OSError: disk full"):
        CheckpointDirectory(tmp_path).missing(one)
    assert any("disk full" in problem for problem in find_problems(one.place))


def test_any_damage_of_any_file_is_found_by_name(tmp_path):
    one, rng = write(save(tmp_path, 4)), random.Random(0)
    for _ in range(200):
        file = rng.choice(sorted(one.place.iterdir()))
        content = file.read_bytes()
        if (damaged := damage(content, rng)) != content:
            file.write_bytes(damaged)
            assert any(file.name in problem for problem in find_problems(one.place))
            file.write_bytes(content)


def test_a_file_that_cannot_be_read_is_damaged(tmp_path, monkeypatch):
    """An error of a disk on one rank must not keep the others waiting for its verdict."""

    def fail(file):
        raise OSError(errno.EIO, "Input/output error")

    one = write(save(tmp_path, 4))
    monkeypatch.setattr(files, "digest", fail)
    problems = list(find_problems(one.place))
    assert problems
    assert all("cannot be read: [Errno 5]" in problem for problem in problems)


def test_a_directory_that_was_removed_is_not_waited_for(tmp_path):
    one = write(save(tmp_path, 4), ranks=(0,))
    shutil.rmtree(one.place)
    with pytest.raises(StateError, match="was removed"):
        CheckpointDirectory(tmp_path).missing(one)


def test_ranks_share_the_work_of_looking(tmp_path):
    one = write(save(tmp_path, 4))
    for rank in range(WORLD):
        (one.place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"")
    found = [list(find_problems(one.place, rank, WORLD)) for rank in range(WORLD)]
    assert [len(some) for some in found] == [1, 1]
    assert "zero_pp_rank_0" in found[0][0]
    assert "zero_pp_rank_1" in found[1][0]


def test_the_newest_automatic_ones_are_kept_and_no_others_touched(tmp_path):
    by_program = write(save(tmp_path, 1))
    for step in range(2, 7):
        publish(write(save(tmp_path, step, automatic=True)))
    half = write(save(tmp_path, 7, automatic=True), ranks=(0,))
    assert CheckpointDirectory(tmp_path).prune(2) == ["global_step2", "global_step3", "global_step4"]
    assert [checkpoint.step for checkpoint in CheckpointDirectory(tmp_path).checkpoints()] == [1, 5, 6, 7]
    assert by_program.place.is_dir()
    assert half.place.is_dir()


def test_what_an_interrupted_save_left_is_removed_once_a_later_one_is_complete(tmp_path):
    """Every restart may leave one, and those of a time do not come again."""
    by_program = write(save(tmp_path, 1), ranks=(1,))
    interrupted = [write(save(tmp_path, step, automatic=True), ranks=(0,)) for step in (2, 3)]
    begun = save(tmp_path, 4, automatic=True)
    begun.place.mkdir()
    CheckpointDirectory(tmp_path).begin(begun, 1)
    publish(write(save(tmp_path, 5, automatic=True)))
    current = write(save(tmp_path, 6, automatic=True), ranks=(0,))
    assert CheckpointDirectory(tmp_path).prune(2) == [*(one.tag for one in interrupted), begun.tag]
    assert [checkpoint.tag for checkpoint in CheckpointDirectory(tmp_path).checkpoints()] == [
        by_program.tag,
        "global_step5",
        current.tag,
    ]


def test_files_that_nobody_has_listed_yet_are_not_taken_for_a_checkpoint(tmp_path):
    """All ranks may be killed while they write."""
    one = save(tmp_path, 4)
    one.place.mkdir()
    for rank in range(WORLD):
        CheckpointDirectory(tmp_path).begin(one, rank)
        (one.place / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt").write_bytes(b"x")
    assert CheckpointDirectory(tmp_path).missing(one) == [0, 1]
    assert list(find_problems(one.place)) == [
        f"{one.place}: rank {rank} did not write everything: writing has not finished" for rank in range(WORLD)
    ]
    [found] = CheckpointDirectory(tmp_path).checkpoints()
    assert (found.step, found.complete) == (4, False)


def test_the_checkpoint_that_latest_names_is_never_removed(tmp_path):
    publish(write(save(tmp_path, 1, automatic=True)))
    for step in range(2, 5):
        write(save(tmp_path, step, automatic=True, latest=False))
    assert CheckpointDirectory(tmp_path).prune(1) == ["global_step2", "global_step3"]


def test_older_ones_are_tried_after_the_latest(tmp_path):
    assert CheckpointDirectory(tmp_path).tags_to_try() == []
    for step in (8, 16, 24):
        publish(write(save(tmp_path, step)))
    write(save(tmp_path, 32), ranks=(0,))
    assert CheckpointDirectory(tmp_path).tags_to_try() == ["global_step24", "global_step16", "global_step8"]
    (tmp_path / "latest").write_text("global_step16")
    assert CheckpointDirectory(tmp_path).tags_to_try() == ["global_step16", "global_step8"]


def test_a_checkpoint_without_lists_is_deepspeeds_own(tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "mp_rank_00_model_states.pt").write_bytes(b"x")
    assert list(find_problems(tmp_path / "old")) == []
    [found] = CheckpointDirectory(tmp_path).checkpoints()
    assert (found.step, found.complete, found.automatic) == (None, True, False)


def test_a_tag_of_several_parts_is_listed_tried_and_pruned_as_any_other(tmp_path):
    nested = [replace(save(tmp_path, step), tag=f"epoch/{step}") for step in (1, 3)]
    for one in (nested[0], save(tmp_path, 2, automatic=True), nested[1]):
        publish(write(one))
    assert [checkpoint.tag for checkpoint in CheckpointDirectory(tmp_path).checkpoints()] == [
        "epoch/1",
        "global_step2",
        "epoch/3",
    ]
    assert CheckpointDirectory(tmp_path).tags_to_try() == ["epoch/3", "global_step2", "epoch/1"]
    assert CheckpointDirectory(tmp_path).missing(nested[1]) == []
    [first, *_] = CheckpointDirectory(tmp_path).superfluous(CheckpointDirectory(tmp_path).checkpoints(), 1)
    first.remove()
    assert [checkpoint.tag for checkpoint in CheckpointDirectory(tmp_path).checkpoints()] == ["global_step2", "epoch/3"]


def test_a_universal_checkpoint_is_listed_and_is_no_way_back(tmp_path):
    """DeepSpeed loads universal checkpoints in another way."""
    universal = tmp_path / "global_step8_universal"
    (universal / "zero").mkdir(parents=True)
    (universal / "mp_rank_00_model_states.pt").write_bytes(b"x")
    publish(write(save(tmp_path, 16)))
    assert CheckpointDirectory(tmp_path).tags_to_try() == ["global_step16"]
    assert [checkpoint.is_universal for checkpoint in CheckpointDirectory(tmp_path).checkpoints()] == [True, False]


def test_files_that_others_write_meanwhile_are_no_problem(tmp_path):
    """Their files appear and disappear under temporary names."""
    one, over = write(save(tmp_path, 8)), threading.Event()

    def write_on():
        file = one.place / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
        while not over.is_set():
            scratch = temporary(file)
            scratch.write_bytes(b"x" * 100_000)
            scratch.replace(file)

    writer = threading.Thread(target=write_on)
    writer.start()
    try:
        for _ in range(2000):
            assert [found.tag for found in CheckpointDirectory(tmp_path).checkpoints()] == ["global_step8"]
    finally:
        over.set()
        writer.join()


@pytest.mark.parametrize("automatic", [True, False])
def test_a_failed_save_is_discarded_but_the_directory_of_a_tag_of_the_program_stays(tmp_path, automatic):
    """The program may be about to save the tag again."""
    one = write(save(tmp_path, 8, automatic=automatic))
    CheckpointDirectory(tmp_path).discard(one)
    assert list(find_problems(one.place)) == []
    files.write_list(one.place, files.listed(one, 1, {}, "no space"))
    (one.place / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    CheckpointDirectory(tmp_path).discard(one)
    assert not list(tmp_path.rglob("*.pt"))
    assert one.place.exists() == (not automatic)
    assert [found.complete for found in CheckpointDirectory(tmp_path).checkpoints()] == ([] if automatic else [False])


def test_a_link_protects_a_tag_of_several_parts(tmp_path):
    one = write(replace(save(tmp_path, 1), tag="epoch/1"))
    (tmp_path / "best").symlink_to(one.place)
    assert CheckpointDirectory(tmp_path).protected() == {"epoch/1"}
    assert [found.tag for found in CheckpointDirectory(tmp_path).checkpoints()] == ["epoch/1"]


def test_checkpoints_of_another_directory_below_are_not_of_this_one(tmp_path):
    """Directories of islands and of Trainer have their own `latest`."""
    publish(write(save(tmp_path / "island_0001", 4)))
    write(save(tmp_path / ".hidden", 4))
    publish(write(save(tmp_path, 2)))
    assert [found.tag for found in CheckpointDirectory(tmp_path).checkpoints()] == ["global_step2"]
