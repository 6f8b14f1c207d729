"""The command line, packages from wheels, and a whole run without a GPU."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from deepspeed_compress.errors import CompressError
from deepspeed_compress.tools.gpu_check import command
from deepspeed_compress.tools.gpu_check.findings import Finding
from deepspeed_compress.tools.gpu_check.options import parse
from deepspeed_compress.tools.gpu_check.parts import PARTS
from deepspeed_compress.tools.gpu_check.wheels import COMMANDS, install_wheels

ROOT = Path(__file__).parents[3]
NAMES = {part.name: part.summary for part in PARTS}


def test_parts_come_in_their_order() -> None:
    assert parse(NAMES, ["--parts", "speed,kernels"]).parts == ["kernels", "speed"]
    assert parse(NAMES, []).parts == list(NAMES)


@pytest.mark.parametrize("wrong", [["--parts", "speed,colour"], ["--minutes", "0"], ["--device", "tpu"]])
def test_wrong_usage(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(NAMES, wrong)
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


def test_help_has_examples_and_parts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(NAMES, ["--help"])
    shown = capsys.readouterr().out
    assert "bash launch/gpu_check.sh --parts kernels,speed" in shown
    assert all(part.summary in shown for part in PARTS)


@pytest.mark.parametrize(("verdicts", "code"), [(["pass", "missed", "not run"], 0), (["pass", "fail"], 1)])
def test_the_exit_status_is_that_of_failures(
    verdicts: list[str], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(command, "run_part", lambda part, *_: [Finding(one, one, part=part.name) for one in verdicts])  # type: ignore[arg-type]
    output = tmp_path / "results" / "found.json"
    assert command.main(["--device", "cpu", "--parts", "speed", "--output", str(output)]) == code
    written = json.loads(output.read_text())
    assert [one["verdict"] for one in written["findings"]] == verdicts
    assert written["environment"]["torch"] == torch.__version__


def test_no_gpu_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert command.main(["--output", str(tmp_path / "found.json")]) == 1
    assert "torch finds no GPU here; write --device cpu" in capsys.readouterr().err


def test_a_directory_without_wheels_says_how_to_fill_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--device", "cpu", "--wheels", str(tmp_path), "--output", str(tmp_path / "x.json")]) == 1
    assert f"--wheels {tmp_path}: holds no .whl file" in (said := capsys.readouterr().err)
    assert "pip wheel --no-deps -w" in said


def test_the_page_names_the_same_wheels() -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert "\n".join(COMMANDS).format("wheels") in page


def test_wheels_are_installed_without_what_they_require(tmp_path: Path) -> None:
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


def test_a_broken_wheel_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "broken-1.0-py3-none-any.whl").write_text("no archive")
    with pytest.raises(CompressError, match=r"--wheels .*broken"):
        install_wheels(tmp_path, tmp_path / "target")


def test_kernels_and_speed_need_torch_and_triton_alone() -> None:
    """Comparing and measuring load neither DeepSpeed nor what reads the section."""
    modules = ", ".join(
        f"deepspeed_compress.tools.gpu_check.{name}" for name in ("part", "kernels", "speed", "sanitizer")
    )
    program = f"import sys, {modules}; import deepspeed_compress.compression.kernels.gpu; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert not {"deepspeed", "pydantic", "hjson", "transformers"} & set(done.stdout.split())


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(600)
def test_a_whole_run_without_a_gpu(tmp_path: Path) -> None:
    script = [str(ROOT / "launch" / "gpu_check.sh"), "--device", "cpu", "--output", str(tmp_path / "found.json")]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run(["bash", *script], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=590)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "found.json").read_text())
    assert {one["part"] for one in written["findings"]} == {part.name for part in PARTS}
    assert written["verdicts"]["fail"] == 0
    assert (tmp_path / "gpu_check_trace.json.gz").is_file()
