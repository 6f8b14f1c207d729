"""PyTorch Lightning: `DeepSpeedStrategy` after one call of `install`, with Lightning's own checkpoints."""

import importlib.util
import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import deepspeed_compress
from deepspeed_compress import ConfigError, UnsupportedError
from deepspeed_compress.checkpointing.completeness import find_problems
from deepspeed_compress.config import SECTION
from deepspeed_compress.integrations import frameworks
from tests.integrations.lightning_program import EPOCH, Job, Outcome, fit
from tests.support.checkpoints import save, write
from tests.support.forks import run_forks
from tests.support.leftovers import own_port
from tests.support.processes import run_command

pytestmark = pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed")
NONE = {"gradients": {"method": "none"}, "monitor": {"every": 1}}
INT4 = {"gradients": {"bits": 4}, "monitor": {"every": 1}}


def config(stage: int, section: Mapping[str, Any] | None, **extra: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0}
    plain = {"zero_optimization": zero, "zero_allow_untested_optimizer": True, **extra}
    return plain if section is None else {**plain, SECTION: dict(section)}


def train(rank: int, *jobs: Job) -> list[Outcome]:
    """Run the jobs one after the other in this rank, each after `install()` if its configuration has the section."""
    return [train_one(job) for job in jobs]


def train_one(job: Job) -> Outcome:
    size = os.environ["WORLD_SIZE"]
    uninstall = deepspeed_compress.install() if SECTION in job.config else lambda: None
    outcome = fit(job)
    uninstall()
    # Lightning removes it at the end of `fit`.
    os.environ["WORLD_SIZE"] = size
    return outcome


@pytest.mark.parametrize(("ranks", "removed"), [((0, 1), ["older.ckpt"]), ((1,), [])])
def test_a_checkpoint_that_could_not_be_written_does_not_displace_an_older_one(
    tmp_path: Path, ranks: tuple[int, ...], removed: list[str]
) -> None:
    session = SimpleNamespace(saving=SimpleNamespace(wait=lambda: None), saved=[write(save(tmp_path, 4), ranks).place])
    found: list[str] = []
    strategy = SimpleNamespace(model=SimpleNamespace(compression=session))
    frameworks._completing(lambda strategy, path: found.append(path), strategy, "older.ckpt")
    assert found == removed


def check_resumed(whole: list[list[Outcome]], resumed: list[list[Outcome]]) -> None:
    """Check that runs that continued from the checkpoint of the first epoch have the bits of the `whole` ones."""
    for (one, *_), (other, *_) in zip(whole, resumed, strict=True):
        assert other.parameters == one.parameters
        assert other.losses == one.losses[2 * EPOCH :]
    assert resumed[0][0].bytes_sent == whole[0][0].bytes_sent[EPOCH:]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", range(4))
def test_none_matches_lightning_alone_and_four_bits_are_sent_and_resumed(stage: int, tmp_path: Path) -> None:
    sections = {"alone": None, "none": NONE, "int4": INT4}
    jobs = (Job(str(tmp_path / name), config(stage, section)) for name, section in sections.items())
    ranks = run_forks(2, train, *jobs)
    for alone, none, int4 in ranks:
        assert none.losses == alone.losses
        assert none.parameters == alone.parameters
        assert int4.parameters != alone.parameters
        assert int4.losses[-1] == pytest.approx(alone.losses[-1], rel=0.05)
    # Only rank 0 measures.
    alone, none, int4 = ranks[0]
    assert alone.bytes_sent == []
    assert all(sent == uncompressed > 0 for sent, uncompressed in none.bytes_sent)
    assert len(int4.bytes_sent) == 3 * EPOCH
    assert all(0 < sent < uncompressed / 4 for sent, uncompressed in int4.bytes_sent)
    job = Job(str(tmp_path / "int4"), config(stage, INT4), resume=str(tmp_path / "int4" / "epoch=0.ckpt"))
    check_resumed([rank[-1:] for rank in ranks], run_forks(2, train, job))


@pytest.mark.slow
def test_checkpoints_are_written_in_the_background_and_removed_when_newer_ones_are_complete(tmp_path: Path) -> None:
    """A resumed run starts from the newest checkpoint but one, which `save_top_k` has kept."""
    job = Job(str(tmp_path), config(2, {**INT4, "weights": {"bits": 8}, "checkpointing": {}}), keep=2)
    whole = run_forks(2, train, job)
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert kept == ["epoch=1.ckpt", "epoch=2.ckpt"]
    assert [list(find_problems(tmp_path / name)) for name in kept] == [[], []]
    resumed = run_forks(2, train, replace(job, resume=str(tmp_path / "epoch=1.ckpt")))
    for (one,), (other,) in zip(whole, resumed, strict=True):
        assert other.parameters == one.parameters
        assert other.losses == one.losses[4 * EPOCH :]


def test_compressed_weights_are_exact_after_fit(tmp_path: Path) -> None:
    """No checkpoint is saved at the end, which would make them exact as well."""
    job = Job(str(tmp_path), config(1, {"weights": {"bits": 4}}), keep=0)
    for (outcome,) in run_forks(2, train, job):
        assert outcome.parameters != outcome.master_weights
        assert outcome.module == outcome.master_weights


@pytest.mark.slow
def test_manual_optimization_and_the_other_package(tmp_path: Path) -> None:
    sections = {"alone": None, "none": NONE, "int4": INT4}
    jobs = [
        Job(
            str(tmp_path / name),
            config(2, section, gradient_clipping=0.5, bf16={"enabled": True}),
            {"accumulate_grad_batches": 1, "gradient_clip_val": None, "precision": "bf16-mixed"},
            manual=True,
            package="pytorch_lightning",
        )
        for name, section in sections.items()
    ]
    for alone, none, int4 in run_forks(2, train, *jobs):
        assert (none.losses, none.parameters) == (alone.losses, alone.parameters)
        assert int4.losses[-1] == pytest.approx(alone.losses[-1], rel=0.05)
        assert int4.parameters != alone.parameters


@pytest.mark.slow
def test_the_section_alone_chooses_the_stage(tmp_path: Path) -> None:
    """Lightning itself reads the stage, for `deepspeed.zero.Init` around `configure_model`."""
    chosen = config(0, {**INT4, "parallelism": {"zero_stage": 3}})
    del chosen["zero_optimization"]["stage"]
    jobs = Job(str(tmp_path / "one"), config(3, INT4)), Job(str(tmp_path / "other"), chosen)
    for written, by_section in run_forks(2, train, *jobs):
        assert by_section == replace(written, module=by_section.module)
        assert all(not values for values in (by_section.module or {}).values())


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"gradients": {"bit": 4}}, f"/{SECTION}/gradients/bit: unknown key"),
        ({"parallelism": {"pipeline": 2}}, "2 is not possible with Lightning"),
        ({"checkpointing": {"every": 5, "directory": "here"}}, "use Lightning's ModelCheckpoint"),
    ],
)
def test_a_wrong_section_is_reported_when_the_strategy_is_made(section: dict[str, Any], text: str) -> None:
    # This import takes a second.
    from lightning.pytorch.strategies import DeepSpeedStrategy

    uninstall = deepspeed_compress.install()
    try:
        with pytest.raises((ConfigError, UnsupportedError), match=text):
            DeepSpeedStrategy(config=config(1, section))
        DeepSpeedStrategy(config=config(1, None))
    finally:
        uninstall()
    DeepSpeedStrategy(config=config(1, section))


def start(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Start `ds-compress run` with the arguments, without variables of a launcher."""
    left_out = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    return run_command("run", "--launcher", *arguments, env=environment)


PROGRAM = str(Path(__file__).with_name("lightning_program.py"))


@pytest.mark.slow
def test_a_program_that_does_not_know_this_package(tmp_path: Path) -> None:
    with own_port() as port:
        options = ("--nproc_per_node", "2", "--master_port", str(port))
        done = start("torchrun", *options, PROGRAM, str(tmp_path), json.dumps(config(2, INT4)))
    assert done.returncode == 0, done.stderr
    assert "4 of 4 parameters are compressed" in done.stderr
    assert "nothing was compressed" not in done.stderr
    assert (tmp_path / "epoch=2.ckpt/checkpoint/deepspeed_compress_rank_00001.json").is_file()


@pytest.mark.slow
def test_processes_that_nothing_has_started_are_not_waited_for(tmp_path: Path) -> None:
    done = start("none", PROGRAM, str(tmp_path), json.dumps(config(2, INT4)))
    assert done.returncode != 0
    assert "the launcher has started 1 processes, but Lightning's Trainer expects 2" in done.stderr
