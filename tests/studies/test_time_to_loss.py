"""The study of the time to a loss: loss curves, step times, and the tables made of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from deepspeed_compress.config import SECTION, read_ds_config
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.options import PEERS as TIMED
from deepspeed_compress.tools.bench.workload import Contender, Workload
from launch.studies import time_to_loss
from launch.studies.loss_curve import Curve, Goal, Job, train
from launch.studies.time_table import StepTimes, Trained, outcomes, table
from tests.studies.toy import ToyFiles
from tests.support.forks import run_forks

NATIVE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 1,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 2, "warmup_type": "linear"},
    },
}
STEPS, START = 8, 3


class StudyFiles(ToyFiles):
    """Files of the toy model, and jobs of the study that use them."""

    def job(self, name: str, ds_config: dict[str, Any] | None = None, goal: Goal | None = None) -> Job:
        workload = Workload(str(self.model), 1, 1, "balanced", False, "fp32", 2, 1, 1.0, 16, 1)
        return Job(workload, Contender(name, name, ds_config), NATIVE, START, STEPS, 2, 4, 4, self.key, goal)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> StudyFiles:
    return StudyFiles(tmp_path_factory.mktemp("text"))


def trained(rank: int, jobs: list[Job], cache: Path) -> list[Curve]:
    gauges.join()
    curves = [train(job, cache, prints=False) for job in jobs]
    dist.destroy_process_group()
    return curves


def curves(files: StudyFiles, jobs: list[Job]) -> list[Curve]:
    first, second = run_forks(2, trained, jobs, files.cache)
    assert first == second
    return first


@pytest.mark.slow
def test_uncompressed_engines_make_the_same_updates(files: StudyFiles) -> None:
    """DeepSpeed with and without ZeRO, and FSDP2, have the losses of DDP, so the study trains only DDP."""
    engines = [files.job(f"zero{stage}", NATIVE | {"zero_optimization": {"stage": stage}}) for stage in (0, 1, 3)]
    ddp, *others = curves(files, [files.job("ddp"), files.job("fsdp2"), *engines])
    assert ddp.train[-1] < ddp.train[0] - 0.05
    for other in others:
        assert other.train == pytest.approx(ddp.train, abs=2e-5)
        assert [loss for _, loss in other.held_out] == pytest.approx([loss for _, loss in ddp.held_out], abs=2e-5)
        assert [step for step, _ in other.held_out] == [2, 4, 6, 8]


def test_methods_with_a_delayed_start_begin_like_ddp(files: StudyFiles) -> None:
    section = {"gradients": {"bits": 4}, "schedule": {"warmup_steps": START}, "monitor": {"every": 1000}}
    ours = files.job("ours", NATIVE | {"zero_optimization": {"stage": 0}, SECTION: section})
    ddp, *delayed = curves(files, [*map(files.job, ("ddp", "ddp-powersgd1")), ours])
    assert ddp.dense_steps == 0
    for curve in delayed:
        assert curve.dense_steps == START
        # The loss of a step is that of the weights before it.
        assert curve.train[: START + 1] == pytest.approx(ddp.train[: START + 1], abs=2e-5)
        assert curve.train[START + 1 :] != pytest.approx(ddp.train[START + 1 :], abs=2e-5)
        assert curve.train[-1] == pytest.approx(ddp.train[-1], abs=0.1)


def test_files_of_the_study_are_valid_and_peers_can_be_timed() -> None:
    for file in time_to_loss.OURS:
        assert find_problems(read_ds_config(str(file))) == []
    assert set(time_to_loss.PEERS) <= set(TIMED)


def row(name: str, seconds: float, rate: str = "1gbit", stage: int | None = None, sent: float = 4e6) -> dict[str, Any]:
    ds_config = None if stage is None else {"zero_optimization": {"stage": stage}}
    contender = {"name": name, "kind": name, "ds_config": ds_config}
    return {
        "contender": contender,
        "ranks": 2,
        "rate": rate,
        "step_s": {"median": seconds},
        "bytes": {"interface": sent},
    }


def falling(*losses: float, dense_steps: int = 0) -> Curve:
    """Return a curve with an evaluation every 10 steps, whose loss is also the training loss of the 10 steps before."""
    held_out = tuple((10 * number, loss) for number, loss in enumerate(losses, 1))
    return Curve(dense_steps, tuple(loss for _, loss in held_out for _ in range(10)), held_out)


def test_seconds_are_steps_times_step_time() -> None:
    names = {"ddp": falling(6.0, 5.0, 4.0), "ours": falling(6.0, 5.0, 4.5, 3.5), "late": falling(5.0, 4.5)}
    times = StepTimes([{"rows": [row("ddp", 2.0), row("ours", 0.1), row("deepspeed", 3.0, stage=1)]}])
    found = {
        outcome.name: outcome
        for outcome in outcomes([Trained(name, 2, 0, curve) for name, curve in names.items()], 10, times)
    }
    assert list(found) == ["ddp", "deepspeed, ZeRO 1", "ours", "late"]
    assert (found["ddp"].seconds, found["deepspeed, ZeRO 1"].seconds) == ({"1gbit": 60.0}, {"1gbit": 90.0})
    # Halfway between the evaluations at 30 and 40.
    assert (found["ours"].held_out, found["ours"].seconds) == ({0: 35.0}, {"1gbit": pytest.approx(3.5)})
    assert found["ours"].train == {0: pytest.approx(35.0, abs=1)}
    assert (found["late"].held_out, found["late"].seconds) == ({0: None}, {})
    lines = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in table([*found.values()], ["1gbit"]).splitlines()
    ]
    assert lines[2] == ["ours", "4.00", "35", "35", "0.100", "4", "17.1"]
    assert lines[3] == ["ddp", "4.00", "30", "30", "2.000", "60", "1.0"]
    assert lines[5] == ["late", "-", "not in 20", "not in 20", "-", "-", "-"]


@pytest.mark.slow
def test_a_study_from_text_to_tables(tmp_path: Path, files: StudyFiles, capfd: pytest.CaptureFixture[str]) -> None:
    where = ["--data", str(files.text), "--output-dir", str(tmp_path), "--model", str(files.model), "--hosts", "2"]
    short = ["--steps", "6", "--eval-every", "2", "--seq-len", "16", "--only", "^(ddp|ddp-powersgd4|zero0_int4)$"]
    assert time_to_loss.main([*where, *short]) == 0
    assert [line.split("|")[1].strip() for line in capfd.readouterr().out.splitlines() if "|" in line][2:] == [
        "ddp",
        "ddp-powersgd4",
        "zero0_int4",
    ]
    made = {file: file.stat().st_mtime_ns for file in (tmp_path / "2hosts").rglob("*.json")}
    assert len(made) == 3
    steps = tmp_path / "steps.json"
    rows = [
        row(name, seconds, rate) | {"workload": {}}
        for rate in ("1gbit", "100mbit")
        for name, seconds in (("ddp", 2.0), ("zero0_int4", 0.1))
    ]
    steps.write_text(json.dumps({"rows": rows}))
    assert time_to_loss.main([*where, *short, "--times", str(steps)]) == 0
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "2hosts").rglob("*.json")} == made
    seconds = {
        one["name"]: one["seconds"] for one in json.loads((tmp_path / "time_to_loss.json").read_text())["outcomes"]
    }
    assert seconds["ddp"] == {"1gbit": 12.0, "100mbit": 12.0}
    # The finished runs have other options.
    assert time_to_loss.main([*where, *short, "--steps", "4"]) == 2
    assert "made with another" in capfd.readouterr().err
