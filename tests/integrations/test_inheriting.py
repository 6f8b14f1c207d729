"""Processes that a program under `ds-compress run` starts compress as the program does, and others are left alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_compress.integrations.install import _DIRECTORY, INHERIT
from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
HOOKED = "import sys; print(sum(type(one).__module__.startswith('deepspeed_compress') for one in sys.meta_path) > 0)"
WAYS = {
    "subprocess": "import subprocess, sys; subprocess.run([sys.executable, CHILD], check=True)",
    "execv": "import os, sys; os.execv(sys.executable, [sys.executable, CHILD])",
    "spawn": "import multiprocessing, runpy\n"
    "if __name__ == '__main__':\n"
    "    process = multiprocessing.get_context('spawn').Process(target=runpy.run_path, args=(CHILD,))\n"
    "    process.start()\n"
    "    process.join()\n",
}


def start(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    base = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", INHERIT)}
    settings = {**base, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", **environment}
    return run_python(*arguments, env=settings)


def run_program(program: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return start("-m", "deepspeed_compress.integrations.run", str(program), *arguments, **environment)


def write(directory: Path, parent: str, child: str) -> Path:
    (directory / "child.py").write_text(child)
    (directory / "parent.py").write_text(parent.replace("CHILD", repr(str(directory / "child.py"))))
    return directory / "parent.py"


@pytest.mark.parametrize("way", WAYS)
def test_processes_that_a_program_starts_are_followed(way: str, tmp_path: Path) -> None:
    program = write(tmp_path, WAYS[way], HOOKED)
    assert run_program(program).stdout == "True\n"
    assert start(str(program)).stdout == "False\n"


def run_command(*command: str) -> subprocess.CompletedProcess[str]:
    return start("-m", "deepspeed_compress.integrations.run", "--program", *command)


def test_python_processes_of_a_program_are_followed(tmp_path: Path) -> None:
    child = write(tmp_path, WAYS["subprocess"], HOOKED)
    assert run_command("/bin/sh", "-c", f"{sys.executable} {child}").stdout == "True\n"
    # Programs make their ranks themselves, so they are not declared the only rank.
    assert run_command("/bin/sh", "-c", "echo $RANK$WORLD_SIZE").stdout == "\n"


@pytest.mark.parametrize(("end", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("kill -15 $PPID; sleep 60", 143)])
def test_exit_codes_and_signals_are_passed_on(end: str, code: int) -> None:
    # The shell has to be the process that sleeps, because it gets the signal.
    done = run_command("/bin/sh", "-c", end.replace("sleep", "exec sleep"))
    assert done.returncode == code, done.stderr


SLOW_START = """
import subprocess, time
from deepspeed_compress.integrations import run

class Slow(subprocess.Popen):
    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        time.sleep(1)

subprocess.Popen = Slow
run.main(["--program", "/bin/sh", "-c", "trap 'exit 7' TERM; kill -15 $PPID; for i in 1 2 3 4 5 6; do sleep 1; done"])
"""


def test_a_signal_that_comes_while_a_program_starts_is_passed_on() -> None:
    done = start("-c", SLOW_START)
    assert done.returncode == 7, done.stderr


def test_the_path_alone_changes_nothing_and_another_sitecustomize_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.customized = 1\n")
    path = os.pathsep.join([_DIRECTORY, str(tmp_path), str(ROOT)])
    show = f"{HOOKED}; print(customized, 'deepspeed_compress' in sys.modules, sys.modules['sitecustomize'].__file__)"
    found = start("-c", show, PYTHONPATH=path)
    assert found.stdout == f"False\n1 False {tmp_path / 'sitecustomize.py'}\n"
    assert start("-c", show, PYTHONPATH=path, **{INHERIT: ""}).stdout.startswith("True\n1 True")


def test_a_section_is_inherited_except_by_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = tmp_path / "section.json"
    section.write_text('{"gradients": {"bits": 4}}')
    program = write(tmp_path, WAYS["subprocess"], f"import os; print(os.environ[{INHERIT!r}])")
    done = start("-m", "deepspeed_compress.integrations.run", f"--section={section}", str(program))
    assert done.stdout == f"{section}\n", done.stderr
    program = write(tmp_path, "import os, sys; os.execv(sys.executable, [sys.executable, '-c', CHILD])", "")
    monkeypatch.setenv(INHERIT, str(section))
    seen: list[bool] = []
    monkeypatch.setattr(os, "execv", lambda program, command: seen.append(INHERIT in os.environ))
    from deepspeed_compress import cli

    cli.main(["run", "--launcher", "none", str(program)])
    assert seen == [False]


TRAINS = """
import sys, torch, deepspeed
model = torch.nn.Linear(4, 4)
optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
config = {"train_batch_size": 1, "optimizer": optimizer, "deepspeed_compress": {}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
print(hasattr(engine, "compression"))
"""


@pytest.mark.slow
def test_what_only_started_processes_compress_is_compressed(tmp_path: Path) -> None:
    done = run_program(write(tmp_path, WAYS["subprocess"], TRAINS))
    assert "True" in done.stdout.splitlines(), done.stderr[-3000:]
    assert "nothing was compressed" not in done.stderr
    done = run_program(write(tmp_path, WAYS["subprocess"], "print('only this')"))
    assert "nothing was compressed" in done.stderr


def test_a_program_that_imports_accelerate_first_can_do_so() -> None:
    """The check is installed while Accelerate's modules import each other."""
    done = start("-c", "import deepspeed_compress; deepspeed_compress.install(); import accelerate")
    assert done.returncode == 0, done.stderr
