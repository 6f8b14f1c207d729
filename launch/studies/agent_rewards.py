"""Measure reward against time for several ways to bring new weights to the rollouts of an agent.

    python -m launch.studies.agent_rewards --output-dir runs/rewards --seeds 0 1 2

The task is that of launch/train_agents.py: a small GPT-2 learns sums by GRPO. One process trains with a DeepSpeed
engine, another one samples, and weights travel through a store whose reads are as slow as a link. All runs begin with
the same model, which supervised steps bring to the reward --start, and last equally long; a seed decides tasks and
sampling. Prints a table, and draws the reward over time.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import queue
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count, islice
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepspeed_compress.agents.grpo import Sample
from deepspeed_compress.agents.learner import Learner, LearnerSettings
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.tools.plots import COLOURS, GREY, check_plotting, new_figure, save_figure, style_axes
from launch.agents.sampler import Completion, complete
from launch.agents.sums import (
    CHARACTERS,
    LARGEST,
    PAD,
    Sum,
    encode,
    make_model,
    make_tokenizer,
    reward,
    sums,
    teach,
)
from launch.studies.harness import markdown, new_parser
from launch.studies.plain_updates import CODINGS, PlainPublisher, PlainReceiver

CONFIG = Path(__file__).parents[1] / "agents" / "ds_config.json"
CHUNK = 64
"""Completions that are sampled at a time, between which new weights may arrive."""
POLL_S = 0.005
"""Seconds between two looks for new weights."""
SMOOTHED = 20
"""Number of batches whose mean reward is compared with the goal."""
COLUMNS = ("mode", "batches", "s per batch", "kB per version", "versions behind", "reward at the end", "s to the goal")
TEACHING_SEED = 1234
"""Seed of the model that all runs begin with, and of its supervised steps."""
MOST_STEPS, CHECK_EVERY, CHECKED_SUMS = 5000, 10, 256
"""Largest number of supervised steps, steps between two measurements of the reward, and sums of a measurement."""


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
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for figures and the picture")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N", help="default: 0")
    add("--seconds", type=float, default=90.0, help="seconds of each run; default: 90")
    add("--start", type=float, default=0.35, help="mean reward of the model before its first batch; default: 0.35")
    add("--goal", type=float, default=0.45, help=f"mean reward of {SMOOTHED} batches to reach; default: 0.45")
    add("--mbit", type=float, default=100.0, help="rate of the link in Mbit/s; default: 100")
    add("--width", type=int, default=128, metavar="N", help="width of the model; default: 128")
    add("--layers", type=int, default=4, metavar="N", help="layers of the model; default: 4")
    add("--tasks", type=int, default=16, metavar="N", help="tasks in a batch; default: 16")
    add("--episodes", type=int, default=4, metavar="N", help="completions of each task; default: 4")
    options = parser.parse_args(argv)
    if options.start >= options.goal:
        parser.error(f"--start {options.start:g} is not below --goal {options.goal:g}")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    options = parse_options(argv)
    check_plotting("launch.studies.agent_rewards")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[list[Row]]] = {name: [] for name in options.modes}
    weights = taught(options)
    for seed in options.seeds:
        for name in options.modes:
            rows = run(options, MODES[name], weights, seed)
            file = options.output_dir / f"{name}-{seed}.json"
            file.write_text(json.dumps([asdict(row) for row in rows]))
            runs[name].append(rows)
    print(markdown(COLUMNS, (cells(name, each, options.goal) for name, each in runs.items())), end="")
    draw(runs, options.goal, options.output_dir / "rewards.png")


def taught(options: argparse.Namespace) -> Path:
    """Return the file of the model that all runs begin with, which is made once. Print its reward and its size."""
    file: Path = options.output_dir / f"taught-{options.width}-{options.layers}-{options.start:g}.pt"
    model = make_model(TEACHING_SEED, options.width, options.layers)
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        teach_until(model, options.start)
        torch.save(model.state_dict(), file)
    size = 2 * sum(parameter.numel() for parameter in model.parameters())
    print(
        f"Before the first batch, the reward is {mean_reward(model):.2f}. Whole bf16 weights have {size / 1e3:.0f} kB, "
        f"which take {8e-6 * size / options.mbit:.2f} s at {options.mbit:g} Mbit/s."
    )
    return file


def teach_until(model: Any, start: float) -> None:
    """Take supervised steps until the mean reward of `model` is at least `start`."""
    for number, _ in enumerate(teach(model, MOST_STEPS, TEACHING_SEED), 1):
        if number % CHECK_EVERY == 0 and mean_reward(model) >= start:
            return
    raise SystemExit(f"the reward is still below --start {start:g} after {MOST_STEPS} supervised steps; write less")


def mean_reward(model: Any) -> float:
    """Return the mean reward of the answers that `model` samples to the same sums at each call."""
    torch.manual_seed(TEACHING_SEED)
    tasks = list(islice(sums(TEACHING_SEED + 1), CHECKED_SUMS))
    return statistics.fmean(
        reward(task, text(answer)) for task, answer in zip(tasks, answers(model, tasks), strict=True)
    )


def answers(model: Any, tasks: Sequence[Sum]) -> list[Completion]:
    """Sample an answer to each of `tasks`."""
    longest = len(str(2 * LARGEST)) + 1
    return complete(model, make_tokenizer(), [encode(task.question) for task in tasks], longest)


def text(answer: Completion) -> str:
    return "".join(CHARACTERS[token] for token in answer.tokens if token < len(CHARACTERS))


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


def load(options: argparse.Namespace, weights: Path, seed: int) -> Any:
    """Return the model that all runs begin with, in a process with one thread that samples by `seed`."""
    torch.set_num_threads(1)
    model = make_model(TEACHING_SEED, options.width, options.layers)
    model.load_state_dict(torch.load(weights, weights_only=True))
    torch.manual_seed(seed)
    return model.eval()


def sample(
    options: argparse.Namespace, mode: Mode, weights: Path, seed: int, path: Path, batches: Any, stop: Any
) -> None:
    """Sample batches, each with weights that are at most `mode.behind` versions old, until `stop` is set.

    The module holds values of bf16 in fp32, with which processors without instructions for bf16 are faster.
    """
    module, store = load(options, weights, seed), LinkStore(path, 1e6 * options.mbit)
    receiver: Any = Receiver(module, store) if mode.exact else PlainReceiver(module, store, CODINGS["whole"])
    # The interpreter waits for this thread. It aborts if it ends a daemon in the middle of torch's code.
    threading.Thread(target=keep_updating, args=(receiver, stop)).start()
    tasks = sums(seed)
    batches.put([])  # ready
    for number in count():
        while (receiver.version or 0) < max(1, number + 1 - mode.behind):
            if stop.wait(POLL_S):
                batches.cancel_join_thread()
                return
        batches.put(list(sample_batch(options, module, receiver, tasks)))


def keep_updating(receiver: Any, stop: Any) -> None:
    while not stop.wait(POLL_S):
        receiver.update()


def sample_batch(options: argparse.Namespace, module: Any, receiver: Any, tasks: Iterator[Sum]) -> Iterator[Sample]:
    episodes = [task for task in islice(tasks, options.tasks) for _ in range(options.episodes)]
    for begin in range(0, len(episodes), CHUNK):
        chunk = episodes[begin : begin + CHUNK]
        with receiver.request() as version:
            completions = answers(module, chunk)
        for task, completion in zip(chunk, completions, strict=True):
            prompt, group = tuple(encode(task.question)), task.question
            yield Sample(prompt, completion.tokens, completion.logprobs, reward(task, text(completion)), group, version)


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
    engine, rows = make_engine(options, load(options, weights, seed)), list[Row]()
    store = DirectoryStore(path)
    publisher: Any = Publisher(engine, store) if mode.exact else PlainPublisher(engine.module, store, CODINGS["whole"])
    learner = Learner(engine, PAD, LearnerSettings(corrected=mode.corrected, seed=seed))
    batches.get()
    publish(publisher)
    begin = time.perf_counter()
    with contextlib.suppress(queue.Empty):
        # Without this condition, a queue with a batch at every time would never end the run.
        while (left := begin + options.seconds - time.perf_counter()) > 0:
            learned = learner.learn(batches.get(timeout=left), len(rows) + 1)
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
    """Return the cells of a mode: means over its runs.

    The last one also has the range of several runs, and is empty unless all of them reach the goal.
    """
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
        mean_and_range(reached) if len(reached) == len(runs) else "",
    ]


def mean_and_range(values: Sequence[float]) -> str:
    spread = f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.0f}{spread}"


def reach(rows: Sequence[Row], goal: float) -> Iterator[float]:
    """Yield the seconds until the smoothed reward is at least `goal`; nothing if it never is."""
    for row, value in zip(rows, smoothed(rows), strict=True):
        if value >= goal:
            yield row.seconds
            return


def smoothed(rows: Sequence[Row]) -> list[float]:
    """Return the mean reward of each batch and those before it, up to `SMOOTHED` in all."""
    rewards = [row.reward for row in rows]
    return [statistics.fmean(rewards[max(0, end - SMOOTHED) : end]) for end in range(1, len(rewards) + 1)]


def draw(runs: dict[str, list[list[Row]]], goal: float, file: Path) -> None:
    """Draw the reward of each mode over time, as a mean over its runs, and each run as a pale line."""
    figure = new_figure(7, 4)
    axes = figure.subplots()
    axes.axhline(goal, color=GREY, linewidth=0.8, linestyle="--")
    for color, (name, each) in zip(COLOURS, runs.items(), strict=False):
        for rows in each:
            axes.plot([row.seconds for row in rows], smoothed(rows), color=color, linewidth=0.6, alpha=0.3)
        axes.plot(*mean_curve(each), color=color, linewidth=1.6, label=name)
    axes.set_xlabel("seconds")
    style_axes(axes, f"Mean reward of {SMOOTHED} batches")
    save_figure(figure, file)


def mean_curve(runs: Sequence[Sequence[Row]]) -> tuple[Any, Any]:
    """Return seconds that all runs have, and the mean over the runs of their smoothed rewards."""
    seconds = np.linspace(max(rows[0].seconds for rows in runs), min(rows[-1].seconds for rows in runs), 200)
    curves = [np.interp(seconds, [row.seconds for row in rows], smoothed(rows)) for rows in runs]
    return seconds, np.mean(curves, axis=0)


if __name__ == "__main__":
    main()
