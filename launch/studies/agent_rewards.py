"""Measure reward against time for several ways to bring new weights to the rollouts of an agent.

    python -m launch.studies.agent_rewards --output-dir runs/rewards --seeds 0 1 2

The task is that of launch/train_agents.py: a small GPT-2 learns sums by GRPO. One process trains with a DeepSpeed
engine, another one samples, and weights travel through a store whose reads are as slow as a link. Every run has the
same model after supervised steps, and the same seconds. Prints a table, and draws the reward over time.
"""

import argparse
import json
import multiprocessing
import os
import queue
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from deepspeed_compress.agents.generation import Sampling, complete
from deepspeed_compress.agents.grpo import Sample
from deepspeed_compress.agents.learner import Learner, LearnerSettings
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.tools.plots import COLOURS, check_plotting, style_axes
from launch.agents.sums import CHARACTERS, END, LARGEST, PAD, Sum, encode, make_model, reward, teach
from launch.studies.plain_updates import CODINGS, PlainPublisher, PlainReceiver

CONFIG = Path(__file__).parents[1] / "agents" / "ds_config.json"
CHUNK = 64
"""Completions that are sampled at a time, between which new weights may arrive."""
COLUMNS = ("mode", "batches", "s per batch", "kB per version", "versions behind", "reward at the end", "s to the goal")


@dataclass(frozen=True)
class Mode:
    """A way to bring weights to rollouts.

    Attributes:
        exact: True for exact changes; False for whole bf16 weights.
        behind: largest number of batches that rollouts run ahead of training.
        corrected: weight samples by their ratio to the present policy.
    """

    exact: bool
    behind: int
    corrected: bool = True


MODES = {
    "synchronous-whole": Mode(False, 0),
    "synchronous-exact": Mode(True, 0),
    "one-behind": Mode(True, 1),
    "asynchronous": Mode(True, 4),
    "asynchronous-uncorrected": Mode(True, 4, corrected=False),
}


@dataclass(frozen=True)
class Row:
    """Figures of a batch: seconds since the beginning, mean reward, versions behind, and bytes of the new version."""

    seconds: float
    reward: float
    lag: float
    size: int


class LinkStore(DirectoryStore):
    """Store whose reads take as long as over a link."""

    def __init__(self, path: Path, rate: float) -> None:
        super().__init__(path)
        self._rate = rate

    def get(self, name: str) -> bytes:
        data = super().get(name)
        time.sleep(8 * len(data) / self._rate)
        return data


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for figures and the picture")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N", help="default: 0")
    add("--seconds", type=float, default=120.0, help="seconds of each run; default: 120")
    add("--goal", type=float, default=0.65, help="mean reward of five batches to reach; default: 0.65")
    add("--mbit", type=float, default=10.0, help="rate of the link in Mbit/s; default: 10")
    add("--supervised-steps", type=int, default=600, metavar="N", help="steps before rewards; default: 600")
    add("--tasks", type=int, default=32, metavar="N", help="tasks in a batch; default: 32")
    add("--episodes", type=int, default=8, metavar="N", help="completions of each task; default: 8")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    check_plotting("launch.studies.agent_rewards")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[list[Row]]] = {name: [] for name in options.modes}
    for seed in options.seeds:
        weights = taught(options, seed)
        for name in options.modes:
            rows = run(options, MODES[name], weights, seed)
            file = options.output_dir / f"{name}-{seed}.json"
            file.write_text(json.dumps([asdict(row) for row in rows]))
            runs[name].append(rows)
    print(line(COLUMNS), line(["---"] * len(COLUMNS)), sep="\n")
    for name, each in runs.items():
        print(line(cells(name, each, options.goal)))
    draw(runs, options.output_dir / "rewards.png")


def taught(options: argparse.Namespace, seed: int) -> Path:
    """Return the file of a model after supervised steps, which is made once for each seed."""
    file: Path = options.output_dir / f"taught-{options.supervised_steps}-{seed}.pt"
    if not file.exists():
        model = make_model(seed)
        for _ in teach(model, options.supervised_steps, seed):
            pass
        torch.save(model.state_dict(), file)
    return file


def run(options: argparse.Namespace, mode: Mode, weights: Path, seed: int) -> list[Row]:
    """Return the figures of each batch of a run."""
    context = multiprocessing.get_context("spawn")
    batches, stop = context.Queue(), context.Event()
    with tempfile.TemporaryDirectory() as directory:
        shared = (options, mode, weights, seed, Path(directory), batches, stop)
        sampler = context.Process(target=sample, args=shared)
        sampler.start()
        figures = context.Queue()
        trainer = context.Process(target=train, args=(*shared, figures))
        trainer.start()
        try:
            rows = wait_for(trainer, figures)
        finally:
            stop.set()
            trainer.join()
            sampler.join()
    if not rows:
        raise SystemExit(f"no batch was learned in {options.seconds:g} s; write more --seconds, or see the error above")
    return rows


def wait_for(trainer: BaseProcess, figures: Any) -> list[Row]:
    """Return the figures that `trainer` puts into a queue, or no rows if it fails."""
    while True:
        running = trainer.is_alive()
        try:
            rows: list[Row] = figures.get(timeout=1)
        except queue.Empty:
            if not running:
                return []
        else:
            return rows


def load(weights: Path, seed: int) -> Any:
    """Return the model after supervised steps, in a process with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = make_model(seed)
    model.load_state_dict(torch.load(weights, weights_only=True))
    return model.eval()


def sample(
    options: argparse.Namespace, mode: Mode, weights: Path, seed: int, path: Path, batches: Any, stop: Any
) -> None:
    """Sample batches, each with weights that are at most `mode.behind` versions old, until `stop` is set."""
    module, store = load(weights, seed).to(torch.bfloat16), LinkStore(path, 1e6 * options.mbit)
    receiver: Any = Receiver(module, store) if mode.exact else PlainReceiver(module, store, CODINGS["whole"])
    threading.Thread(target=keep_updating, args=(receiver, stop), daemon=True).start()
    generator = random.Random(seed)
    batches.put([])  # ready
    for number in count():
        while (receiver.version or 0) < max(1, number + 1 - mode.behind):
            if stop.wait(0.002):
                batches.cancel_join_thread()
                return
        batches.put(list(sample_batch(options, module, receiver, generator)))


def keep_updating(receiver: Any, stop: Any) -> None:
    while not stop.wait(0.002):
        receiver.update()


def sample_batch(options: argparse.Namespace, module: Any, receiver: Any, generator: random.Random) -> Iterator[Sample]:
    tasks = [Sum(generator.randint(0, LARGEST), generator.randint(0, LARGEST)) for _ in range(options.tasks)]
    episodes = [task for task in tasks for _ in range(options.episodes)]
    sampling = Sampling(max_tokens=len(str(2 * LARGEST)) + 1)
    for begin in range(0, len(episodes), CHUNK):
        chunk = episodes[begin : begin + CHUNK]
        with receiver.request() as version:
            completions = complete(module, [encode(task.question) for task in chunk], sampling, PAD, END)
        for task, one in zip(chunk, completions, strict=True):
            answer = "".join(CHARACTERS[token] for token in one.tokens if token < len(CHARACTERS))
            prompt, group = tuple(encode(task.question)), task.question
            yield Sample(prompt, one.tokens, one.logprobs, reward(task, answer), group, version)


def train(
    options: argparse.Namespace,
    mode: Mode,
    weights: Path,
    seed: int,
    path: Path,
    batches: Any,
    stop: Any,
    figures: Any,
) -> None:
    """Learn from batches, and publish the weights after each one, for the seconds of the run."""
    engine, rows = make_engine(options, load(weights, seed)), list[Row]()
    store = DirectoryStore(path)
    publisher: Any = Publisher(engine, store) if mode.exact else PlainPublisher(engine.module, store, CODINGS["whole"])
    learner = Learner(engine, PAD, LearnerSettings(corrected=mode.corrected, seed=seed))
    batches.get()
    publish(publisher)
    begin = time.perf_counter()
    for version in count(1):
        try:
            samples = batches.get(timeout=begin + options.seconds - time.perf_counter())
        except (queue.Empty, ValueError):
            break
        learned = learner.learn(samples, version)
        size = publish(publisher)
        rows.append(Row(time.perf_counter() - begin, learned.reward, learned.lag, size))
    stop.set()
    figures.put(rows)


def publish(publisher: Any) -> int:
    """Publish the weights, and return the bytes of the version."""
    published = publisher.publish()
    if published is not None:
        return int(published.change_bytes)
    publisher.wait()
    return int(publisher.sizes[-1])


def make_engine(options: argparse.Namespace, model: Any) -> Any:
    """Return an engine of this process alone, with an optimizer step for each batch."""
    import deepspeed

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(port)
    size = options.tasks * options.episodes
    config = {**json.loads(CONFIG.read_text()), "train_batch_size": size, "steps_per_print": 10**6}
    del config["deepspeed_compress"]
    config["train_micro_batch_size_per_gpu"] = min(64, size)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def cells(name: str, runs: Sequence[Sequence[Row]], goal: float) -> list[str]:
    """Return the cells of a mode: means over its runs. The last one is empty unless all of them reach the goal."""
    reached = [seconds for rows in runs for seconds in reach(rows, goal)]
    batches = statistics.fmean(len(rows) for rows in runs)
    rows = [row for each in runs for row in each]
    ends = [statistics.fmean(row.reward for row in each[-max(1, len(each) // 5) :]) for each in runs]
    return [
        name,
        f"{batches:.0f}",
        f"{statistics.fmean(each[-1].seconds / len(each) for each in runs):.2f}",
        f"{statistics.fmean(row.size for row in rows) / 1e3:.0f}",
        f"{statistics.fmean(row.lag for row in rows):.2f}",
        f"{statistics.fmean(ends):.3f}",
        f"{statistics.fmean(reached):.0f}" if len(reached) == len(runs) else "",
    ]


def reach(rows: Sequence[Row], goal: float) -> Iterator[float]:
    """Yield the seconds until the smoothed reward is at least `goal`; nothing if it never is."""
    for row, value in zip(rows, smoothed(rows), strict=True):
        if value >= goal:
            yield row.seconds
            return


def smoothed(rows: Sequence[Row], width: int = 5) -> list[float]:
    """Return the mean reward of each batch and those before it, up to `width` in all."""
    rewards = [row.reward for row in rows]
    return [statistics.fmean(rewards[max(0, end - width) : end]) for end in range(1, len(rewards) + 1)]


def line(found: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(found)} |"


def draw(runs: dict[str, list[list[Row]]], file: Path) -> None:
    """Draw the reward of each run over time, in the color of its mode."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for color, (name, each) in zip(COLOURS, runs.items(), strict=False):
        for number, rows in enumerate(each):
            label = None if number else name
            axes.plot([row.seconds for row in rows], smoothed(rows), color=color, linewidth=1.2, label=label)
    axes.set_xlabel("seconds")
    style_axes(axes, "Mean reward of five batches")
    figure.savefig(file, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
