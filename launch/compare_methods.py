#!/usr/bin/env python3
"""Train one model with several compression methods and seeds, all else equal, and compare the held-out losses.

Ranks are forked from this process, so the imports are paid for once. Finished runs are kept and not repeated; the
table shows what is there.

examples:
  python launch/compare_methods.py --data data/shakespeare --output-dir runs/methods
  python launch/compare_methods.py --data data/shakespeare --output-dir runs/methods --methods none int4 --seeds 0
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

TOP_K = {"method": "topk", "density": 0.01, "values": {"method": "blockwise", "bits": 4}}
METHODS: dict[str, dict[str, Any]] = {
    "none": {"gradients": {"method": "none"}},
    "int8": {"gradients": {"method": "blockwise", "bits": 8}},
    "int4": {"gradients": {"method": "blockwise", "bits": 4}},
    "topk1_int4": {"gradients": TOP_K},
    "topk1_int4_warmup": {"gradients": TOP_K, "schedule": {"warmup_steps": 60}},
}
"""Sections to compare; the first one is the baseline."""


def main() -> int:
    options = _options()
    os.environ |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import torch

    import deepspeed_compress.engine
    import deepspeed_compress.training.main  # noqa: F401  (imported here, so that no rank needs to)

    torch.set_num_threads(1)
    for seed in options.seeds:
        for method in options.methods:
            run = options.output_dir / method / f"seed{seed}"
            if not (run / "summary.json").is_file():
                _train(options, method, seed, run)
    _print_table(options)
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files or directories")
    parser.add_argument("--output-dir", type=Path, required=True, help="one directory a method and seed is made here")
    parser.add_argument("--config", type=Path, default=Path("configs/zero2_none.json"), help="all but the method")
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_10m.json"))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seq-len", type=int, default=64)
    return parser.parse_args()


def _train(options: argparse.Namespace, method: str, seed: int, run: Path) -> None:
    run.mkdir(parents=True, exist_ok=True)
    config = json.loads(options.config.read_text())
    config["scheduler"]["params"]["total_num_steps"] = options.steps
    config["deepspeed_compress"] |= METHODS[method] | {"seed": seed}
    (run / "ds_config.json").write_text(json.dumps(config, indent=2))
    argv = ["--deepspeed_config", str(run / "ds_config.json"), "--model", str(options.model), "--output-dir", str(run)]
    argv += ["--data", *map(str, options.data), "--tokenizer", str(options.output_dir / "tokenizer")]
    argv += ["--steps", str(options.steps), "--seq-len", str(options.seq_len), "--seed", str(seed)]
    argv += ["--eval-every", "300", "--eval-batches", "64", "--sample-tokens", "0"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_rank, args=(rank, options.ranks, port, argv)) for rank in range(options.ranks)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    # DeepSpeed leaves 66 MiB of shared memory behind for every rank and port.
    for leftover in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
        leftover.unlink(missing_ok=True)
    if any(process.exitcode for process in ranks):
        sys.exit(f"{method}, seed {seed}: ranks ended with {[process.exitcode for process in ranks]}")


def _rank(rank: int, ranks: int, port: int, argv: list[str]) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    from deepspeed_compress.training.main import main as train

    sys.exit(train(argv))


def _print_table(options: argparse.Namespace) -> None:
    table = Table(title=f"held-out loss after {options.steps} steps, {options.ranks} ranks")
    for column in ("method", "seed", "loss", "against none", "bytes sent per step", "ratio"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in options.methods:
        gaps = []
        for seed in options.seeds:
            loss, base = (_loss(options, name, seed) for name in (method, next(iter(METHODS))))
            gaps.append(100 * (loss / base - 1))
            sent, ratio = _traffic(options.output_dir / method / f"seed{seed}")
            table.add_row(method, str(seed), f"{loss:.4f}", f"{gaps[-1]:+.2f} %", f"{sent:,.0f}", f"{ratio:.1f}")
        table.add_row(method, "mean", "", f"{statistics.mean(gaps):+.2f} %", "", "", end_section=True)
    Console(width=100).print(table)


def _loss(options: argparse.Namespace, method: str, seed: int) -> float:
    summary = options.output_dir / method / f"seed{seed}" / "summary.json"
    return float(json.loads(summary.read_text())["eval_loss"]) if summary.is_file() else float("nan")


def _traffic(run: Path) -> tuple[float, float]:
    """Mean bytes that a rank sends for gradients in a step, and how many times more DeepSpeed alone would."""
    lines = [json.loads(line) for line in (run / "compression.jsonl").read_text().splitlines()]
    sent = statistics.mean(line["bytes_sent"] for line in lines)
    return sent, statistics.mean(line["bytes_uncompressed"] for line in lines) / sent


if __name__ == "__main__":
    sys.exit(main())
