#!/usr/bin/env python3
"""Measure LoRA of a small Llama on emulated hosts of a slow network: ZeRO 2 and 3, over all ranks and within hosts.

    python -m launch.studies.finetuning --output-dir runs/finetuning
    python -m launch.studies.finetuning --output-dir runs/finetuning --rates 1gbit --only "ZeRO 3" "ZeRO 3 within hosts"

All runs train the same adapters on the same batches, on a Llama with 47 million frozen parameters. "One host alone" is
the same work on every host at once, without any message between them, so it is what a network without cost would give.
Bytes are those that the interface of a host counts in a step, without headers. Finished runs are kept. Needs Linux,
network namespaces (docs/quickstart.md) and PEFT.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import deepspeed_compress
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench import gauges
from deepspeed_compress.tools.bench.hosts import Cluster, signals_as_exceptions
from deepspeed_compress.tools.bench.links import UNLIMITED, enter_user_namespace, set_own_rate
from deepspeed_compress.tools.bench.step import HEADER_BYTES
from launch.studies.harness import markdown, new_parser, tracked

MODEL: Mapping[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "tie_word_embeddings": False,
}
LENGTH, RANK, SETTLING = 64, 8, 1
"""Tokens of a sequence, rank of the adapters, and first steps at each rate that are not reported."""
ALONE = "one host alone"
WITHIN = {"parallelism": {"shard_within": "node"}}
FOUR = {"bits": 4}
CONTENDERS: Mapping[str, tuple[int, Mapping[str, Any] | None]] = {
    ALONE: (3, None),
    "ZeRO 2": (2, None),
    "ZeRO 2, 4 bits": (2, {"gradients": FOUR}),
    "ZeRO 3": (3, None),
    "ZeRO 3, 4 bits, weights 8 bits": (3, {"gradients": FOUR, "weights": {"bits": 8, "frozen": True}}),
    "ZeRO 3 within hosts": (3, {"gradients": {"method": "none"}, **WITHIN}),
    "ZeRO 3 within hosts, 4 bits": (3, {"gradients": FOUR, **WITHIN}),
}
"""ZeRO stage and section of each contender; without a section, DeepSpeed alone."""
COLUMNS = ("", "rate", "s per step", "of one host alone", "MB that a host sends", "last loss")


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for the figures of each run")
    add("--hosts", type=positive_integer, default=4, help="default: 4")
    add("--per-host", type=positive_integer, default=2, help="ranks of a host (default: 2)")
    add("--rates", nargs="+", default=["1gbit", "100mbit"], metavar="RATE", help="default: 1gbit 100mbit")
    add("--steps", type=positive_integer, default=5, help="measured steps at each rate (default: 5)")
    add("--layers", type=positive_integer, default=MODEL["num_hidden_layers"], help="(default: %(default)s)")
    add("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME", help="default: all")
    add("--rank-of", choices=CONTENDERS, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the missing runs, print the table, and return the exit status."""
    options = parse_options(argv)
    if options.rank_of is not None:
        measure(options)
        return 0
    enter_user_namespace([sys.executable, "-m", "launch.studies.finetuning", *sys.argv[1:]])
    with signals_as_exceptions():
        found = {name: run(options, name) for name in tracked(options.only)}
    print(markdown(COLUMNS, table(found)), end="")
    return 0


def run(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the figures of a contender by rate, of an earlier run if there is one."""
    file = options.output_dir / f"{name.replace(' ', '_').replace(',', '')}.json"
    if not file.is_file():
        options.output_dir.mkdir(parents=True, exist_ok=True)
        given = ["--output-dir", file, "--steps", options.steps, "--layers", options.layers]
        command = [sys.executable, "-m", "launch.studies.finetuning", *map(str, given), "--rates", *options.rates]
        with Cluster(options.hosts, UNLIMITED, options.per_host) as cluster:
            done = cluster.run([*command, "--rank-of", name], timeout=3600)
        if done.failure is not None:
            raise SystemExit(f"{name}: {done.failure}\n{''.join(done.outputs)[-3000:]}")
    result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return result


def table(found: Mapping[str, Mapping[str, Any]]) -> list[Sequence[str]]:
    """Return the rows, by rate."""
    rows: list[Sequence[str]] = []
    for rate in next(iter(found.values())):
        for name, rates in found.items():
            figures, alone = rates[rate], found.get(ALONE, {}).get(rate)
            ratio = "" if alone is None else f"{figures['seconds'] / alone['seconds']:.2f}"
            sent, loss = f"{figures['sent'] / 1e6:,.3f}", f"{figures['losses'][-1]:.6f}"
            rows.append((name, rate, f"{figures['seconds']:.3f}", ratio, sent, loss))
    return rows


def measure(options: argparse.Namespace) -> None:
    """Train on this rank at each rate. The first rank writes the figures to the file `--output-dir`."""
    is_first = os.environ["RANK"] == "0"
    if options.rank_of == ALONE:
        _leave_other_hosts()
    gauges.join()
    trainer = Trainer(options)
    figures = {rate: trainer.measure(rate, options.steps) for rate in options.rates}
    if is_first:
        write_json(options.output_dir, figures)


def _leave_other_hosts() -> None:
    """Make this host a job of its own."""
    size = os.environ["LOCAL_SIZE"]
    network, _, _ = os.environ["MASTER_ADDR"].rpartition(".")
    own = f"{network}.{int(os.environ['RANK']) // int(size) + 1}"
    os.environ |= {"RANK": os.environ["LOCAL_RANK"], "WORLD_SIZE": size, "MASTER_ADDR": own}


class Trainer:
    """Engine of a contender on this rank, and the losses of its steps."""

    def __init__(self, options: argparse.Namespace) -> None:
        stage, section = CONTENDERS[options.rank_of]
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**MODEL, "num_hidden_layers": options.layers}))
        adapted = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear"))
        ds_config = {
            "train_micro_batch_size_per_gpu": 1,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
            "deepspeed_compress": section or {"gradients": {"method": "none"}},
        }
        self._engine = deepspeed_compress.initialize(model=adapted, config=ds_config)[0]
        if section is None:
            deepspeed_compress.detach(self._engine)
        self._losses: list[float] = []

    def measure(self, rate: str, steps: int) -> dict[str, Any]:
        """Return the seconds of a step, the bytes that this host sends in one, and all losses so far."""
        set_own_rate(rate)
        gauges.times(self._step, SETTLING)
        before = gauges.quiet_counters()
        seconds = gauges.times(self._step, steps)
        after = gauges.quiet_counters()
        set_own_rate(UNLIMITED)
        sent = {name: (after[name] - before[name]) / steps for name in after}
        losses = [statistics.fmean(ranks) for ranks in zip(*gauges.gather(self._losses), strict=True)]
        payload = sent["interface"] - HEADER_BYTES * sent["packets"]
        return {"seconds": gauges.over_ranks(seconds)["median"], "all": seconds, "sent": payload, "losses": losses}

    def _step(self) -> None:
        generator = torch.Generator().manual_seed(len(self._losses) * dist.get_world_size() + dist.get_rank())
        tokens = torch.randint(MODEL["vocab_size"], (1, LENGTH), generator=generator)
        loss = self._engine(input_ids=tokens, labels=tokens).loss
        self._engine.backward(loss)
        self._engine.step()
        self._losses.append(loss.item())


if __name__ == "__main__":
    sys.exit(main())
