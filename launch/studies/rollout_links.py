"""Measure weight updates from a trainer to a rollout worker on another host, over links of several rates.

    python -m launch.studies.rollout_links --output-dir runs/links

Two emulated hosts run a trainer and a receiver. The trainer serves a store, and publishes each of its steps in a
thread. The receiver asks for a new version all the time, while requests use its module. Rows compare exact updates,
whole bf16 weights, and the compressed xor of the weights. Times are means over the versions after the first `--settle`.
Needs Linux and network namespaces (see docs/quickstart.md).
"""

import argparse
import json
import os
import secrets
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.rollout import Publisher, Receiver
from deepspeed_compress.rollout.served_store import ServedStore, StoreServer
from deepspeed_compress.rollout.store import DirectoryStore, Store
from deepspeed_compress.tools.bench.hosts import Cluster, signals_as_exceptions
from deepspeed_compress.tools.bench.links import enter_user_namespace
from deepspeed_compress.transport.credentials import SECRET
from launch.studies.harness import markdown, new_parser, tracked
from launch.studies.plain_updates import CODINGS, PlainPublisher, PlainReceiver

NOTHING, EXACT = "nothing", "exact"
MODES = (NOTHING, EXACT, *CODINGS)
PORT, END = 29600, "end"
ROWS, TOKENS = 4, 64
POLL_S = 0.01
COLUMNS = (
    "rate",
    "sent",
    "MB",
    "step s",
    "trainer waits ms",
    "of a step",
    "receiver waits ms",
    "served after s",
    "served",
)


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for the figures of each run")
    add("--model", type=Path, default=Path("configs/models/gpt_10m.json"), help="default: configs/models/gpt_10m.json")
    add("--rates", nargs="+", default=["100mbit", "1gbit"], metavar="RATE", help="default: 100mbit 1gbit")
    add("--modes", nargs="+", choices=MODES, default=list(MODES), help="default: all")
    add("--steps", type=int, default=30, metavar="N", help="steps, and versions; default: 30")
    add("--settle", type=int, default=5, metavar="N", help="first versions that are not reported; default: 5")
    add("--lr", type=float, default=1e-6, help="learning rate; default: 1e-6")
    add("--mode", choices=MODES, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> None:
    options = parse_options()
    if options.mode is not None:
        torch.set_num_threads(1)
        (train if os.environ["RANK"] == "0" else follow)(options)
        return
    enter_user_namespace([sys.executable, "-m", "launch.studies.rollout_links", *sys.argv[1:]])
    with signals_as_exceptions():
        pairs = tracked(list(product(options.rates, options.modes)))
        rows = [cells(rate, mode, run(options, rate, mode), options.settle) for rate, mode in pairs]
    print(markdown(COLUMNS, rows), end="")


def run(options: argparse.Namespace, rate: str, mode: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the figures of the trainer and of the receiver."""
    directory = options.output_dir / f"{rate}-{mode}"
    directory.mkdir(parents=True, exist_ok=True)
    given = ["--model", options.model, "--steps", options.steps, "--lr", options.lr, "--output-dir", directory]
    command = [sys.executable, "-m", "launch.studies.rollout_links", *map(str, given), "--mode", mode]
    with Cluster(2, rate) as cluster:
        done = cluster.run(command, {SECRET: secrets.token_hex(16)}, timeout=1800)
    if done.failure is not None:
        raise SystemExit(f"{rate}, {mode}: {done.failure}\n{''.join(done.outputs)[-3000:]}")
    trainer, receiver = (json.loads((directory / f"{name}.json").read_text()) for name in ("trainer", "receiver"))
    return trainer, receiver


def train(options: argparse.Namespace) -> None:
    """Train, publish each step, and write the figures of the trainer."""
    model, tokens = make_model(options.model), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    steps, pauses, ends = [], [], {}
    with TemporaryDirectory() as directory, StoreServer(DirectoryStore(directory), "", PORT) as _:
        store = DirectoryStore(directory)
        publisher = make_publisher(options.mode, model, store)
        publisher.publish()
        publisher.wait()
        for number in range(options.steps):
            begin = time.time()
            batch = torch.randint(model.config.vocab_size, (ROWS, TOKENS), generator=tokens)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ends[number + 2] = time.time()
            publisher.publish()
            pauses.append(time.time() - ends[number + 2])
            steps.append(time.time() - begin)
        publisher.wait()
        sizes = version_sizes(store)
        store.put(END, b"")
        write(options, "trainer", {"steps": steps, "pauses": pauses, "ends": ends, "sizes": sizes})
        while END in store.names():
            time.sleep(POLL_S)


def version_sizes(store: DirectoryStore) -> dict[int, int]:
    """Return the bytes of each version in a store, without full copies of exact updates."""
    sizes: dict[int, int] = {}
    for name in store.names():
        if ".full." not in name:
            version = int(name.partition(".")[0])
            sizes[version] = sizes.get(version, 0) + len(store.get(name))
    return sizes


class NoPublisher:
    """Publisher of nothing, for the time of a step alone."""

    def publish(self) -> None: ...

    def wait(self) -> None: ...


def make_publisher(mode: str, model: nn.Module, store: Store) -> Any:
    if mode == NOTHING:
        return NoPublisher()
    if mode == EXACT:
        return Publisher(model, store, full_every=10**6, asynchronous=True)
    return PlainPublisher(model, store, CODINGS[mode])


def follow(options: argparse.Namespace) -> None:
    """Receive each version, and write when it was served, and how long requests had to wait."""
    served: dict[int, float] = {}
    waits: list[float] = []
    module = make_model(options.model).to(torch.bfloat16)
    with closing(connect(f"tcp://{os.environ['MASTER_ADDR']}:{PORT}")) as store:
        receiver: Any = Receiver(module, store) if options.mode in (NOTHING, EXACT) else None
        receiver = receiver or PlainReceiver(module, store, CODINGS[options.mode])
        while True:
            ended = END in store.names()
            with requests(receiver) as waited:
                changed = receiver.update()
            if changed:
                served[receiver.version] = time.time()
                waits.append(max(waited, default=0.0))
            elif ended:
                break
            time.sleep(POLL_S)
        write(options, "receiver", {"served": served, "waits": waits})
        store.delete(END)


def connect(address: str) -> ServedStore:
    """Return the served store, as soon as its server listens."""
    while True:
        store = ServedStore(address)
        try:
            store.names()
        except OSError:
            store.close()
            time.sleep(0.1)
        else:
            return store


@contextmanager
def requests(receiver: Any) -> Iterator[list[float]]:
    """Make a request every millisecond inside the block. Yields the seconds that each had to wait."""
    waited: list[float] = []
    stopped = threading.Event()

    def ask() -> None:
        while receiver.version and not stopped.wait(0.001):
            begin = time.perf_counter()
            with receiver.request():
                waited.append(time.perf_counter() - begin)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield waited
    finally:
        stopped.set()
        thread.join()


def make_model(file: Path) -> Any:
    return build_model(file, read_model_config(file), seed=0)


def write(options: argparse.Namespace, name: str, figures: Mapping[str, Any]) -> None:
    (options.output_dir / f"{name}.json").write_text(json.dumps(figures))


def cells(rate: str, mode: str, figures: tuple[dict[str, Any], dict[str, Any]], settle: int) -> list[str]:
    """Return the cells of a row, of the versions after the first ones."""
    trainer, receiver = figures
    step, pause = (statistics.fmean(trainer[key][settle:]) for key in ("steps", "pauses"))
    found = [rate, mode]
    if mode == NOTHING:
        return [*found, "", f"{step:.3f}", "", "", "", "", ""]
    size = statistics.fmean(size for version, size in trainer["sizes"].items() if int(version) > settle + 1)
    ends = {version: end for version, end in trainer["ends"].items() if int(version) > settle + 1}
    after = [receiver["served"][version] - end for version, end in ends.items() if version in receiver["served"]]
    waits = statistics.fmean(receiver["waits"][-len(after) :])
    return [
        *found,
        f"{size / 1e6:.2f}",
        f"{step:.3f}",
        f"{1e3 * pause:.1f}",
        f"{pause / step:.1%}",
        f"{1e3 * waits:.1f}",
        f"{statistics.fmean(after):.2f}",
        f"{len(after)} of {len(ends)}",
    ]


if __name__ == "__main__":
    main()
