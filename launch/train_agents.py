"""Train an agent by reinforcement learning: GRPO on compressed DeepSpeed ranks, with rollouts by Agent-Lightning.

    python -m launch.train_agents --output-dir runs/agents

A small GPT-2 first learns sums from supervised steps, then from rewards. One command starts all processes: two training
ranks, the policy's endpoint, which receives changes of weights, and two processes that run the agent. Needs
Agent-Lightning: pip install "deepspeed-compress[agents]". See docs/agents.md.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepspeed_compress.tools.plots import COLOURS, check_plotting, style_axes
from launch.agents.sums import make_model, save, teach

CONFIG = Path(__file__).parent / "agents" / "ds_config.json"
QUIET = {"AGENTOPS_LOG_LEVEL": "ERROR", "AGENTOPS_LOGGING_TO_FILE": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Variables with which Agent-Lightning's packages write no files, and ask no server for prices."""
END_S = 20.0
"""Seconds that a process gets to end."""


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train an agent by reinforcement learning.")
    add = parser.add_argument
    add(
        "--output-dir", type=Path, required=True, metavar="DIR", help="directory of the run; a new one without --resume"
    )
    add("--config", type=Path, default=CONFIG, metavar="FILE", help="ds_config.json; default: the one in launch/agents")
    add("--supervised-steps", type=int, default=600, metavar="N", help="steps before rewards; default: 600")
    add("--batches", type=int, default=60, metavar="N", help="batches of rollouts; default: 60")
    add("--tasks", type=int, default=32, metavar="N", help="tasks in a batch; default: 32")
    add("--episodes", type=int, default=8, metavar="N", help="rollouts of each task; default: 8")
    add(
        "--behind",
        type=int,
        default=1,
        metavar="N",
        help="largest number of versions by which rollouts may be behind; 0 waits for new weights; default: 1",
    )
    add("--uncorrected", action="store_true", help="do not weight samples by their ratio to the present policy")
    add("--ranks", type=int, default=2, metavar="N", help="training ranks; default: 2")
    add("--runners", type=int, default=2, metavar="N", help="processes that run the agent; default: 2")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    add("--checkpoint-every", type=int, default=10, metavar="N", help="batches between checkpoints; default: 10")
    add("--resume", action="store_true", help="continue from the newest checkpoint, or start if there is none")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, print a line for each batch, and draw the reward."""
    options = parse_options(argv)
    check_plotting("launch.train_agents")
    options.output_dir.mkdir(parents=True, exist_ok=options.resume)
    model = options.output_dir / "model"
    if not model.exists():
        _teach(options, model)
    figures = options.output_dir / "figures.jsonl"
    with ExitStack() as processes:
        _train(options, model, figures, processes)
    rows = [json.loads(line) for line in figures.read_text().splitlines()]
    picture = options.output_dir / "reward.png"
    draw(rows, picture)
    print(_summary(rows, model))
    print(f"reward by batch: {picture}")


def _teach(options: argparse.Namespace, directory: Path) -> None:
    model = make_model(options.seed)
    with _bar(options.supervised_steps, "supervised steps") as show:
        for number, loss in enumerate(teach(model, options.supervised_steps, options.seed), 1):
            show(number, f"loss {loss:.2f}")
    save(model, directory)


@contextmanager
def _bar(total: int, text: str) -> Iterator[Any]:
    """Show a progress bar; yield a function that moves it to a number and shows a text behind it."""
    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}")) as progress:
        task = progress.add_task(text, total=total, text="")
        yield lambda number, shown: progress.update(task, completed=number, text=shown)


def _train(options: argparse.Namespace, model: Path, figures: Path, processes: ExitStack) -> None:
    """Start all processes, and show the figures of each batch until training ends."""
    endpoint, store = _free_port(), _free_port()
    weights = options.output_dir / "weights"
    logs = options.output_dir
    serve = ["-m", "launch.agents.serve", "--model", str(model), "--weights", str(weights), "--port", str(endpoint)]
    processes.enter_context(_process([*serve, "--seed", str(options.seed)], logs / "endpoint.log"))
    run = ["-m", "launch.agents.agent", "--port", str(store), "--runners", str(options.runners)]
    processes.enter_context(_process(run, logs / "agent.log"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    learn = ["-m", "launch.agents.learn", "--config", str(options.config), "--model", str(model)]
    learn += ["--weights", str(weights), "--figures", str(figures), "--endpoint", f"http://127.0.0.1:{endpoint}"]
    learn += ["--checkpoints", str(options.output_dir / "checkpoints"), "--port", str(store)]
    for name in ("batches", "tasks", "episodes", "behind", "seed", "checkpoint_every"):
        learn += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    learn += [f"--{name}" for name in ("uncorrected", "resume") if getattr(options, name)]
    training = processes.enter_context(_process([*launcher, *learn], logs / "training.log"))
    _follow(training, figures, options.batches)
    if training.returncode:
        raise SystemExit(f"training failed; see {logs / 'training.log'}")


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _process(arguments: Sequence[str], log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """Run Python with `arguments`, and end the process with the block."""
    environment = {**os.environ, **QUIET}
    with log.open("ab") as output:
        process = subprocess.Popen([sys.executable, *arguments], stdout=output, stderr=output, env=environment)
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _follow(training: "subprocess.Popen[bytes]", figures: Path, batches: int) -> None:
    """Show the newest batch until `training` ends."""
    with _bar(batches, "batches") as show:
        while True:
            ended = training.poll() is not None
            lines = figures.read_text().splitlines() if figures.exists() else []
            if lines:
                newest = json.loads(lines[-1])
                show(newest["number"], _line(newest))
            if ended:
                return
            time.sleep(0.2)


def _line(row: dict[str, Any]) -> str:
    learned, kilobytes = row["learned"], row["bytes"] / 1e3
    return (
        f"reward {learned['reward']:.2f}, {row['tokens'] / row['seconds']:.0f} tokens/s, "
        f"{kilobytes:.0f} kB per version, {learned['lag']:.1f} versions behind"
    )


def _summary(rows: Sequence[dict[str, Any]], model: Path) -> str:
    tenth = max(1, len(rows) // 10)
    first, last = (sum(row["learned"]["reward"] for row in part) / tenth for part in (rows[:tenth], rows[-tenth:]))
    size = sum(file.stat().st_size for file in model.glob("*.safetensors")) / 2
    sent = sum(row["bytes"] for row in rows) / len(rows)
    return (
        f"reward {first:.2f} at the beginning, {last:.2f} at the end; "
        f"{sent / 1e3:.0f} kB per version, {size / sent:.1f} times fewer than whole bf16 weights"
    )


def draw(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Draw the reward and the bytes of each version by batch."""
    import matplotlib.pyplot as plt

    numbers = [row["number"] for row in rows]
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    upper.plot(numbers, [row["learned"]["reward"] for row in rows], color=COLOURS[0])
    style_axes(upper, "Mean reward of a batch")
    lower.plot(numbers, [row["bytes"] / 1e3 for row in rows], color=COLOURS[1])
    style_axes(lower, "kB per published version")
    lower.set_xlabel("batch")
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
