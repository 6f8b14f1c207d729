"""Two islands of which one is slower, for equal wall time: samples a second, and the loss of what they agree upon.

    python -m launch.studies.unequal_islands --data data/shakespeare --seconds 60

Each is a process of one rank that trains a small GPT on bytes of text. A step takes a fixed time, most of which is
sleep, so that other work on the machine says little; the slower one's takes a multiple. They are one job, meet in
rounds, or are asynchronous; and the faster one trains alone. The loss is that of held-out text, with the anchor of the
faster island.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import deepspeed_compress
from deepspeed_compress.local_sgd.coordinator.server import island_server
from deepspeed_compress.local_sgd.parameter_server.server import Server as ParameterServer
from deepspeed_compress.training.data import text_files

SEQUENCES, TOKENS, HELD_OUT = 4, 64, 64
INT4 = {"method": "blockwise", "bits": 4}
WAYS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType(
    {
        "alone": None,
        "one job": {"size": 1},
        "rounds": {"elastic": {"timeout": "5 s"}},
        "asynchronous": {"elastic": {"timeout": "5 s", "parameter_server": {}}},
    }
)
"""Settings of islands; None: no others."""


def main() -> None:
    options = parse()
    if options.island is not None:
        live(options)
        return
    for way in options.ways:
        for _ in range(options.repeats):
            print(json.dumps(measure(way, options)), flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of text, or a file")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training, once both are there")
    parser.add_argument("--slower", type=float, default=4.0, help="how many times slower the second island is")
    parser.add_argument("--step", type=float, default=0.15, help="seconds that a step of the faster one takes")
    parser.add_argument("--sync-every", type=int, default=20, help="optimizer steps")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS))
    parser.add_argument("--island", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", default="", help=argparse.SUPPRESS)
    parser.add_argument("--together", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def measure(way: str, options: argparse.Namespace) -> dict[str, Any]:
    """Of both islands together."""
    count = 1 if way == "alone" else 2
    with serving(way) as address, tempfile.TemporaryDirectory() as together:
        shared = [sys.executable, "-m", "launch.studies.unequal_islands", *sys.argv[1:], "--ways", way]
        shared += ["--address", address, "--together", together]
        port = free_port()
        islands = [
            subprocess.Popen([*shared, "--island", str(one)], env=environment(way, one, port), stdout=subprocess.PIPE)
            for one in range(count)
        ]
        found = [json.loads(island.communicate()[0].splitlines()[-1]) for island in islands]
    samples = [one["samples"] for one in found]
    exchanges = [one["exchanges"] for one in found]
    figures = {"loss": found[0]["loss"], "cosine": found[0]["cosine"]}
    rate = sum(samples) / options.seconds
    return {"way": way, "samples": samples, "rate": rate, "exchanges": exchanges, **figures}


def environment(way: str, island: int, port: int) -> dict[str, str]:
    """One job of two ranks, or a job each."""
    world = 2 if way == "one job" else 1
    rank, own_port = (island, port) if world == 2 else (0, port + island)
    places = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": own_port}
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in places.items()}}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(way: str) -> Iterator[str]:
    """The address of what islands need."""
    server = ParameterServer(None, "127.0.0.1", 0) if way == "asynchronous" else island_server(None, "127.0.0.1", 0)
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), daemon=True)
    thread.start()
    ready.wait()
    yield f"127.0.0.1:{server.port}"
    server.stop()
    thread.join()


def live(options: argparse.Namespace) -> None:
    """An island: prints what it has done."""
    data = torch.frombuffer(b"".join(file.read_bytes() for file in text_files([options.data])), dtype=torch.uint8)
    cut = len(data) - 20_000
    engine = make(options)
    generator = torch.Generator().manual_seed(options.island)
    train_step(engine, data[:cut], generator, 0.0)
    together(options)
    end, steps = time.monotonic() + options.seconds, 0
    meter, cosines = engine.compression.meter, []
    while time.monotonic() < end:
        train_step(engine, data[:cut], generator, options.step * (options.slower if options.island else 1.0))
        steps += 1
        cosines += [meter.islands_cosine()] if meter.islands_cosine is not None else []
    islands = engine.compression.islands
    history = getattr(islands, "history", ())
    exchanges = sum(met.kind == "exchange" for met in history)
    found: dict[str, Any] = {"samples": steps * SEQUENCES, "exchanges": exchanges}
    found["cosine"] = round(statistics.median(cosines), 3) if cosines else None
    if options.island == 0:
        found["loss"] = held_out(engine, data[cut:])
    print(json.dumps(found), flush=True)
    # Of one job, the other rank may be waiting for an exchange that does not come.
    os._exit(0)


def make(options: argparse.Namespace) -> Any:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_positions=TOKENS, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    section: dict[str, Any] = {"gradients": {"method": "none"}, "monitor": {"announce": False}}
    own = WAYS[options.ways[0]]
    if own is not None:
        section["islands"] = {"sync_every": options.sync_every, "exchange": INT4, **own}
    if own is not None and "elastic" in own:
        section["islands"]["elastic"] = {"rendezvous": options.address, **own["elastic"]}
    config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": 1},
        "deepspeed_compress": section,
    }
    return deepspeed_compress.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def batch(data: torch.Tensor, generator: torch.Generator, size: int) -> torch.Tensor:
    starts = torch.randint(0, len(data) - TOKENS, (size,), generator=generator)
    return torch.stack([data[start : start + TOKENS] for start in starts]).long()


def train_step(engine: Any, data: torch.Tensor, generator: torch.Generator, seconds: float) -> None:
    """What islands exchange is not in these `seconds`."""
    end = time.monotonic() + seconds
    tokens = batch(data, generator, SEQUENCES)
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    time.sleep(max(0.0, end - time.monotonic()))
    engine.step()


def together(options: argparse.Namespace) -> None:
    """Wait until all islands have taken their first step."""
    count = 1 if options.ways[0] == "alone" else 2
    (options.together / str(options.island)).touch()
    while len(list(options.together.iterdir())) < count:
        time.sleep(0.01)


def held_out(engine: Any, data: torch.Tensor) -> float:
    """With the anchor of islands that come and go, else with the weights."""
    islands, named = engine.compression.islands, dict(engine.module.named_parameters())
    exchange = getattr(islands, "exchange", None)
    if exchange is not None:
        anchor = exchange.stores.by_name["anchor"]
        for (name, begin, numel), values in anchor.items():
            named[name].data.view(-1)[begin : begin + numel] = values
    with torch.no_grad():
        tokens = batch(data, torch.Generator().manual_seed(99), HELD_OUT)
        return float(engine.module(input_ids=tokens, labels=tokens).loss)


if __name__ == "__main__":
    main()
