"""The processes of a trial: two ranks as forked processes, and a script that does not know of the trial."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.tools.tune import rank as runner
from deepspeed_compress.tools.tune.space import Candidate
from deepspeed_compress.tools.tune.trials import Task, trial_config
from tests.support.forks import RankError, run_forks

SCRIPT = str(Path(__file__).parent / "script.py")
STEPS = 12


def ds_config(accumulation: int = 1, stage: int = 1) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 10**6,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
    }


def in_rank(rank: int, arguments: list[str]) -> str:
    """Run the program. Return "" if it ends normally. Replacements made by `main` end with this process."""
    try:
        runner.main([SCRIPT, *arguments])
    except SystemExit as stop:
        return f"exit {stop.code}"
    return ""


def trial(
    directory: Path, *options: str, config: dict[str, Any] | None = None, section: Any = None
) -> list[dict[str, Any]]:
    """Return the recorded lines of a trial of two ranks."""
    candidate = Candidate("x", section or {"gradients": {"bits": 4}})
    file = directory / "ds_config.json"
    file.write_text(json.dumps(trial_config(config or ds_config(), candidate, Task(STEPS, str(directory)))))
    assert run_forks(2, in_rank, [str(file), "--output_dir", str(directory), *options]) == [""] * 2
    return [json.loads(line) for line in (directory / "trial.jsonl").read_text().splitlines()]


def losses(directory: Path, rank: int) -> list[float]:
    return [float(line) for line in (directory / f"losses{rank}").read_text().split()]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_script_ends_after_so_many_optimizer_steps(accumulation: int, tmp_path: Path) -> None:
    lines = trial(tmp_path, config=ds_config(accumulation))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    both = [losses(tmp_path, rank) for rank in range(2)]
    assert [len(one) for one in both] == [STEPS * accumulation] * 2
    for line in lines:
        micro = range((line["step"] - 1) * accumulation, line["step"] * accumulation)
        assert line["loss"] == pytest.approx(statistics.fmean(one[n] for one in both for n in micro), rel=1e-5)
    assert min(line["step_ms"] for line in lines) > 0
    assert [line["step"] for line in lines if line["bytes"] is not None] == [5, 10]


def test_a_pipeline(tmp_path: Path) -> None:
    lines = trial(tmp_path, "--pipeline", config=ds_config(2, 0))
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    assert lines[-1]["loss"] > 0
    assert [line["step"] for line in lines if line["bytes"] is not None] == [5, 10]


def test_a_script_that_ends_too_early_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match=r"ended after 7 optimizer steps .* before the 12 of this trial") as raised:
        trial(tmp_path, "--steps", "7")
    assert "fewer --steps or --rungs" in str(raised.value)
    assert not (tmp_path / "trial.jsonl").exists()


@pytest.mark.filterwarnings("ignore")
def test_a_script_with_another_configuration_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RankError, match="/deepspeed_compress_trial: is missing from the configuration"):
        trial(tmp_path, "--rewrite")


def test_all_bytes_are_counted(tmp_path: Path) -> None:
    """The bytes are those of gradients and of the weights that ZeRO 1 gathers."""
    lines = trial(tmp_path, section={"gradients": {"method": "none"}})
    statistics_lines = [
        json.loads(line) for line in (tmp_path / "statistics/compression.jsonl").read_text().splitlines()
    ]
    assert [line["step"] for line in statistics_lines] == [5, 10]
    [wanted] = {line["bytes_sent"] + line["bytes_weights"] for line in statistics_lines}
    assert {line["bytes"] for line in lines} == {None, wanted}
    assert statistics_lines[0]["bytes_weights"] > 0


def test_trials_of_the_same_settings_see_the_same_losses(tmp_path: Path) -> None:
    both = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        both.append([line["loss"] for line in trial(tmp_path / name)])
    assert both[0] == both[1]
