#!/usr/bin/env python3
"""Recompute three claims about compression and ZeRO with the planner.

1. With a 10B model on 128 nodes, communication falls from 58 to 22 % of a step, and throughput rises 1.8 times.
2. A 100B model trains at 100 to 380 tokens/s per GPU on 512 A100.
3. A 175B model needs 700, 35 and 1.2 GB per GPU with data parallelism, ZeRO 2 and ZeRO 3.

usage: python -m launch.studies.planner_claims
"""

import argparse
import sys
from collections.abc import Iterator, Sequence

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.gpus import find_gpu
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.memory import Needs
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.search import Candidate, Job, search
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.planner.sweep import KINDS, best
from launch.studies.planner_scaling import MODELS

GPT_10B = Model("10B", "llama", 48, 4096, 32, 32, 128, 11008, True, 32000, False)
GPT_100B = Model("100B", "gpt2", 80, 10240, 80, 80, 128, 40960, False, 50257, True, positions=2048)
A100, SEQ = "A100", 2048
RATES = (10, 25, 50, 100, 200, 400, 1600)
"""Gbit/s of a node."""
SIZES = (128, 512, 1024, 2048)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print our figure for each claim."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    for per_node, batch in ((1, 1024), (8, 2048)):
        for rate in RATES:
            print(*communication(per_node, batch, rate), sep="\n", flush=True)
    for program in ("deepspeed", "megatron"):
        for rate in RATES:
            print(throughput(program, rate), flush=True)
    print(*map(memory, SIZES), sep="\n")
    return 0


def communication(per_node: int, batch: int, gbit: float) -> Iterator[str]:
    """Yield the lines of claim 1 for data parallelism alone, and for all layouts."""
    fitting = search(job(GPT_10B, 128 * per_node, per_node, gbit, batch)).fitting
    replicas = [one for one in fitting if one.layout.tensor == one.layout.pipeline == 1]
    for name, found in (("data parallelism", replicas), ("all layouts", fitting)):
        plain, packed = (best(found, KINDS)[kind] for kind in ("uncompressed", "compressed"))
        gain = plain.prediction.seconds / packed.prediction.seconds
        shares = f"{100 * waiting(plain):.0f} -> {100 * waiting(packed):.0f} % communication, {gain:.2f} times as fast"
        yield f"128 x {per_node} A100, {gbit:g} Gbit/s, {name}: {shares} ({plain.layout}, {packed.layout})"


def throughput(program: str, gbit: float) -> str:
    """Return the line of claim 2."""
    found = best(search(job(GPT_100B, 512, 8, gbit, 1536, program)).fitting, KINDS)
    figures = (
        f"{kind} {found[kind].prediction.rate / 512:.0f} ({found[kind].layout})" for kind in KINDS if kind in found
    )
    return f"512 A100, {gbit:g} Gbit/s, {program}, tokens/s per GPU: {', '.join(figures)}"


def memory(gpus: int) -> str:
    """Return the line of claim 3: gigabytes of weights, gradients and optimizer states, by ZeRO stage."""
    cluster, layouts = Cluster(find_gpu(A100), gpus, 8, 0.0), (Layout(1, 1, gpus, zero, 1, 1) for zero in range(4))
    needs = (Needs(cluster, MODELS["175B"], SOFTWARE["deepspeed"], SEQ, layout) for layout in layouts)
    states = (one.fullest().states for one in needs)
    return f"{gpus} GPUs, GB of states of 175B with ZeRO 0 to 3: {', '.join(f'{size / 1e9:.1f}' for size in states)}"


def job(model: Model, gpus: int, per_node: int, gbit: float, batch: int, program: str = "deepspeed") -> Job:
    """Return a job on A100 with 20 tokens for each parameter."""
    cluster = Cluster(find_gpu(A100), gpus, per_node, gbit * 1e9 / 8)
    return Job(cluster, model, SOFTWARE[program], SEQ, batch, 20.0 * model.parameters)


def waiting(candidate: Candidate) -> float:
    """Return the share of a step that communication takes and that nothing hides."""
    return sum(candidate.prediction.share(kind) for kind in ("NVLink", "network"))


if __name__ == "__main__":
    sys.exit(main())
