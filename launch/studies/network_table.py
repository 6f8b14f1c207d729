#!/usr/bin/env python3
"""Times of training steps at 10, 25 and 100 Gbit/s: a computed network, and one measured rank.

DeepSpeed's step is compared with ours in 8, 4 and 3 bits, under ZeRO 1 to 3, and under ZeRO 3 within nodes of eight
GPUs. Without a GPU, a small model runs on a core, and the network is scaled to it: sizes, rates and delays are to its
step what they are to a step of GPT-2 with 124 million parameters on an H200. Finished measurements are kept.

examples, from the root of the repository:
  python -m launch.studies.network_table --output-dir runs/network
  python -m launch.studies.network_table --output-dir runs/network --device cuda --models 124M 774M 1.3B --seq-len 1024
  python -m launch.studies.network_table --output-dir runs/network --ranks 16 --only "ZeRO 2" --rates 25gbit
"""

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from deepspeed_compress.planner.gpus import GPUS, Constants
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench import gauges, step_rank, systems
from deepspeed_compress.tools.bench.links import bits_per_second
from deepspeed_compress.tools.bench.workload import DEEPSPEED, Group, group_contenders
from launch.studies import computed_network
from launch.studies.computed_network import HostWire, StreamWire, Wires
from launch.studies.harness import CPU, markdown, new_parser, run_study, tracked

T = TypeVar("T")

PER_NODE = 8
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "ZeRO 1": {"zero_stage": 1},
    "ZeRO 2": {"zero_stage": 2},
    "ZeRO 3": {"zero_stage": 3},
    "hybrid": {"zero_stage": 3, "shard_within": PER_NODE},
}
"""Parallelism of the package's section by layout."""
COARSE = {"block_size": 128, "scale_dtype": "bf16"}
BITS: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "8 bits": ({"bits": 8}, {"bits": 8}),
    "4 bits": ({"bits": 4}, {"bits": 4}),
    "3 bits": ({"bits": 3, **COARSE}, {"method": "sign", "levels": 3, **COARSE}),
}
"""Settings of gradients, and of the weights that ZeRO 1 and 2 send."""
WEIGHTS = {"bits": 8}
"""Settings of the weights that ZeRO 3 sends."""
GPT2 = {"model_type": "gpt2", "n_positions": 1024, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
MODELS: Mapping[str, Mapping[str, int]] = {
    "2M": {"n_layer": 5, "n_embd": 160, "n_head": 5, "vocab_size": 4096},
    "124M": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "774M": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "1.3B": {"n_layer": 24, "n_embd": 2048, "n_head": 16},
}
"""Sizes of GPT-2."""
GPU, GPU_STEP, GPU_BYTES = "H200", 0.066, 2 * 124.4e6
"""Seconds of a step of GPT-2 with 124 million parameters on this GPU without a network, and bytes of its gradients."""
COLUMNS = ("model, ranks, rate", "layout", DEEPSPEED, *BITS)


@dataclass(frozen=True)
class Scale:
    """Relation of a CPU's steps to those of a GPU.

    Attributes:
        seconds: Seconds of a step's computation, relative to those of the GPU.
        rate: Rates that are to a step what those of the GPU are to its step, relative to these.
    """

    seconds: float = 1.0
    rate: float = 1.0


class ScaledWire(HostWire):
    """Card of a GPU for which a rank on the host stands."""

    def __init__(self, scale: Scale) -> None:
        super().__init__()
        gpu = GPUS[GPU]
        self.gpu, self._delay = replace(gpu, link_rate=scale.rate * gpu.link_rate), scale.seconds

    def constants(self, kind: str, ranks: int) -> Constants:
        """Return the constants of a collective: those of NCCL with delays that are as long, relative to a step."""
        return Constants(delay=self._delay)


@dataclass(frozen=True)
class Work:
    """Measurement of a layout in a process of its own, on `ranks` ranks of which one is measured."""

    layout: str
    model: str
    ranks: int
    rates: Sequence[str]
    options: Mapping[str, Any]
    scale: Scale | None = None

    @property
    def name(self) -> str:
        return f"{Path(self.model).stem}_{self.ranks}_{self.layout.replace(' ', '').lower()}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing, and print the table."""
    parser = new_parser(__doc__)
    add = parser.add_argument
    add("--output-dir", type=Path, required=True, metavar="DIR", help="directory for the figures")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="(default: cpu)")
    add("--models", nargs="+", choices=MODELS, default=["2M"], help="sizes of GPT-2 (default: 2M)")
    add("--ranks", type=positive_integer, nargs="+", default=[16, 64], help="multiples of 8 (default: 16 64)")
    add("--rates", nargs="+", default=["10gbit", "25gbit", "100gbit"], metavar="RATE")
    add("--only", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT", help="(default: all)")
    add("--micro-batch", type=positive_integer, default=8, help="sequences (default: 8)")
    add("--seq-len", type=positive_integer, default=128, help="tokens of a sequence (default: 128)")
    add("--steps", type=positive_integer, default=3, help="measured steps (default: 3)")
    options = parser.parse_args(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    return run_study(_study, options, CPU if options.device == "cpu" else {"DS_ACCELERATOR": "cuda"})


def _study(options: argparse.Namespace) -> bool:
    found = [(work, outcome(work, options.output_dir)) for work in tracked(list(works(options)))]
    print(markdown(COLUMNS, [row(work, rate, one[rate]) for work, one in found for rate in work.rates]), end="")
    return True


def works(options: argparse.Namespace) -> Iterator[Work]:
    """Yield what is to be measured."""
    given = {name: getattr(options, name) for name in ("device", "micro_batch", "seq_len", "steps")}
    for name in options.models:
        model = options.output_dir / f"{name}.json"
        write_json(model, {**GPT2, **MODELS[name]})
        first = Work(options.only[0], str(model), PER_NODE, options.rates, given)
        scale = find_scale(first, options.output_dir) if options.device == "cpu" else None
        for ranks in options.ranks:
            yield from (replace(first, layout=layout, ranks=ranks, scale=scale) for layout in options.only)


def find_scale(work: Work, directory: Path) -> Scale:
    """Return how this CPU's computation relates to that of a GPU, measured or from an earlier run."""
    file = directory / f"{Path(work.model).stem}_scale.json"
    if not file.is_file():
        write_json(file, asdict(in_process(measure_scale, work)))
    return Scale(**json.loads(file.read_text(encoding="utf-8")))


def measure_scale(work: Work) -> Scale:
    """Measure the computation of a step."""
    gauges.join_images(work.ranks, work.ranks)
    workload = group_of(work).workload
    system = systems.compute_only(workload)
    step = step_rank.step_of(workload, system)
    gauges.times(step, system.first_steps)
    seconds = statistics.median(gauges.times(step, work.options["steps"])) / GPU_STEP
    return Scale(seconds, 4 * read_model(Path(work.model)).parameters / GPU_BYTES / seconds)


def outcome(work: Work, directory: Path) -> Mapping[str, Mapping[str, float]]:
    """Return the seconds of steps by rate and system, of an earlier run if there is one."""
    file = directory / f"{work.name}.json"
    if not file.is_file():
        write_json(file, in_process(measure, work))
    found: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def in_process(function: Callable[[Work], T], work: Work) -> T:
    """Return the result of a function in a new process, because a process has one default group."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, work).result()


def measure(work: Work) -> dict[str, dict[str, float]]:
    """Measure the steps of all systems at all rates."""
    rates = {(work.scale or Scale()).rate * bits_per_second(rate): rate for rate in work.rates}
    wires = Wires(work.ranks, PER_NODE, ScaledWire(work.scale) if work.scale else StreamWire())
    computed_network.join(wires)
    found: dict[str, dict[str, float]] = {rate: {} for rate in work.rates}
    for rate, row in computed_network.measure(wires, group_of(work), dict.fromkeys(rates, work.options["steps"])):
        found[rates[rate]][row["contender"]["name"]] = row["step_s"]["median"]
    return found


def group_of(work: Work) -> Group:
    """Return DeepSpeed and ours with all bits."""
    sizes = {"micro_batch": work.options["micro_batch"], "seq_len": work.options["seq_len"], "seed": 0}
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / f"{bits}.json" for bits in BITS]
        for file in files:
            write_json(file, ds_config(work.layout, file.stem, work.options["device"] == "cuda"))
        [group] = group_contenders(list(map(str, files)), work.model, [DEEPSPEED], sizes, work.ranks)
    return group


def ds_config(layout: str, bits: str, bf16: bool) -> dict[str, Any]:
    """Return the configuration of a layout with gradients, and weights if they are sent, of so many bits."""
    parallelism, (gradients, weights) = LAYOUTS[layout], BITS[bits]
    sent = {} if "shard_within" in parallelism else {"weights": WEIGHTS if parallelism["zero_stage"] == 3 else weights}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": bf16},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": parallelism["zero_stage"]},
        "deepspeed_compress": {"parallelism": parallelism, "gradients": gradients, **sent},
    }


def row(work: Work, rate: str, found: Mapping[str, float]) -> Sequence[str]:
    """Return the cells of a layout at a rate: seconds, and how many times as fast as DeepSpeed."""
    plain = found[DEEPSPEED]
    ours = [f"{found[bits]:.3f}, {plain / found[bits]:.2f}" for bits in BITS]
    return (f"{Path(work.model).stem}, {work.ranks}, {rate}", work.layout, f"{plain:.3f}", *ours)


if __name__ == "__main__":
    sys.exit(main())
