"""`plan cluster --measure`: with ranks that behave as the model says, and on emulated hosts."""

import contextlib
import io
import json
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.planner.cluster import Cluster, read_cluster
from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Probe, predict_probe, predict_step
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.search import Job, search
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.tools import plan_cluster
from deepspeed_compress.tools.bench.jobs import EmulatedRanks
from deepspeed_compress.tools.bench.options import Emulation
from deepspeed_compress.tools.plan_cluster import find_measuring_ranks, measure
from tests.support.forks import run_forks
from tests.support.hosts import measures_links

MODEL = Path("configs/models/gpt_1m.json").absolute()
SLOW = Constants(0.3, 1.5, 0.2, 4e-6, 0.7, 30.0, 1.5, 0.4, 0.5)
KINDS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "exchange")


class ExactRanks(EmulatedRanks):
    """Ranks whose times are those of the model with the constants `SLOW`."""

    def __init__(self, emulation: Emulation, timeout: float, job: Job, layouts: dict[str, Layout]) -> None:
        super().__init__(emulation, timeout)
        self.job, self.layouts = job, layouts

    def run(self, jobs: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], str | None]:
        measured = {"probes": self.probes, "steps": self.steps}
        return [row for job in jobs for row in measured[job["measure"]](job)], None

    def probes(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        moved = [("copy", [8 * job["numel"]]), ("coding", [8 * job["numel"]]), ("kernel", [])]
        sent = [(kind, [size, ranks]) for kind in KINDS for size in job["sizes"] for ranks in (2, 4)]
        found = []
        for kind, sizes in [*(("product", sizes) for sizes in job["products"]), *moved, *sent]:
            seconds = predict_probe(self.job, Probe(kind, tuple(sizes), 1.0), SLOW)
            found.append({"kind": kind, "sizes": sizes, "seconds": seconds})
        return found

    def steps(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        [contender] = job["group"]["contenders"]
        seconds = predict_step(self.job, self.layouts[contender["name"]], SLOW)
        return [{"contender": contender, "step_s": {"median": seconds}}]


def plan(*more: str) -> int:
    return main(["plan", "cluster", "--model", str(MODEL), "--batch", "16", "--seq", "64", *more])


def exact_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the ranks of `--measure`."""

    def find(emulation: Emulation, timeout: float, cluster: Cluster) -> ExactRanks:
        layouts = {str(one.layout): one.layout for one in search(jobs[-1]).fitting}
        return ExactRanks(emulation, timeout, jobs[-1], layouts)

    def make_job(options: Any) -> Job:
        jobs.append(made(options))
        return jobs[-1]

    jobs: list[Job] = []
    made = plan_cluster.read_job
    monkeypatch.setattr(plan_cluster, "read_job", make_job)
    monkeypatch.setattr(plan_cluster, "find_measuring_ranks", find)


def test_what_is_measured_is_written_and_used_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact_ranks(monkeypatch)
    file = tmp_path / "measured.json"
    # Without the option, steps that take this long are not measured.
    assert plan("--emulate", "2x2,1mbit", "--measure", str(file)) == 0
    assert "scaled from" not in capsys.readouterr().out
    found = json.loads(file.read_text())
    assert [abs(step["predicted"] / step["seconds"] - 1) < 0.05 for step in found["steps"]] == [True] * 3
    step = found["steps"][1]
    given = ("--constants", str(file), "--explain", step["layout"])
    assert plan("--gpus", "2x2xCPU", "--network", "1mbit", *given) == 0
    assert capsys.readouterr().out.startswith(f"{step['layout']}: {step['predicted']:.4g} s")


def test_ranks_at_hand_measure_what_runs_now_before_the_choices_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exact_ranks(monkeypatch)
    file = tmp_path / "now.json"
    file.write_text('{"zero_optimization": {"stage": 1}}')
    assert plan("--emulate", "2x2,100mbit", "--config", str(file)) == 0
    out = capsys.readouterr().out
    steps = r"a step of zero1-d4-\S+ \(\S+ s\), zero1-d4-\S+-g4-w4 \(\S+ s\), zero\d-d4-\S+ \(\S+ s\)\."
    assert re.search(rf"Measured here: links, matrix products, kernels, {steps}", out)
    assert "the same, 4 bits" in out
    assert "scaled from" not in out
    assert plan("--emulate", "2x2,1mbit", "--config", str(file)) == 0
    assert "Measured here: links, matrix products, kernels.\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "--gpus: is missing, and there is no GPU here"),
        (("--gpus", "4xCPU"), "--network: is missing"),
        (("--emulate", "2,1gbit", "--gpus", "2xCPU"), "--emulate: describes all hosts"),
        (("--emulate", "2,1gbit,100mbit"), "--emulate: describes all hosts and one rate"),
        (("--emulate", "2,none"), "--emulate: describes all hosts and one rate"),
        (("--gpus", "2xCPU", "--network", "1gbit", "--measure", "a.json"), "a single process has nothing"),
        (("--emulate", "2,1gbit", "--constants", "nowhere.json"), "cannot be read"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    options: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert plan(*options) == 1
    assert message in capsys.readouterr().err


JOB = Job(read_cluster("4xCPU", "100mbit", 2), read_model(MODEL), SOFTWARE["deepspeed"], 64, 16, 1e8)


class MixedRanks(EmulatedRanks):
    """Ranks of which half have another kind of GPUs."""

    def gather(self, mine: Any) -> list[Any]:
        return [mine, mine, "L4", "L4"]


def test_ranks_with_several_kinds_of_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_cluster, "find_ranks", lambda *_: MixedRanks(Emulation(2, ("100mbit",), 2), 10.0))
    with (
        pytest.raises(ConfigError, match=r"write --gpus 2xCPU\+2xL4, without a launcher"),
        find_measuring_ranks(None, 10.0, JOB.cluster),
    ):
        pass


@pytest.mark.slow
@measures_links
def test_a_brief_measurement_takes_half_a_minute(capsys: pytest.CaptureFixture[str]) -> None:
    begin = time.monotonic()
    assert plan("--emulate", "2,1gbit") == 0
    assert time.monotonic() - begin < 60
    assert "Measured here: links, matrix products, kernels, a step of zero" in capsys.readouterr().out


@pytest.mark.slow
@measures_links
def test_links_and_steps_of_emulated_hosts_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    assert plan("--emulate", "2,100mbit", "--measure", str(file)) == 0
    found = json.loads(file.read_text())
    assert len(found["steps"]) >= 2
    assert all(0 < step["seconds"] < 60 for step in found["steps"])
    assert {probe["kind"] for probe in found["probes"]} >= {"product", "copy", "kernel", "coding", *KINDS}
    # Collectives reach most of an emulated link's rate.
    assert 0.5 < found["constants"]["network"] < 1.5


def launched(rank: int, file: str) -> tuple[int, str]:
    """Run the command as a rank of a launcher, and return its code and output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        where = ("--gpus", "2xCPU", "--gpus-per-node", "2", "--network", "1gbit")
        return plan(*where, "--measure", file), out.getvalue()


@pytest.mark.slow
def test_ranks_of_a_launcher_measure_together_and_the_first_prints(tmp_path: Path) -> None:
    file = tmp_path / "measured.json"
    (code, out), other = run_forks(2, launched, str(file))
    assert code == 0
    assert other == (0, "")
    found = json.loads(file.read_text())
    assert 1 <= len(found["steps"]) <= 3
    assert all(step["seconds"] > 0 for step in found["steps"])
    assert "Measured here: " in out


def found(rank: int, now: str) -> tuple[int, str]:
    """Run the command without a cluster as a rank of a launcher, and return its code and output."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        return plan("--config", now), out.getvalue()


@pytest.mark.slow
def test_ranks_of_a_launcher_need_no_description_of_the_cluster(tmp_path: Path) -> None:
    now = tmp_path / "now.json"
    now.write_text('{"zero_optimization": {"stage": 2}}')
    (code, out), other = run_forks(2, found, str(now))
    assert code == 0
    assert other == (0, "")
    assert "on 2 CPU in 1 node of 2\n" in re.sub(" +\n", "\n", out)
    assert "a step of zero2-d2-" in out


def test_a_program_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedRanks, "run", lambda *_: ([], "rank 1 ended with 1"))
    with pytest.raises(CompressError, match="measurement: rank 1 ended with 1"):
        measure((), JOB, EmulatedRanks(Emulation(2, ("100mbit",)), 10.0), MODEL)
