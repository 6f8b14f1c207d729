#!/usr/bin/env python3
"""Print what travels on which link in a step of a 7B Llama in three dimensions, with and without compression.

The planner computes bytes per rank, for activations in bf16 that are computed again in the backward pass. Sums of
tensor parallelism stay inside nodes, so they are merged and not compressed.

usage: python -m launch.studies.layout_traffic
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from deepspeed_compress.planner.cluster import NOTHING, Cluster, Links, Message
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.gpus import Constants, find_gpu
from deepspeed_compress.planner.layout import Layout, largest_stage
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.planner.traffic import DataParallel, stage_message, tensor_traffic
from launch.studies.harness import new_parser

LLAMA_7B = Model("7B", "llama", 32, 4096, 32, 32, 128, 11008, True, 32000, False)
SEQ, PER_NODE, GBIT = 4096, 8, 100
LAYOUTS = (
    Layout(2, 2, 4, zero=1, micro=1, accumulation=64, recompute="full"),
    Layout(2, 4, 8, zero=1, micro=1, accumulation=32, recompute="full"),
)
"""Tensor ranks, stages and replicas on 16 and on 64 GPUs, each with a million tokens per step."""
DEEPSPEED_SUMS, MERGED_SUMS = 9, 6
"""Sums of a layer: two forward, two again, and in the backward pass five, or two if they are merged."""
STAGE_BITS, STAGE_SCALE = 8, 16 / 64
"""Bits of activations between stages, and bits of their scales per element."""
KINDS = {
    "sums inside layers, merged": "`activations.tensor: {}`",
    "activations between stages, 8 bits": "`activations.pipeline: {}`",
    "gradients, 4 bits": "`gradients.bits: 4`",
    "updated weights, 4 bits": "`weights.bits: 4`",
}
"""Rows of the table, with the setting that makes the difference."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    new_parser(__doc__).parse_args(arguments)
    print(*table(), sep="\n")
    return 0


def table() -> Iterator[str]:
    """Yield the lines of a Markdown table: gigabytes that a rank sends per step, before and after."""
    columns = [f"{layout.ranks} GPUs, {link}" for layout in LAYOUTS for link in ("inside a node", "between nodes")]
    yield f"| GB per rank and step | setting | {' | '.join(columns)} |"
    yield "|---" * (2 + len(columns)) + "|"
    before = [messages(layout, compressed=False) for layout in LAYOUTS]
    after = [messages(layout, compressed=True) for layout in LAYOUTS]
    for kind, setting in KINDS.items():
        yield _row(kind, setting, [one[kind] for one in before], [one[kind] for one in after])
    yield _row("**all**", "", list(map(total, before)), list(map(total, after)))


def _row(kind: str, setting: str, before: Sequence[Message], after: Sequence[Message]) -> str:
    cells = []
    for plain, ours in zip(before, after, strict=True):
        cells += [_cell(plain.inside, ours.inside), _cell(plain.outside, ours.outside)]
    return f"| {kind} | {setting} | {' | '.join(cells)} |"


def _cell(before: float, after: float) -> str:
    return f"{before / 1e9:.3g} → {after / 1e9:.3g}" if before else ""


def messages(layout: Layout, compressed: bool) -> Mapping[str, Message]:
    """Return the messages of a rank in a step, by kind."""
    links = Links(Cluster(find_gpu("H100"), layout.ranks, PER_NODE, GBIT * 1e9 / 8), Constants())
    device = Device(links.cluster.gpu, Constants(), SOFTWARE["deepspeed"])
    layers, micro = LLAMA_7B.layers / layout.pipeline, layout.accumulation
    sums = tensor_traffic(links, device, LLAMA_7B, SEQ, layout)[0].times(layers * micro)
    # The planner charges DeepSpeed for whole tensors. Each tensor rank sends its part, as Megatron's do.
    stages = stage_message(links, LLAMA_7B, SEQ, replace(layout, engine="megatron")).times(micro)
    bits = 4 if compressed else 0
    between = replace(layout, gradient_bits=bits, weight_bits=bits)
    found = {
        one.name: one.message
        for one in DataParallel(links, device, LLAMA_7B, between, largest_stage(LLAMA_7B, between)).all()
    }
    sizes = (
        sums.times(MERGED_SUMS / DEEPSPEED_SUMS) if compressed else sums,
        stages.times((STAGE_BITS + STAGE_SCALE) / 16) if compressed else stages,
        found["gradients"],
        found["updated weights"],
    )
    return dict(zip(KINDS, sizes, strict=True))


def total(found: Mapping[str, Message]) -> Message:
    """Return the sum of all messages."""
    whole = NOTHING
    for message in found.values():
        whole = whole.then(message)
    return whole


if __name__ == "__main__":
    sys.exit(main())
