"""Models, clusters and jobs of the planner's tests."""

from dataclasses import replace
from typing import Any

from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.search import Job
from deepspeed_compress.planner.software import SOFTWARE

TOY = Model("toy", "gpt2", 3, 128, 4, 4, 32, 512, gated=False, vocab=4096, tied=True, positions=256)
LLAMA_7B = Model("llama-7b", "llama", 32, 4096, 32, 32, 128, 11008, True, 32000, False)
LLAMA_70B = Model("llama-70b", "llama", 80, 8192, 64, 8, 128, 28672, True, 128256, False)
LLAMA_1B = Model("llama-1b", "llama", 16, 2048, 32, 8, 64, 8192, True, 128256, True)


def job(gpus: str = "64xH100", network: str = "100gbit/node", model: Model = LLAMA_7B, **changed: Any) -> Job:
    """Return a job with the usual batch and software. `changed` replaces fields, and the nodes' size as `per_node`."""
    cluster = read_cluster(gpus, network, changed.pop("per_node", None))
    usual = Job(cluster, model, SOFTWARE["deepspeed"], 4096, 1024, 300e9)
    return replace(usual, **changed)


def layout(**changed: Any) -> Layout:
    """Return a layout for 64 ranks and 1,024 sequences."""
    return replace(Layout(1, 1, 64, 1, 1, 16), **changed)
