"""Train an agent by reinforcement learning: GRPO on compressed DeepSpeed ranks, with rollouts by Agent-Lightning.

    python -m launch.train_agents --output-dir runs/agents

A small GPT-2 first learns sums from supervised steps, then from rewards. One command starts all processes: two training
ranks, the policy's endpoint, which receives changes of weights, and two processes that run the agent. With --agents 2,
two agents with different sums have all of these, and share all layers but the last one. Needs Agent-Lightning:
pip install -e ".[agents]". See docs/agents.md.
"""

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from deepspeed_compress.launcher.workers import die_with
from deepspeed_compress.tools.bench.hosts import end_groups, signals_as_exceptions
from deepspeed_compress.tools.plots import COLOURS, check_plotting, style_axes
from launch.agents.sums import LAYERS, make_model, save, teach

CONFIG = Path(__file__).parent / "agents" / "ds_config.json"
QUIET = {"AGENTOPS_LOG_LEVEL": "ERROR", "AGENTOPS_LOGGING_TO_FILE": "False", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
"""Variables with which Agent-Lightning's packages write no files, and ask no server for prices."""
END_S = 20.0
"""Seconds that a process gets to end."""
SERVERS = {"example": "launch.agents.sampler", "vllm": "launch.agents.serve_vllm"}
"""Programs of an endpoint."""
SYNC_EVERY = 5
"""Batches after which an agent pushes its change of the shared trunk."""
_ERROR = re.compile(r"(\[\w+\]:\s*)?[\w.]*(Error|Exception|Exit|Interrupt)\b: .+")
"""A line of a log that names an exception, of a rank or of another process."""


@dataclass(frozen=True)
class Agent:
    """An agent and its training, by its number from 0, with all of its files in `directory`."""

    number: int
    directory: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Return the figures of each batch so far."""
        file = self.directory / "figures.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@dataclass(frozen=True)
class Child:
    """A process of the run. Its output is what the file `log` has from byte `begin` on."""

    process: "subprocess.Popen[bytes]"
    log: Path
    begin: int

    @property
    def end(self) -> str:
        """Return how the process has ended, with the first error in its output."""
        lines = self.log.read_bytes()[self.begin :].decode(errors="replace").splitlines()
        errors = [line for line in lines if _ERROR.match(line)]
        cause = next(iter(errors or lines[-1:]), "no output")
        return f"{self.log.stem} ended with exit code {self.process.returncode}: {cause}; see {self.log}"


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
    add("--server", choices=SERVERS, default="example", help="what samples: a small example, or vLLM; default: example")
    add(
        "--vllm-python",
        default=sys.executable,
        metavar="FILE",
        help="Python of the environment with vLLM and this package; default: this one",
    )
    add("--agents", type=int, default=1, metavar="N", help="agents that share a trunk; default: 1")
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
    agents = _agents(options)
    with signals_as_exceptions(), ExitStack() as processes:
        _train(options, model, agents, processes)
    picture = options.output_dir / "reward.png"
    draw([agent.rows for agent in agents], picture)
    for agent in agents:
        print(_summary(agent.rows, model))
    print(f"reward by batch: {picture}")


def _agents(options: argparse.Namespace) -> list[Agent]:
    """Return all agents. If there are several, each has a directory of its own."""
    if options.agents == 1:
        return [Agent(0, options.output_dir)]
    agents = [Agent(number, options.output_dir / f"agent{number}") for number in range(options.agents)]
    for agent in agents:
        agent.directory.mkdir(exist_ok=True)
    return agents


def _teach(options: argparse.Namespace, directory: Path) -> None:
    model = make_model(options.seed)
    with _bars(options.supervised_steps, ["supervised steps"]) as show:
        for number, loss in enumerate(teach(model, options.supervised_steps, options.seed), 1):
            show(0, number, f"loss {loss:.2f}")
    save(model, directory)


@contextmanager
def _bars(total: int, texts: Sequence[str]) -> Iterator[Any]:
    """Show progress bars; yield a function that moves one of them to a number and shows a text behind it."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[text]}")) as progress:
        tasks = [progress.add_task(text, total=total, text="") for text in texts]
        yield lambda bar, number, shown: progress.update(tasks[bar], completed=number, text=shown)


def _train(options: argparse.Namespace, model: Path, agents: Sequence[Agent], processes: ExitStack) -> None:
    """Start all processes, and show the figures of each batch until training ends."""
    config = options.config if len(agents) == 1 else _shared_trunk(options, processes)
    _follow([_start(options, config, model, agent, processes) for agent in agents], agents, options.batches)


def _shared_trunk(options: argparse.Namespace, processes: ExitStack) -> Path:
    """Start the server of the trunk, and return a configuration with which each agent is an island."""
    port, directory = _free_port(), options.output_dir
    serve = ["-m", "deepspeed_compress.cli", "islands", "serve", "--parameter-server", "--port", str(port)]
    processes.enter_context(
        _process([*serve, "--state", str(directory / "trunk.safetensors")], directory / "trunk.log")
    )
    config = json.loads(options.config.read_text())
    own = rf"^transformer\.h\.{LAYERS - 1}\."
    elastic = {"rendezvous": f"127.0.0.1:{port}", "parameter_server": {}}
    config["deepspeed_compress"]["islands"] = {"sync_every": SYNC_EVERY, "own": [own], "elastic": elastic}
    file: Path = directory / "ds_config.json"
    file.write_text(json.dumps(config, indent=2))
    return file


def _start(options: argparse.Namespace, config: Path, model: Path, agent: Agent, processes: ExitStack) -> list[Child]:
    """Start the endpoint, the runners and the training of an agent; return them, the one that trains last."""
    endpoint, store = _free_port(), _free_port()
    directory, seed = agent.directory, str(options.seed + agent.number)
    weights = str(directory / "weights")
    serve = ["--model", str(model), "--weights", weights, "--port", str(endpoint), "--seed", seed]
    helpers = [processes.enter_context(_process([*_server(options), *serve], directory / "endpoint.log"))]
    run = ["-m", "launch.agents.agent", "--port", str(store), "--runners", str(options.runners)]
    helpers.append(processes.enter_context(_process(run, directory / "agent.log")))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    learn = ["-m", "launch.agents.learn", "--config", str(config), "--model", str(model), "--weights", weights]
    learn += ["--figures", str(directory / "figures.jsonl"), "--checkpoints", str(directory / "checkpoints")]
    learn += ["--endpoint", f"http://127.0.0.1:{endpoint}", "--port", str(store), "--seed", seed]
    learn += ["--agent", str(agent.number)]
    for name in ("batches", "tasks", "episodes", "behind", "agents", "checkpoint_every"):
        learn += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    learn += [f"--{name}" for name in ("uncorrected", "resume") if getattr(options, name)]
    return [*helpers, processes.enter_context(_process([*launcher, *learn], directory / "training.log"))]


def _server(options: argparse.Namespace) -> list[str]:
    """Return the program of an endpoint, with the options that only it has."""
    vllm = ["--python", options.vllm_python, "--vllm-port", str(_free_port())]
    return ["-m", SERVERS[options.server], *(vllm if options.server == "vllm" else ())]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def _process(arguments: Sequence[str], log: Path) -> Iterator[Child]:
    """Run Python with `arguments`. With the block, or with this process, it ends with all that it has started."""
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            [sys.executable, *arguments],
            stdout=output,
            stderr=output,
            env={**os.environ, **QUIET},
            start_new_session=True,
            preexec_fn=partial(die_with, os.getpid()),
        )
        try:
            yield Child(process, log, begin)
        finally:
            end_groups([process], END_S)


def _follow(children: Sequence[Sequence[Child]], agents: Sequence[Agent], batches: int) -> None:
    """Show the newest batch of each agent until all trainings end.

    Raises:
        SystemExit: a training fails, or goes on without its endpoint or its runners.
    """
    names = ["batches"] if len(agents) == 1 else [f"batches of agent {agent.number}" for agent in agents]
    with _bars(batches, names) as show:
        lost_at: dict[int, float] = {}
        while True:
            ended = [training.process.poll() is not None for *_, training in children]
            for agent in agents:
                for newest in agent.rows[-1:]:
                    show(agent.number, newest["number"], _line(newest))
            _check(children, lost_at)
            if all(ended):
                return
            time.sleep(0.2)


def _check(children: Sequence[Sequence[Child]], lost_at: dict[int, float]) -> None:
    """Raise SystemExit if a training has failed, or has been without one of its helpers for some time.

    Runners end when training closes the store, just before it ends itself.
    """
    for *helpers, training in children:
        if training.process.poll():
            raise SystemExit(f"training failed: {training.end}")
        lost = [] if training.process.poll() == 0 else [one for one in helpers if one.process.poll() is not None]
        for helper in lost:
            if time.monotonic() > lost_at.setdefault(helper.process.pid, time.monotonic()) + END_S:
                raise SystemExit(f"training was ended, because {helper.end}")


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


def draw(agents: Sequence[Sequence[dict[str, Any]]], file: Path) -> None:
    """Draw the reward and the bytes of each version by batch, for all agents."""
    import matplotlib.pyplot as plt

    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(7, 5), layout="constrained")
    for agent, rows in enumerate(agents):
        numbers, label = [row["number"] for row in rows], f"agent {agent}" if len(agents) > 1 else None
        colors = [COLOURS[(2 * agent + panel) % len(COLOURS)] for panel in range(2)]
        upper.plot(numbers, [row["learned"]["reward"] for row in rows], color=colors[0], label=label)
        lower.plot(numbers, [row["bytes"] / 1e3 for row in rows], color=colors[1], label=label)
    style_axes(upper, "Mean reward of a batch")
    style_axes(lower, "kB per published version")
    lower.set_xlabel("batch")
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
