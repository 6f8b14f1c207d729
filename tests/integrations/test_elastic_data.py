"""Trainer in islands that are jobs of their own, and the order in which each reads its data."""

import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.data_loader import SeedableRandomSampler
from torch.utils.data import DataLoader
from transformers import TrainerCallback

import deepspeed_compress
from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.integrations.hf import read_by_itself
from tests.integrations.trainers import Job, collate, trainer_of
from tests.support.coordinators import become_island, coordinator, own_ports
from tests.support.forks import run_forks

DATA = list(range(40))
ISLANDS = {"elastic": {"rendezvous": "127.0.0.1:1"}}


def session(number: int, islands: Any) -> Any:
    config = parse_section({SECTION: {"islands": islands}})
    return SimpleNamespace(config=config, islands=SimpleNamespace(number=number) if islands else None)


def orders(number: int, islands: Any) -> list[list[int]]:
    """Of three epochs."""
    sampler = SeedableRandomSampler(DATA, data_seed=5)
    read_by_itself(session(number, islands), DataLoader(DATA, sampler=sampler, batch_size=4))
    return [list(sampler) for _ in range(3)]


def test_no_order_is_read_twice() -> None:
    found = [order for number in range(3) for order in orders(number, ISLANDS)]
    assert len({tuple(order) for order in found}) == 9
    assert all(sorted(order) == DATA for order in found)


def test_ranks_of_one_job_keep_their_order() -> None:
    assert orders(3, None) == orders(0, ISLANDS)


def test_an_order_that_cannot_be_changed_is_told() -> None:
    with pytest.warns(CompressWarning, match="/deepspeed_compress/islands/elastic: all islands may read"):
        read_by_itself(session(1, ISLANDS), DataLoader(DATA, batch_size=4))


class Together(TrainerCallback):
    """Islands begin when both are there: one that is slow to start would find the other one at its end."""

    def __init__(self, directory: Path, rank: int, resumes: bool) -> None:
        self._directory, self._rank, self._name = directory, rank, f"{'again' if resumes else 'first'}_"

    def on_train_begin(self, *args: Any, **options: Any) -> None:
        self._directory.joinpath(f"{self._name}{self._rank}").touch()
        while len(list(self._directory.glob(f"{self._name}*"))) < 2:
            time.sleep(0.02)


def trained(rank: int, job: Job, ports: list[int]) -> tuple[list[int], list[str], int]:
    """First tokens of what was read, what became of exchanges, and steps. In a directory of its own."""
    become_island(rank, 1, ports)
    deepspeed_compress.install()
    trainer, read = trainer_of(replace(job, directory=f"{job.directory}/{rank}")), []

    def keep(rows: list[dict[str, list[int]]]) -> Any:
        read.extend(row["input_ids"][0] for row in rows)
        return collate(rows)

    trainer.data_collator = keep
    trainer.add_callback(Together(Path(job.directory), rank, job.resume))
    trainer.train(resume_from_checkpoint=job.resume or None)
    islands = trainer.model_wrapped.compression.islands
    trainer.model_wrapped.destroy()
    return read, [result.kind for result in islands.history], trainer.state.global_step


def test_trainer_trains_saves_and_resumes_islands(tmp_path: Path) -> None:
    args = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "dataloader_num_workers": 0}
    with coordinator() as address, own_ports(4) as ports:
        elastic = {"rendezvous": address, "give_up": "20 s"}
        section = {"gradients": {"method": "none"}, "islands": {"sync_every": 2, "elastic": elastic}}
        job = Job(str(tmp_path), 1, section, args)
        first, second = run_forks(2, trained, job, ports[:2])
        longer = replace(job, args={**args, "max_steps": 8}, resume=True)
        again = run_forks(2, trained, longer, ports[2:])
    assert first[0][:8] != second[0][:8]
    for _, kinds, steps in (first, second):
        assert steps == 6
        assert kinds.count("exchange") >= 2
    assert [steps for _, _, steps in again] == [8, 8]
