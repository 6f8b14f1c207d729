"""Peak resident memory of each rank while it loads a saved model, compared with the size of its shard.

python -m tests.models.loading_memory
"""

import gc
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed

from deepspeed_compress.models import Layout, build_model, build_parallel, read_model_config
from tests.models.families import save_model, write_config
from tests.support.forks import run_forks

SIZES = {
    "vocab_size": 8000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LAYOUTS = (Layout(pipeline=2), Layout(tensor=2), Layout(tensor=2, pipeline=2), Layout(tensor=4))
MB = 10**6


@dataclass(frozen=True)
class Loaded:
    """Bytes of this rank's shard, and the increase of its resident memory, at the peak and after loading."""

    shard: int
    peak: int
    after: int


def load(rank: int, path: Path, small: Path, layout: Layout) -> Loaded:
    """Load the model at `path`. `small` is loaded first, so that code, groups and gloo's buffers are not counted."""
    deepspeed.init_distributed("gloo")
    build_parallel(small, read_model_config(small), 0, layout)
    config = read_model_config(path)
    gc.collect()
    # This resets the peak that the kernel records.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    module = build_parallel(path, config, 0, layout)
    gc.collect()
    return Loaded(tensor_bytes(module), memory("VmHWM") - before, memory("VmRSS") - before)


def memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def tensor_bytes(module: Any) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        file = write_config(Path(directory) / "config", "llama", tied=False, **SIZES)
        model: Any = build_model(file, read_model_config(file), seed=0)
        model.save_pretrained(directory, max_shard_size="25MB")
        largest = max(parameter.numel() * parameter.element_size() for parameter in model.parameters())
        small = save_model(Path(directory) / "small", "llama", tied=False, num_attention_heads=8, num_key_value_heads=4)
        print(f"model {tensor_bytes(model) / MB:.1f} MB, largest tensor {largest / MB:.1f} MB\n")
        del model
        print("| layout | shard, MB | peak, MB | peak - shard, MB | after, MB |\n|---|---|---|---|---|")
        for layout in LAYOUTS:
            for loaded in run_forks(layout.tensor * layout.pipeline, load, Path(directory), small, layout):
                figures = (loaded.shard, loaded.peak, loaded.peak - loaded.shard, loaded.after)
                cells = " | ".join(f"{figure / MB:.1f}" for figure in figures)
                print(f"| tensor {layout.tensor} x pipeline {layout.pipeline} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
