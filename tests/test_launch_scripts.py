"""The scripts of launch/: help, the commands that they start, and real runs of two ranks on the CPU.

Where the real thing needs a cluster (pdsh, srun), a stand-in on the PATH starts the same command twice on this machine.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = ("single_node", "multi_node", "slurm", "torchrun")
CONFIG = "configs/zero2_int4.json"
TRAIN = f"launch/train_gpt.py --deepspeed_config {CONFIG} --data 'a text' --output-dir out"
NOTHING: Mapping[str, str] = {}
GIVEN = (CONFIG, "--data", "a text", "--output-dir", "out")
SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_JOB_NODELIST": "node-[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_SUBMIT_DIR": str(ROOT),
}
TOOLS = {
    "scontrol": "#!/bin/bash\nprintf '%s\\n' ${NODES_OF_JOB:-node-1 node-2}\n",
    "ssh": "#!/bin/bash\nexit 0\n",
    # Options, then the command. The last %n is the number of the node.
    "pdsh": """#!/bin/bash
while [[ "$1" == -* ]]; do [[ "$1" == -S ]] || shift; shift; done
for node in 0 1; do bash -c "${*//%n/$node}" & jobs+=($!); done
for job in "${jobs[@]}"; do wait "$job" || exit; done
""",
    "srun": """#!/bin/bash
while [[ "$1" == -* ]]; do shift; done
for node in 0 1; do "$@" & jobs+=($!); done
for job in "${jobs[@]}"; do wait "$job" || exit; done
""",
}
"""Stand-ins for programs of a cluster, by name, as far as the scripts use them."""


@pytest.fixture
def tools(tmp_path: Path) -> Path:
    directory = tmp_path / "tools"
    directory.mkdir()
    for name, text in TOOLS.items():
        (directory / name).write_text(text)
        (directory / name).chmod(0o755)
    return directory


def start(
    script: str, arguments: Sequence[str], settings: Mapping[str, str] = NOTHING, tools: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script from a directory outside the project, on the CPU, with `settings` in its environment."""
    cpu = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    path = [str(tools)] if tools else []
    path += [str(Path(sys.executable).parent), os.environ["PATH"]]
    return subprocess.run(
        [str(ROOT / "launch" / f"{script}.sh"), *arguments],
        env={**os.environ, **cpu, "PATH": ":".join(path), **settings},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("script", "settings", "command"),
    [
        ("single_node", {}, "deepspeed --num_gpus 2 --master_port 29500 {train}"),
        ("single_node", {"RANKS": "8", "MASTER_PORT": "5"}, "deepspeed --num_gpus 8 --master_port 5 {train}"),
        ("torchrun", {}, "torchrun --standalone --nproc_per_node 2 {train}"),
        (
            "torchrun",
            {"RANKS": "4", "NODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"},
            "torchrun --nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 --nproc_per_node 4 {train}",
        ),
        (
            "multi_node",
            {"HOSTFILE": "launch/hostfile.example"},
            "deepspeed --hostfile launch/hostfile.example --launcher pdsh --master_port 29500 {train}",
        ),
        (
            "multi_node",
            {"HOSTFILE": "launch/hostfile.example", "MASTER_ADDR": "10.0.0.1"},
            "deepspeed --hostfile launch/hostfile.example --launcher pdsh --master_addr 10.0.0.1 --master_port 29500 "
            "{train}",
        ),
        (
            "slurm",
            {**SLURM, "RANKS": "8", "SLURM_CPUS_PER_TASK": "16"},
            "srun --kill-on-bad-exit=1 --cpus-per-task 16 torchrun --nnodes 2 --nproc_per_node 8 --rdzv_id 70001 "
            "--rdzv_backend c10d --rdzv_endpoint node-1:30001 {train}",
        ),
        (
            "slurm",
            {**SLURM, "RANKS": "8", "RESTARTS": "10", "SPARES": "1"},
            "srun --kill-on-bad-exit=0 --no-kill ds-compress run --restarts 10 --ranks 8 --hosts 1 --spares 1 "
            "--rendezvous node-1:30001 {train}",
        ),
    ],
)
def test_a_dry_run_prints_the_command(script: str, settings: dict[str, str], command: str, tools: Path) -> None:
    process = start(script, GIVEN, {"DRY_RUN": "1", **settings}, tools)
    assert process.stderr == ""
    assert process.returncode == 0
    assert process.stdout.strip() == command.format(train=TRAIN.replace("'a text'", "a\\ text"))


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_lists_the_settings(script: str) -> None:
    process = start(script, ["--help"])
    assert process.returncode == 0
    assert "CONFIG   one of configs/" in process.stdout
    assert "DRY_RUN=1" in process.stdout
    assert "#" not in process.stdout.replace("#SBATCH", "")
    # Every configuration and model that an example names exists.
    files = [word.rstrip(":") for word in process.stdout.split() if word.startswith("configs/") and "." in word]
    assert [file for file in files if file != "configs/README.md" and not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [((), "give a configuration first"), (("--data", "x"), "give a"), (("no.json",), "no.json: no such configuration")],
)
def test_nothing_starts_without_a_configuration(script: str, arguments: tuple[str, ...], message: str) -> None:
    process = start(script, arguments)
    assert process.returncode == 2
    assert f"error: {message}" in process.stderr


@pytest.mark.parametrize(
    ("script", "settings", "message"),
    [
        ("torchrun", {"NODES": "2", "NODE_RANK": "0"}, "set NODE_RANK (0 on the first machine) and MASTER_ADDR"),
        ("multi_node", {"HOSTFILE": "/nowhere"}, "HOSTFILE /nowhere: no such file"),
        ("slurm", {"SLURM_JOB_ID": ""}, "this is not a Slurm job"),
    ],
)
def test_missing_arguments_are_reported(script: str, settings: dict[str, str], message: str) -> None:
    process = start(script, GIVEN, settings)
    assert process.returncode == 2
    assert message in process.stderr


STAND_IN = """#!/bin/bash
# Writes down how it is called, as what; a run ends at once, and there is a link where LINK says so.
echo "${0##*/} $*" >>calls
case "$*" in
    *"-- true") [[ "$LINK" == yes ]] || { echo "error: no tc here" >&2; exit 1; } ;;
    *train_gpt.py*)
        directory=$(sed 's/.*--output-dir \\([^ ]*\\).*/\\1/' <<<"$*")
        mkdir -p "$directory"
        printf '%s\\n' "[now] [INFO] noise" "4/10  loss 4" "5/10  loss 3"
        echo "{}" >"$directory/summary.json" ;;
    -c*) echo 29511 ;;
esac
"""
"""Stand-in for python, torchrun and ds-compress of a virtual environment."""
RUNS = ("uncompressed", "int4", "wan")


@dataclass(frozen=True)
class Checkout:
    """Checkout that contains only the quickstart, with stand-ins in its virtual environment."""

    root: Path

    def start(self, *arguments: str, link: bool) -> str:
        """Return the output of the quickstart."""
        command = ["bash", "launch/quickstart.sh", *arguments]
        # Do not use the virtual environment of the tests.
        kept = {name: value for name, value in os.environ.items() if name != "DS_COMPRESS_VENV"}
        environment = {**kept, "LINK": "yes" if link else "no"}
        process = subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout

    def calls(self, word: str) -> list[str]:
        """Return the commands with `word` in them, of all starts so far."""
        return [line for line in (self.root / "calls").read_text().splitlines() if word in line]


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    binaries = tmp_path / ".venv" / "bin"
    for directory in (binaries, tmp_path / "launch", tmp_path / ".venv" / "torch_extensions"):
        directory.mkdir(parents=True)
    for name in ("python", "torchrun", "ds-compress"):
        (binaries / name).write_text(STAND_IN)
        (binaries / name).chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt", "launch/quickstart.sh"):
        shutil.copy(ROOT / name, tmp_path / name)
    return Checkout(tmp_path)


def test_the_quickstart_trains_three_times_through_a_link(checkout: Checkout) -> None:
    output = checkout.start(link=True)
    trained = checkout.calls("train_gpt.py")
    through = "python -m deepspeed_compress.tools.bench.hosts --hosts 2 --rate 100mbit -- python"
    assert [call for call in trained if not call.startswith(through)] == []
    assert [f"configs/quickstart_{name}.json" in call for name, call in zip(RUNS, trained, strict=True)] == [True] * 3
    (compared,) = checkout.calls("time_to_loss")
    assert " ".join(f"runs/quickstart/100mbit/{name}" for name in RUNS) in compared
    assert "a link of 100 Mbit/s" in compared
    assert "5/10  loss 3" in output
    assert "4/10" not in output
    assert "noise" not in output
    assert "noise" in (checkout.root / "runs/quickstart/100mbit/int4.log").read_text()


def test_the_quickstart_reports_a_missing_link(checkout: Checkout) -> None:
    assert "no link of 100 Mbit/s here: no tc here" in checkout.start(link=False)
    assert [call.split()[0] for call in checkout.calls("train_gpt.py")] == ["torchrun"] * 3
    assert "no network" in checkout.calls("time_to_loss")[0]
    # A run without a link must not be taken for one with a link.
    checkout.start(link=True)
    assert len(checkout.calls("train_gpt.py")) == 6


def test_the_quickstart_does_nothing_twice_unless_forced(checkout: Checkout) -> None:
    for _ in range(2):
        output = checkout.start(link=True)
    assert output.count("finished already") == 3
    assert (len(checkout.calls("pip install")), len(checkout.calls("train_gpt.py"))) == (2, 3)
    checkout.start("--force", link=True)
    assert (len(checkout.calls("pip install")), len(checkout.calls("train_gpt.py"))) == (2, 6)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_has_nothing_to_say() -> None:
    files = sorted(str(file.relative_to(ROOT)) for file in (ROOT / "launch").glob("*.sh"))
    process = subprocess.run(["shellcheck", "-x", *files], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.stdout == ""
    assert process.returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "settings"),
    [
        ("single_node", {"RANKS": "2"}),
        ("torchrun", {"RANKS": "2"}),
        ("multi_node", {"MASTER_ADDR": "127.0.0.1"}),
        ("slurm", {**SLURM, "RANKS": "1", "NODES_OF_JOB": "localhost"}),
    ],
)
def test_two_ranks_train(script: str, settings: dict[str, str], tools: Path, port: str, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the king said nothing, for who would answer him?\n" * 400)
    (tmp_path / "hosts").write_text("127.0.0.1 slots=1\n127.0.0.2 slots=1\n")
    model = {"model_type": "gpt2", "vocab_size": 300, "n_positions": 32, "n_embd": 32, "n_layer": 1, "n_head": 2}
    (tmp_path / "model.json").write_text(json.dumps(model | {"bos_token_id": 0, "eos_token_id": 0}))
    files = {"data": "text.txt", "model": "model.json", "output-dir": "run"}
    options = [part for name, file in files.items() for part in (f"--{name}", str(tmp_path / file))]
    options += ["--steps", "2", "--seq-len", "16", "--eval-batches", "1"]
    settings = settings | {"HOSTFILE": str(tmp_path / "hosts"), "MASTER_PORT": port}
    process = start(script, [CONFIG, *options], settings, tools)
    assert process.returncode == 0, process.stdout + process.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["world_size"], summary["steps"], summary["config"]) == (2, 2, CONFIG)
    assert summary["bytes_uncompressed_per_step"] > 4 * summary["bytes_sent_per_step"]
