"""Exit codes, text and JSON of `ds-compress doctor`, and its --apply."""

import json
import shutil
from pathlib import Path

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.doctor.rule import DoctorRule
from deepspeed_compress.tools.doctor.rules import RULES
from tests.support.processes import run_python
from tests.support.runs import trainer_run

PAGE, RUNS = Path(__file__).parents[3] / "docs/doctor.md", Path(__file__).parent / "runs"


def test_report_of_a_healthy_run_lists_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(RUNS / "healthy-default")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "No problems found." in out
    assert all(f"- {rule.summary}" in out for rule in RULES)


@pytest.mark.parametrize(("count", "text"), [(10, ": 10 measured steps, "), (1, ": 1 measured step, the last one ")])
def test_the_report_of_a_short_run_lists_the_omitted_checks(
    count: int, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = (RUNS / "healthy-default" / "compression.jsonl").read_text(encoding="utf-8").splitlines()
    (tmp_path / "compression.jsonl").write_text("\n".join(lines[:count]), encoding="utf-8")
    main(["doctor", str(tmp_path)])
    out = " ".join(capsys.readouterr().out.split())
    assert text in out
    assert "Not checked, because data is missing or there are fewer than 16 measured steps:" in out


def test_report_explains_a_finding(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(RUNS / "excluded")]) == 1
    out = " ".join(capsys.readouterr().out.split())
    for words in (
        "1. nothing-compressed (serious)",
        "- of these, uncompressed: ",
        "Remedy: Remove gradients.min_numel",
        '"min_numel": null',
        "docs/doctor.md#nothing-compressed",
    ):
        assert words in out


def test_findings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(RUNS / "costly-method"), "--baseline", str(RUNS / "dense"), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["baseline"] == str(RUNS / "dense")
    [finding] = document["findings"]
    assert set(finding) == {"name", "severity", "symptom", "evidence", "steps", "remedy", "patch", "page"}
    assert finding["patch"] == {"deepspeed_compress": {"gradients": {"rank": None, "method": "blockwise", "bits": 8}}}
    assert {*document["checked"], *document["not_checked"]} == {rule.name for rule in RULES}


def test_apply_writes_a_valid_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """If two findings change the same settings, the patch of the more severe one is written."""
    file = tmp_path / "better.json"
    assert main(["doctor", str(RUNS / "half-dense"), "--apply", str(file)]) == 1
    written = json.loads(file.read_text())
    assert written["deepspeed_compress"]["gradients"] == {"method": "blockwise", "bits": 8}
    assert find_problems(written) == []
    err = capsys.readouterr().err
    assert f"{file}: written with changes for no-ratio" in err
    assert "left out, because they change the same settings: compression-bound" in err


def test_apply_does_not_overwrite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.json"
    file.write_text("mine")
    assert main(["doctor", str(RUNS / "excluded"), "--apply", str(file)]) == 2
    assert "exists already; write the name of a new file" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_apply_needs_config_if_the_run_recorded_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    older = shutil.copytree(RUNS / "excluded", tmp_path / "older")
    config = (older / "ds_config.json").rename(tmp_path / "config.json")
    new = str(tmp_path / "new.json")
    assert main(["doctor", str(older), "--apply", new]) == 2
    assert "pass it with --config FILE" in capsys.readouterr().err
    assert main(["doctor", str(older), "--config", str(config), "--apply", new]) == 1
    assert "min_numel" not in Path(new).read_text()


def test_unreadable_directories_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "holds no compression.jsonl with measured steps; set monitor.path" in capsys.readouterr().err
    assert main(["doctor", str(RUNS / "excluded"), "--baseline", str(tmp_path / "none")]) == 2


def test_a_plain_trainer_run_is_a_baseline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It has losses but no statistics. `report` takes it, too."""
    baseline = trainer_run(tmp_path / "plain")
    run = shutil.copytree(RUNS / "healthy-default", tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    (run / "trainer_state.json").write_text(json.dumps({"log_history": [{"step": 20, "eval_loss": 13.0}]}))
    assert main(["doctor", str(run), "--baseline", str(baseline), "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    [finding] = document["findings"]
    assert finding["name"] == "compression-too-strong"
    assert finding["evidence"]["loss above baseline"] == "100.00%"


def test_a_baseline_without_figures_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(RUNS / "excluded"), "--baseline", str(tmp_path)]) == 2
    assert "--baseline: holds neither losses nor times of steps" in capsys.readouterr().err


def test_doctor_imports_no_torch() -> None:
    program = (
        "import sys; from deepspeed_compress.cli import main\n"
        f"code = main(['doctor', {str(RUNS / 'excluded')!r}])\n"
        "assert not {'torch', 'deepspeed', 'transformers'} & set(sys.modules), 'heavy'\n"
        "sys.exit(code)"
    )
    assert run_python("-c", program).returncode == 1


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_page_explains_every_finding(rule: DoctorRule) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert f"\n### {rule.name}\n" in text
    assert f"| [`{rule.name}`](#{rule.name}) |" in text


def test_the_report_is_printed_at_a_width_of_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """COLUMNS is 0 in some terminals that do not know their width."""
    monkeypatch.setenv("COLUMNS", "0")
    assert main(["doctor", str(RUNS / "healthy-default")]) == 0
    assert "No problems found." in capsys.readouterr().out


def test_apply_without_a_patch_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(RUNS / "sleeping-rank"), "--apply", str(tmp_path / "new.json")]) == 1
    assert "not written, because no setting remedies these findings" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_apply_warns_of_missing_secrets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = shutil.copytree(RUNS / "excluded", tmp_path / "run")
    config = json.loads((run / "ds_config.json").read_text())
    (run / "ds_config.json").write_text(json.dumps({**config, "comet": {"api_key": "***"}}))
    assert main(["doctor", str(run), "--apply", str(tmp_path / "new.json")]) == 1
    assert 'replace "***" by your secrets' in capsys.readouterr().err


@pytest.mark.parametrize(("name", "is_predicted"), [("dense-weights", True), ("half-dense", False)])
def test_remedies_name_the_command_that_predicts_them(
    name: str, is_predicted: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the run's own configuration, unless it has settings that are not predicted, such as topk."""
    assert main(["doctor", str(RUNS / name), "--json"]) == 1
    remedy = json.loads(capsys.readouterr().out)["findings"][0]["remedy"]
    command = f"ds-compress plan cluster --model MODEL --config {RUNS / name / 'ds_config.json'}"
    assert (command in remedy) == is_predicted
    given = ["--config", str(RUNS / name / "ds_config.json"), "--gpus", "16xA100", "--network", "10gbit"]
    assert main(["plan", "cluster", "--model", "1B", *given]) == int(not is_predicted)
