"""`ds-compress run`: the command for each launcher, and unmodified scripts that it starts."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress import ConfigError, cli
from deepspeed_compress.config import SECTION
from deepspeed_compress.integrations import run as runner
from deepspeed_compress.integrations.launch import LAUNCHERS, find_configurations, find_program, launch_command
from tests.integrations.trainers import AUTO, INT4
from tests.support.forks import run_forks
from tests.support.messages import caught_warnings
from tests.support.model_configs import DROPPING_GPT2
from tests.support.processes import run_command

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SCRIPT = str(HERE / "script.py")
EXAMPLE = str(ROOT / "launch" / "run_trainer.py")
RUNNER = "--module deepspeed_compress.integrations.run"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty `train.py` in the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return tmp_path / "train.py"


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Commands that would have replaced this process."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, command: commands.append(command))
    return commands


@pytest.mark.parametrize(
    ("launcher", "given", "command"),
    [
        (
            "deepspeed",
            "--num_gpus 2 --include localhost:0,1 train.py --deepspeed ds.json --num_gpus 3",
            f"-m deepspeed.launcher.runner --num_gpus 2 --include localhost:0,1 {RUNNER} "
            "train.py --deepspeed ds.json --num_gpus 3",
        ),
        ("deepspeed", "--module pkg.train -m x", f"-m deepspeed.launcher.runner {RUNNER} -m pkg.train -m x"),
        ("deepspeed", "--no_local_rank train.py", f"-m deepspeed.launcher.runner --no_local_rank {RUNNER} train.py"),
        (
            "torchrun",
            "--nproc_per_node=2 -m pkg.train -- 'a b'",
            f"-m torch.distributed.run --nproc_per_node=2 {RUNNER} -m pkg.train -- 'a b'",
        ),
        (
            "accelerate",
            "--use_deepspeed --deepspeed_config_file ds.json train.py --deepspeed",
            "-m accelerate.commands.launch --use_deepspeed --deepspeed_config_file ds.json "
            f"{RUNNER} train.py --deepspeed",
        ),
        ("none", "train.py --launcher x", "-m deepspeed_compress.integrations.run train.py --launcher x"),
        ("none", "-m pkg.train", "-m deepspeed_compress.integrations.run -m pkg.train"),
    ],
)
@pytest.mark.usefixtures("script")
def test_all_arguments_are_passed_on(launcher: str, given: str, command: str, started: list[list[str]]) -> None:
    chosen = [] if launcher == "deepspeed" else ["--launcher", launcher]
    for own in (chosen, [f"--launcher={launcher}"]):
        cli.main(["run", *own, *shlex.split(given)])
    assert started == [[sys.executable, *shlex.split(command)]] * 2


def test_no_python_is_refused() -> None:
    with pytest.raises(ConfigError, match="--no_python"):
        launch_command("deepspeed", ["--no_python", "train.sh"])


def run_here(rank: int, script: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """Run a script in this process; return the lines that it has written, and our warnings."""
    with caught_warnings() as texts:
        runner.main([*arguments[:1], script, *arguments[1:]])
    return Path(f"{script}.out").read_text().splitlines(), texts


@pytest.mark.parametrize(("ranks", "flag", "warnings"), [(1, "--flag", [1]), (2, "--flag", [1, 0]), (1, "--help", [0])])
def test_a_program_that_compresses_nothing_warns_once(
    ranks: int, flag: str, warnings: list[int], tmp_path: Path
) -> None:
    script = tmp_path / "plain.py"
    script.write_text(
        "import pathlib, sys\n"
        "pathlib.Path(__file__ + '.out').write_text('\\n'.join([__name__, *sys.argv[1:]]))\n"
        "sys.exit(0)\n"
    )
    found = run_forks(ranks, run_here, str(script), ["--local_rank=3", "a b", flag])
    for (lines, warned), count in zip(found, warnings, strict=True):
        assert lines == ["__main__", "--local_rank=3", "a b", flag]
        assert [text.partition(":")[0] for text in warned] == ["nothing was compressed"] * count


TRAINS_UNCOMPRESSED = """
import pathlib, sys, deepspeed, torch
pathlib.Path(__file__ + ".out").write_text("")
model = torch.nn.Linear(4, 4)
deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=sys.argv[-1])
"""


def test_a_file_without_the_section_is_reported_before_the_start_only(tmp_path: Path) -> None:
    script, file = tmp_path / "uncompressed.py", tmp_path / "ds.json"
    script.write_text(TRAINS_UNCOMPRESSED)
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    file.write_text(json.dumps({"train_batch_size": 1, "optimizer": optimizer}))
    [(_, warned)] = run_forks(1, run_here, str(script), ["--local_rank=0", "--deepspeed", str(file)])
    assert not warned


CALLS_INITIALIZE = """
import pathlib, torch, deepspeed_compress
pathlib.Path(__file__ + ".out").write_text("")
model = torch.nn.Linear(4, 4)
optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
config = {"train_batch_size": 1, "optimizer": optimizer, "deepspeed_compress": {}}
deepspeed_compress.initialize(model=model, model_parameters=list(model.parameters()), config=config)
"""


@pytest.mark.parametrize(
    ("content", "options", "text"),
    [
        ({"compress": {}}, "--deepspeed {}", 'found "compress" instead'),
        ({"train_batch_size": 1}, "--deepspeed_config_file {}", "the section is missing."),
        ({SECTION: {}}, "--deepspeed {}", ""),
        ({"train_batch_size": 1}, "--other {}", ""),
    ],
)
@pytest.mark.usefixtures("script", "started")
def test_a_file_without_the_section_warns_before_the_start(
    content: Any, options: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(content))
    cli.main(["run", "train.py", *options.format(file).split()])
    stderr = capsys.readouterr().err
    assert text in stderr
    assert (f"warning: {file}: nothing will be compressed" in stderr) is bool(text)


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"deepspeed_compres": {}}, 'found "deepspeed_compres" instead'),
        ({"zero_optimization": {SECTION: {}}}, f'found "zero_optimization/{SECTION}" instead'),
    ],
)
def test_a_misspelled_section_is_refused(
    content: Any, text: str, tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """A misspelled section would train uncompressed, which needs --allow-uncompressed."""
    (tmp_path / "ds.json").write_text(json.dumps(content))
    rest = ["train.py", "--deepspeed_config=ds.json"]
    assert cli.main(["run", *rest]) == 1
    stderr = capsys.readouterr().err
    assert text in stderr
    assert stderr.count("\n") == 1
    assert not started
    cli.main(["run", "--allow-uncompressed", *rest])
    assert text in capsys.readouterr().err
    assert started


@pytest.mark.usefixtures("script")
@pytest.mark.parametrize("own", [[], ["--restarts", "3", "--ranks", "2"]])
def test_an_invalid_section_is_one_line_before_anything_starts(
    own: list[str],
    tmp_path: Path,
    started: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({SECTION: {"gradients": {"bit": 4}}}))
    monkeypatch.setattr("deepspeed_compress.tools.run._run_agent", started.append)
    assert cli.main(["run", *own, "train.py", "--deepspeed", "ds.json"]) == 1
    assert not started
    stderr = capsys.readouterr().err
    assert f"ds.json: /{SECTION}/gradients/bit: unknown key" in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "none"])
def test_a_missing_script_file_is_reported_before_anything_starts(
    launcher: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["run", "--launcher", launcher, "nowhere/train.py", "--flag"]) == 1
    assert capsys.readouterr().err.startswith("ds-compress: error: nowhere/train.py: no such file")
    assert not started


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Program that a shell finds, in a directory other than the working directory."""
    command = tmp_path / "bin" / "trainer-cli"
    command.parent.mkdir()
    command.write_text("#!/usr/bin/env python\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(command.parent))
    monkeypatch.chdir(tmp_path)
    return command


def test_a_launcher_needs_the_path_of_a_program(program: Path) -> None:
    with pytest.raises(ConfigError, match=f"trainer-cli: no such file; write {program}"):
        launch_command("torchrun", ["trainer-cli", "train"])


@pytest.mark.parametrize("given", ["trainer-cli", "{}", "--launcher none trainer-cli", "--launcher=none {}"])
def test_a_program_starts_its_ranks_itself(given: str, program: Path, started: list[list[str]]) -> None:
    cli.main(["run", *given.format(program).split(), "train", "x.yaml", "--launcher", "x"])
    rest = f"--program {program} train x.yaml --launcher x"
    assert started == [[sys.executable, *f"-m deepspeed_compress.integrations.run {rest}".split()]]


@pytest.mark.parametrize(
    ("given", "launcher"),
    [
        ("deepspeed --num_gpus 2 train.py", "deepspeed"),
        ("torchrun --nproc_per_node 2 train.py", "torchrun"),
        ("accelerate launch --num_processes 2 train.py", "accelerate"),
    ],
)
@pytest.mark.usefixtures("script")
def test_a_launcher_may_be_written_as_usual(given: str, launcher: str, started: list[list[str]]) -> None:
    cli.main(["run", *given.split()])
    rest = given.removeprefix("accelerate launch").removeprefix(launcher).split()
    assert started == [launch_command(launcher, rest)]


def test_a_script_is_not_a_program(program: Path) -> None:
    assert find_program(["trainer-cli"]) == str(program)
    assert find_program(["--flag", "trainer-cli"]) is None
    assert find_program(["other-cli"]) is None
    assert find_program([]) is None
    (program.parent / "train.py").touch(0o755)
    assert find_program(["train.py"]) is None
    Path("trainer-cli").touch()
    assert find_program(["trainer-cli"]) is None


@pytest.mark.usefixtures("program")
def test_a_program_is_not_restarted(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--restarts", "3", "--ranks", "2", "trainer-cli", "train"]) == 1
    assert "--restarts: trainer-cli starts its ranks itself" in capsys.readouterr().err


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("model: toy\ndeepspeed: ds.json\n", "x.yaml"),
        ("deepspeed: ds.json\n", "--config x.yaml"),
        ("deepspeed: ds.json\n", "--config=x.yaml"),
        ("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: ds.json\n", "--config_file x.yaml"),
        ("accelerate_config: y.yaml\n", "--config x.yaml"),
        ("deepspeed: other.json\n", "x.yaml deepspeed=ds.json"),
        ("model: toy\n", "x.yaml --deepspeed ds.json"),
    ],
)
def test_the_section_that_a_yaml_file_names_is_checked_before_the_start(
    text: str, arguments: str, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("x.yaml").write_text(text)
    Path("y.yaml").write_text("deepspeed_config: {deepspeed_config_file: ds.json}\n")
    Path("ds.json").write_text(json.dumps({SECTION: {"gradients": {"bit": 4}}}))
    assert cli.main(["run", "trainer-cli", "train", *arguments.split()]) == 1
    assert not started
    stderr = capsys.readouterr().err
    assert f"ds.json: /{SECTION}/gradients/bit: unknown key" in stderr
    assert stderr.count("\n") == 1


NOTHING = ("- deepspeed", "deepspeed: [", "deepspeed: {a: 1}", "deepspeed_config: 1", "deepspeed: no", "")


@pytest.mark.parametrize("text", NOTHING)
def test_other_yaml_files_are_left_to_the_program(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yml"
    file.write_text(text)
    assert list(find_configurations([str(file)])) == []
    file.write_text(f"accelerate_config: {file}")
    assert list(find_configurations([str(file), str(tmp_path / "missing.yaml")])) == []


@pytest.mark.parametrize("arguments", ["--deepspeed zero3", "--deepspeed=zero3", "x.yaml"])
@pytest.mark.usefixtures("program", "started")
def test_a_configuration_that_a_framework_ships_is_reported(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.yaml").write_text("deepspeed: zero3\n")
    cli.main(["run", "trainer-cli", "sft", *arguments.split()])
    assert "zero3: nothing will be compressed: the framework's own configuration" in capsys.readouterr().err


def test_hosts_of_a_hostfile_may_have_a_script_that_is_missing_here(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-1 slots=4\n")
    command = launch_command("deepspeed", ["--hostfile", str(tmp_path / "hostfile"), "nowhere/train.py"])
    assert command[-1] == "nowhere/train.py"


@pytest.mark.usefixtures("script")
def test_unreadable_configurations_are_left_to_the_program(
    tmp_path: Path, started: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.json").write_text("{")
    cli.main(["run", "train.py", "--deepspeed", str(tmp_path / "broken.json"), "--deepspeed", "missing.json"])
    assert started
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("environment", "launched"),
    [
        ({}, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "MASTER_ADDR": "here"}, False),
        ({"SLURM_STEP_NUM_TASKS": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"RANK": "0"}, True),
    ],
)
def test_a_process_without_a_launcher_becomes_the_only_rank(environment: dict[str, str], launched: bool) -> None:
    """Variables that are set stay."""
    found = dict(environment)
    runner._become_single_rank(found)
    if launched:
        assert found == environment
    else:
        assert int(found.pop("MASTER_PORT")) > 0
        single = {"MASTER_ADDR": "127.0.0.1", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        assert found == {**single, **environment}


@pytest.mark.slow
def test_one_process_needs_neither_launcher_nor_mpi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without these variables, DeepSpeed would ask mpi4py for the rank."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    script = tmp_path / "ours.py"
    script.write_text("import deepspeed\ndeepspeed.init_distributed()\n" + CALLS_INITIALIZE)
    done = start("none", str(script))
    assert done.returncode == 0, done.stderr[-3000:]


def start(launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    environment = {**os.environ, **settings, "PYTHONPATH": str(ROOT)}
    return run_command("run", "--launcher", launcher, *arguments, env=environment)


def result(started: subprocess.CompletedProcess[str], directory: Path) -> dict[str, Any]:
    """Return the report that `script.py` has written."""
    assert started.returncode == 0, started.stderr[-3000:]
    found: dict[str, Any] = json.loads((directory / "report.json").read_text())
    return found


def config_file(directory: Path, section: object = INT4) -> str:
    path = directory / "ds_config.json"
    path.write_text(json.dumps({**AUTO, "zero_optimization": {"stage": 2}, SECTION: section}))
    return str(path)


LAUNCHES = {
    "deepspeed": "--num_gpus 2 --master_port",
    "torchrun": "--nproc_per_node 2 --master_port",
    "accelerate": "--num_machines 1 --num_processes 2 --mixed_precision no --dynamo_backend no --use_deepspeed "
    "--main_process_port",
}


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHES)
def test_an_unmodified_script_is_compressed(launcher: str, port: str, tmp_path: Path) -> None:
    options = [*LAUNCHES[launcher].split(), port]
    done = start(launcher, *options, SCRIPT, str(tmp_path), "--deepspeed", config_file(tmp_path))
    found = result(done, tmp_path)
    assert (found["name"], found["ranks"], found["engine"]) == ("__main__", 2, "DeepSpeedEngine")
    injected = ["--local_rank=0"] if launcher == "deepspeed" else []
    assert found["argv"] == [SCRIPT, *injected, str(tmp_path), "--deepspeed", str(tmp_path / "ds_config.json")]
    ratios = [entry["compression_ratio"] for entry in found["logs"] if "loss" in entry]
    assert len(ratios) == 2
    assert min(ratios) > 15
    assert "nothing was compressed" not in done.stderr


@pytest.mark.slow
def test_trainer_refuses_to_train_if_accelerate_ignores_deepspeed(
    port: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With this variable, Accelerate uses DDP, and the section would silently have no effect."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    options = ["--nproc_per_node", "1", "--master_port", port]
    done = start("torchrun", *options, SCRIPT, str(tmp_path), "--deepspeed", config_file(tmp_path))
    assert done.returncode == 1
    assert "does not train a DeepSpeed engine" in done.stderr


@pytest.mark.slow
def test_a_configuration_passed_to_accelerate_launch_is_compressed(port: str, tmp_path: Path) -> None:
    """Only `accelerate launch` gets the configuration; the script does not mention DeepSpeed."""
    options = [*LAUNCHES["accelerate"].split(), port, "--deepspeed_config_file", config_file(tmp_path)]
    done = start("accelerate", *options, SCRIPT, str(tmp_path))
    found = result(done, tmp_path)
    assert (found["ranks"], found["engine"]) == (2, "DeepSpeedEngine")
    assert len([entry for entry in found["logs"] if entry.get("compression_ratio", 0) > 15]) == 2


@pytest.mark.slow
def test_the_trainer_example_trains_saves_and_resumes(port: str, tmp_path: Path) -> None:
    """The documented command trains on a short text, and the same command resumes it."""
    (tmp_path / "text.txt").write_text("the king said nothing, for who would answer him?\n" * 600)
    (tmp_path / "model.json").write_text(json.dumps(DROPPING_GPT2))
    output = tmp_path / "run"
    common = [
        f"--deepspeed={ROOT}/configs/huggingface/zero2_int4.json --model={tmp_path}/model.json --output_dir={output}",
        f"--train_files={tmp_path}/text.txt --block_size=16 --learning_rate=1e-2 --lr_scheduler_type=constant",
        "--logging_steps=10 --save_steps=10 --do_eval --use_cpu --disable_tqdm=true",
    ]
    for steps in ("10", "20"):
        done = start(
            "torchrun",
            *LAUNCHES["torchrun"].split(),
            port,
            EXAMPLE,
            *" ".join(common).split(),
            f"--max_steps={steps}",
        )
        assert done.returncode == 0, done.stderr[-3000:]
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    logs = [entry for entry in history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [10, 20]
    assert min(entry["compression_ratio"] for entry in logs) > 15
    assert logs[1]["loss"] < logs[0]["loss"]
    assert json.loads((output / "eval_results.json").read_text())["perplexity"] < 300
    assert (output / "model.safetensors").is_file()


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_missing_script_argument_is_a_usage_error(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["run", "--launcher", launcher])
    assert stop.value.code == 2
    assert "script" in capsys.readouterr().err.lower()


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps({"deepspeed": str(file)}))
    assert list(find_configurations([str(file)])) == [file]
    file.write_text(json.dumps({"deepspeed": str(file), "rows": "x" * 2**16}))
    assert list(find_configurations([str(file)])) == []
