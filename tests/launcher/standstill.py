"""Measure how long a job stops when a rank is killed, and whether its result stays the same.

python -m tests.launcher.standstill agent --kills 5
python -m tests.launcher.standstill random --kills 100
python -m tests.launcher.standstill random --kills 30 --stage 1 3 --weights --memory
python -m tests.launcher.standstill random --kills 30 --pipeline 2 --ranks 4
"""

import argparse
import random
import statistics
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.agents import Job, command, kill, records, result, starts, steps, until, write_config

EVERY = 3
IN_MEMORY = 2
BATCH = 12
WEIGHTS = {"method": "blockwise", "bits": 8, "block_size": 32, "min_numel": 100}
COLUMNS = "| layout | kills | starts | steps | bits | most steps lost | longest without a step, s |"


@dataclass(frozen=True)
class Layout:
    """Layout of the ranks, and whether they also save in memory."""

    stage: int = 1
    ranks: int = 2
    pipeline: int = 1
    weights: bool = False
    memory: bool = False
    within: int | None = None
    """Ranks of a node, within which the model is sharded; None to shard over all ranks."""

    def __str__(self) -> str:
        parts = f", pipeline {self.pipeline} x data {self.ranks // self.pipeline}" if self.pipeline > 1 else ""
        options = ", compressed weights" * self.weights + ", memory" * self.memory
        if self.within is not None:
            options += f", within nodes of {self.within}"
        return f"ZeRO {self.stage}, {self.ranks} ranks{parts}{options}"

    def write(self, directory: Path) -> Path:
        """Write a configuration that fewer ranks cannot train, because their bits would differ."""
        saving = {"every": EVERY, "directory": str(directory / "checkpoints"), "keep": 3, "resume": True}
        section = {
            "parallelism": {"pipeline": self.pipeline, "shard_within": self.within},
            "gradients": {"bits": 4, "block_size": 32},
            "weights": WEIGHTS if self.weights else {"method": "none"},
            "checkpointing": {**saving, **({"memory": {"every": IN_MEMORY, "copies": 0}} if self.memory else {})},
        }
        size = BATCH * self.pipeline // self.ranks
        # Two micro-batches fill a pipeline.
        parts = min(self.pipeline, 2)
        sizes = {"train_micro_batch_size_per_gpu": size // parts, "gradient_accumulation_steps": parts}
        return write_config(directory, self.stage, deepspeed_compress=section, **sizes)


def job(directory: Path, last: int, kills: int, layout: Layout = Layout()) -> list[str]:
    directory.mkdir()
    layout.write(directory)
    return command(directory, "--restarts", str(5 * kills + 5), steps=last, ranks=layout.ranks)


def measure(directory: Path, kills: int) -> list[float]:
    """Return the seconds from each kill to the first new step."""
    last, found = 10 * (kills + 1), []
    with Job(job(directory, last, kills), directory.with_suffix(".log"), PAUSE="0.05") as running:
        for number in range(kills):
            until(partial(beyond, directory, 10 * number + 7), running)
            before, now = steps(directory, 1)[-1]["step"], time.time()
            kill(starts(directory, 1)[-1])
            # One more step may end after the kill.
            found.append(until(partial(beyond, directory, before + 1), running)[0]["time"] - now)
        assert running.wait() == 0, running.log
    return found


def beyond(directory: Path, step: int) -> list[dict[str, Any]]:
    """Return the steps of rank 1 after `step`."""
    return [one for one in steps(directory, 1) if one["step"] > step]


def draw(layout: Layout, directory: Path, kills: int, seed: int = 0) -> str:
    """Kill random ranks at random times, and return a row of the table.

    Three of four kills wait until the job makes steps again.
    """
    last, draws, killed = 4 * kills, random.Random(seed), set[int]()
    environment = {"STAGES": str(layout.pipeline)}
    with Job(job(directory, last, kills, layout), log_of(directory), PAUSE="0.1", **environment) as running:
        while len(killed) < kills and running.process.poll() is None:
            if draws.random() < 0.75:
                wait_for_steps(directory, layout.ranks, killed, running)
            time.sleep(draws.uniform(0, 1.0))
            ranks = [starts(directory, rank)[-1:] for rank in range(layout.ranks)]
            if all(ranks):
                [chosen] = ranks[draws.randrange(layout.ranks)]
                kill(chosen)
                killed.add(chosen["pid"])
        assert running.wait(600) == 0, running.log
    undisturbed = directory.with_name(f"{directory.name}_undisturbed")
    with Job(job(undisturbed, last, 0, layout), log_of(undisturbed), **environment) as running:
        assert running.wait(600) == 0, running.log
    equal = "equal" if result(directory) == result(undisturbed) else "differ"
    found = (
        layout,
        len(killed),
        len(starts(directory, 0)),
        last,
        equal,
        most_lost(directory),
        f"{longest(directory):.0f}",
    )
    return "".join(f"| {one} " for one in found) + "|"


def wait_for_steps(directory: Path, ranks: int, killed: set[int], running: Job) -> None:
    """Wait for steps of a start in which no rank has been killed yet, or for the end of the job."""
    while running.process.poll() is None:
        newest = [record for record in records(directory) if record["rank"] == 0][-1:]
        living = all(one["pid"] not in killed for rank in range(ranks) for one in starts(directory, rank)[-1:])
        if newest and "loss" in newest[0] and living:
            return
        time.sleep(0.02)


def log_of(directory: Path) -> Path:
    return directory.with_suffix(".log")


def most_lost(directory: Path) -> int:
    """Return the largest number of steps that a later start repeated."""
    made, lost = 0, 0
    for step in steps(directory, 0):
        lost = max(lost, made + 1 - step["step"])
        made = max(made, step["step"])
    return lost


def longest(directory: Path) -> float:
    """Return the longest time between two steps, in seconds."""
    times = [step["time"] for step in steps(directory, 0)]
    return max(after - before for before, after in pairwise(times))


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=["agent", "random"])
    parser.add_argument("--kills", type=int, default=5)
    random_kills = parser.add_argument_group("random")
    random_kills.add_argument("--stage", type=int, nargs="+", default=[1])
    random_kills.add_argument("--ranks", type=int, default=2)
    random_kills.add_argument("--pipeline", type=int, default=1)
    random_kills.add_argument("--weights", action="store_true", help="compress weights as well")
    random_kills.add_argument("--memory", action="store_true", help=f"also save in memory, every {IN_MEMORY} steps")
    random_kills.add_argument("--within", type=int, help="shard the model within nodes of so many ranks")
    random_kills.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    options = read_options()
    with tempfile.TemporaryDirectory() as place:
        for kind in options.kinds:
            if kind == "random":
                draw_all(options, Path(place))
                continue
            found = measure(Path(place) / kind, options.kills)
            print(kind, f"median {statistics.median(found):.2f} s of", [round(one, 2) for one in found], flush=True)


def draw_all(options: argparse.Namespace, place: Path) -> None:
    print(COLUMNS, "|---" * 7 + "|", sep="\n", flush=True)
    for stage in options.stage:
        layout = Layout(stage, options.ranks, options.pipeline, options.weights, options.memory, options.within)
        print(draw(layout, place / f"random_{stage}", options.kills, options.seed), flush=True)


if __name__ == "__main__":
    main()
