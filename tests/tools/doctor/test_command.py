"""Exit codes, text and JSON of `ds-compress doctor`."""

import json
import shutil
from pathlib import Path

import pytest

from deepspeed_compress.cli import main
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
