"""What a snapshot by `fork` would cost in place of copies: the call, and the page faults of the step after it.

    python -m launch.studies.fork_cost --model configs/models/gpt_10m.json

One process trains with AdamW. A child that is forked shows memory as it was, and every page that is written afterwards
is copied first. Processor time, medians of five; beside it, that of copying the weights.
"""

import argparse
import os
import signal
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from deepspeed_compress.models import build_model, read_model_config

REPEATS = 5


def seconds(work: Callable[[], object]) -> float:
    """Of the processor."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def fork() -> int:
    """A process that holds what it sees until it is killed."""
    child = os.fork()
    if not child:
        signal.pause()
    return child


def after_fork(step: Callable[[], object]) -> tuple[float, float]:
    """Seconds of the fork, and of `step` while the other process lives."""
    begun = time.process_time()
    child = fork()
    forked = time.process_time() - begun
    stepped = seconds(step)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return forked, stepped


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_10m.json"), help="a model's config")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = build_model(options.model, read_model_config(options.model), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    tokens = torch.randint(1000, (4, 64))
    model(input_ids=tokens, labels=tokens).loss.backward()
    weights = [parameter.detach() for parameter in model.parameters()]
    copies = [weight.clone() for weight in weights]
    optimizer.step()
    figures = {
        "step": statistics.median(seconds(optimizer.step) for _ in range(REPEATS)),
        "copy of the weights": statistics.median(
            seconds(lambda: [a.copy_(b) for a, b in zip(copies, weights, strict=True)]) for _ in range(REPEATS)
        ),
    }
    forked, stepped = zip(*(after_fork(optimizer.step) for _ in range(REPEATS)), strict=True)
    figures |= {"fork": statistics.median(forked), "step after it": statistics.median(stepped)}
    print(f"{sum(weight.numel() for weight in weights) / 1e6:.1f}M parameters")
    for name, found in figures.items():
        print(f"{name}: {1e3 * found:.1f} ms")


if __name__ == "__main__":
    main()
