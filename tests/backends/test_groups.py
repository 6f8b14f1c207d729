"""Tests of the process groups that are made next to those of a program."""

from collections.abc import Callable, Sequence
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support import sharded
from tests.support.forks import run_forks
from tests.support.two_branches import FOUR_BITS, Setting, start, take_steps

BOTH = {**FOUR_BITS, "weights": {"bits": 8, "block_size": 32}}


def build_with_other_groups(rank: int, build: Callable[[], tuple[object, ...]], others: Sequence[Sequence[int]]) -> int:
    """Attach in a program that has made groups of some ranks, and return the number of steps taken."""
    start()
    for ranks in others:
        dist.new_group(list(ranks))
    model, optimizer, attached = build()
    take_steps(model, optimizer, rank, range(2))
    return attached.steps.count


@pytest.mark.parametrize("build", [Setting(FOUR_BITS).build, sharded.Setting(BOTH, (2, 2)).build], ids=["ddp", "hsdp"])
def test_ranks_may_be_in_different_numbers_of_other_groups(build: Callable[[], tuple[object, ...]]) -> None:
    """Many programs make a group of the first rank of each host."""
    assert run_forks(4, build_with_other_groups, build, [[0, 3], [0, 1, 3]], timeout=90) == [2] * 4


def build_in_a_part_of_a_bound_job(rank: int) -> list[torch.device | None]:
    """Return the devices of the default group while groups of two of three ranks are made, and afterwards."""
    start()
    pair, seen, device = dist.new_group([0, 1]), [], torch.device("cuda:0")
    if rank == 2:
        return []
    world = dist.group.WORLD
    world.bound_device_id = device
    make = dist.new_group

    def watched(*args: object, **options: object) -> object:
        seen.append(world.bound_device_id)
        return make(*args, **options)

    with mock.patch.object(dist, "new_group", watched):
        _, _, attached = Setting(FOUR_BITS).build(group=pair)
    return [*seen, world.bound_device_id, attached.session.gradients.reducer.group.bound_device_id]


def test_groups_of_a_part_of_the_ranks_do_not_split_the_communicator_of_all() -> None:
    """Splitting it is collective in the job, and the third rank knows of no other groups."""
    device = torch.device("cuda:0")
    assert run_forks(3, build_in_a_part_of_a_bound_job) == [[None, None, device, device]] * 2 + [[]]


def build_without_a_named_backend(rank: int) -> bool:
    dist.init_process_group()
    _, _, attached = Setting(FOUR_BITS).build()
    return attached.session.gradients.reducer.link.downward is not None


def test_gloo_is_recognized_if_the_program_has_not_named_it() -> None:
    assert run_forks(2, build_without_a_named_backend) == [True] * 2
