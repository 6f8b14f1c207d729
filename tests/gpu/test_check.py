"""The command: its options, packages from wheels, parts that crash, and a whole run without a GPU."""

import json
import os
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
import torch

from tests.gpu import check
from tests.gpu.check import PARTS, ROOT, Part, limits, main, run_part
from tests.gpu.findings import Finding, print_table
from tests.gpu.wheels import COMMANDS, install_wheels
from tests.support.processes import wait_until_gone
from tests.support.transport import until

SOURCE = """
import os, subprocess, sys, time
import pytest

@pytest.mark.gpu
def test_first(record_property):
    record_property("figure", 1)
    record_property("goal", "2")

{tests}

def test_without_a_gpu():
    raise AssertionError
"""


def test_every_part_has_a_file_and_every_file_a_part() -> None:
    marked = {file.stem for file in Path(__file__).parent.glob("test_*.py") if "mark.gpu" in file.read_text()}
    assert {f"test_{part.name}" for part in PARTS} == marked - {Path(__file__).stem}


def test_all_parts_together_use_the_whole_time() -> None:
    whole = limits(PARTS, 8)
    assert whole[PARTS[-1].name] == pytest.approx(480)
    assert list(whole.values()) == sorted(whole.values())
    assert limits(PARTS[1:2], 8)["kernel_speed"] == pytest.approx(whole["kernel_speed"] - whole["kernels"])


@pytest.mark.parametrize(("verdicts", "code"), [(["pass", "missed", "not run"], 0), (["pass", "fail"], 1)])
def test_the_exit_status_is_that_of_failures(
    verdicts: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(
        check, "run_part", lambda part, *_: [Finding(verdict, verdict, part=part.name) for verdict in verdicts]
    )  # type: ignore[arg-type]
    output = tmp_path / "results" / "found.json"
    assert main(["--device", "cpu", "--parts", "loss", "--output", str(output)]) == code
    written = json.loads(output.read_text())
    assert [one["verdict"] for one in written["findings"]] == verdicts
    assert written["environment"]["torch"] == torch.__version__


def test_a_second_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts that ended are not run again, unless asked for, or unless their code or the machine has changed."""
    ran: list[str] = []

    def run(part: Part, *_: object) -> list[Finding]:
        ran.append(part.name)
        what = "the part itself" if part.name == "steps" and ran.count("steps") == 1 else "first"
        return [Finding(what, "fail" if what != "first" else "pass", part=part.name)]

    monkeypatch.setattr(check, "run_part", run)
    base = ["--device", "cpu", "--output", str(tmp_path / "found.json")]
    command = [*base, "--parts", "kernels,steps"]
    assert main(command) == 1
    assert main(command) == 0
    assert ran == ["kernels", "steps", "steps"]
    assert "kernels: already in" in capsys.readouterr().out
    assert main([*base, "--parts", "loss"]) == main([*command, "--again"]) == 0
    assert ran[3:] == ["loss", "kernels", "steps"]
    written = json.loads((tmp_path / "found.json").read_text())
    assert {one["part"] for one in written["findings"]} == {"kernels", "steps", "loss"}
    written["code"]["kernels"] = "other code"
    (tmp_path / "found.json").write_text(json.dumps(written))
    assert main(command) == 0
    monkeypatch.setattr(check, "_device_name", lambda _: "another device")
    assert main(command) == 0
    assert ran[6:] == ["kernels", "kernels", "steps"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_an_error_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path / "found.json")]) == 1
    assert "torch finds no GPU here; write --device cpu" in capsys.readouterr().err


def run(tmp_path: Path, *then: str) -> list[Finding]:
    """Return the findings of a part whose further tests do what is in `then`."""
    tests = [f"@pytest.mark.gpu\ndef test_odd_{number}():\n    {one}\n" for number, one in enumerate(then)]
    (tmp_path / "test_odd.py").write_text(SOURCE.format(tests="\n".join(tests)))
    environment = {"PYTHONPATH": str(ROOT)}
    first, *others = run_part(Part("odd", "", 1.0, tmp_path), time.time() + 600, environment=environment)
    assert first == Finding("first", "pass", "1", "2", part="odd")
    return others


OUTCOMES = (
    ("pass", "pass", ""),
    ("pytest.skip('needs CUDA')", "not run", "needs CUDA"),
    ("pytest.xfail('40% of copy')", "missed", "40% of copy"),
    ("raise ValueError('a wrong turn')", "fail", "ValueError: a wrong turn"),
    ("pytest.fail('a rank ended')", "fail", "a rank ended"),
)


def test_outcomes_are_verdicts(tmp_path: Path) -> None:
    findings = run(tmp_path, *(then for then, *_ in OUTCOMES))
    assert [(finding.verdict, finding.why) for finding in findings] == [(verdict, why) for _, verdict, why in OUTCOMES]
    assert [(finding.what, finding.part) for finding in findings] == [
        (f"odd {number}", "odd") for number in range(len(OUTCOMES))
    ]


@pytest.mark.parametrize(
    ("then", "message"), [("os.kill(os.getpid(), 11)", "crashed by SIGSEGV"), ("os._exit(3)", "status 3")]
)
def test_a_crash_is_a_finding(tmp_path: Path, then: str, message: str) -> None:
    [crash] = run(tmp_path, then)
    assert (crash.what, crash.verdict, crash.part) == ("the part itself", "fail", "odd")
    assert re.search(message, crash.why, re.DOTALL)


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its time is up once it has started a process."""
    file, wait = tmp_path / "child", check._wait

    def wait_for_child(process: "subprocess.Popen[bytes]", seconds: float) -> str:
        until(lambda: file.is_file() and file.read_text() != "")
        return wait(process, 0.0)

    monkeypatch.setattr(check, "_wait", wait_for_child)
    (tmp_path / "child.py").write_text(
        f"import os, time\nopen({str(file)!r}, 'w').write(str(os.getpid()))\ntime.sleep(99)\n"
    )
    child = f"[sys.executable, {str(tmp_path / 'child.py')!r}]"
    [hanging] = run(tmp_path, f"subprocess.Popen({child}); time.sleep(99)")
    assert hanging.verdict == "fail"
    assert hanging.why.startswith("ended at its limit of 0 s")
    wait_until_gone(int(file.read_text()))


def test_equal_verdicts_are_one_row_but_failures_never(capsys: pytest.CaptureFixture[str]) -> None:
    several = [Finding(f"row {number}", "pass", part="kernels") for number in range(40)]
    print_table("", [*several, *(Finding(f"bad[red] {number}", "fail", part="kernels") for number in range(40))])
    shown = capsys.readouterr().out
    assert "40 from row 0 to row 39" in shown
    assert "row 7" not in shown
    assert shown.count("fail") == shown.count("bad[red]") == 40


def test_the_page_names_the_same_wheels() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "\n".join(COMMANDS).format("wheels") in page


def test_wheels_are_installed_without_dependencies(tmp_path: Path) -> None:
    info = "odd_package-1.0.dist-info"
    with zipfile.ZipFile(tmp_path / "odd_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("odd_package.py", "here = True\n")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: odd_package\nVersion: 1.0\nRequires-Dist: nothing-such\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    target = tmp_path / "target"
    install_wheels(tmp_path, target)
    assert (target / "odd_package.py").is_file()


def test_comparing_needs_only_torch_triton_and_pytest() -> None:
    """Comparing and measuring load neither DeepSpeed nor the packages that read the section."""
    names = ("check", "test_kernels", "test_kernel_speed", "test_sanitizer", "test_synchronisation")
    modules = ", ".join(f"tests.gpu.{name}" for name in names)
    kernels = "deepspeed_compress.compression.kernels.gpu"
    program = f"import sys, tests.conftest, {modules}, {kernels}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = set(done.stdout.split())
    assert not {"deepspeed", "pydantic", "hjson", "transformers", "hypothesis"} & loaded


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(3600)
def test_a_whole_run_without_a_gpu(tmp_path: Path) -> None:
    script = [str(ROOT / "launch" / "gpu_check.sh"), "--device", "cpu", "--output", str(tmp_path / "found.json")]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(
        ["bash", *script], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=3500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "found.json").read_text())
    assert {one["part"] for one in written["findings"]} == {part.name for part in PARTS}
    assert written["verdicts"]["fail"] == 0
