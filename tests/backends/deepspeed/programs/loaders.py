"""Programs with data loaders of DeepSpeed, which divide the samples over the data-parallel ranks."""

from typing import Any

import torch
from deepspeed.runtime.data_pipeline.data_sampling.variable_batch_size_and_lr import (
    get_dataloader_and_lr_scheduler_for_variable_batch_size_deepspeed as vary_batch_size,
)
from torch import Tensor

from tests.backends.deepspeed.programs.models import network
from tests.backends.deepspeed.programs.program import WIDTH, Program, Run

_SAMPLES = 96
_TOKENS = 4
"""Number of tokens per sample that the program reports."""


def _samples() -> Tensor:
    return torch.randn(_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(7))


def _sampling(**keys: Any) -> dict[str, Any]:
    """Return the configuration of DeepSpeed's data sampling."""
    sampling = {"enabled": True, "num_workers": 0, "num_epochs": 2, **keys}
    return {"data_efficiency": {"enabled": True, "seed": 7, "data_sampling": sampling}}


def _train_on(run: Run, engine: Any, loader: Any) -> None:
    batches = iter(loader)
    for _ in range(4):
        x = next(batches)
        loss = (engine(x) - x[:, :3].sum(dim=1, keepdim=True)).square().mean()
        run.keep("loss", loss)
        engine.backward(loss)
        run.step(engine)


def dynamic_batching(run: Run) -> None:
    """Train on batches with about the same number of tokens."""
    batching = {"enabled": True, "lr_scaling_method": "linear", "min_batch_size": 1, "max_tokens": 3 * _TOKENS}
    sampling = _sampling(
        dynamic_batching={**batching, "metrics_path": "unused", "sequence_picking_order": "dataloader"}
    )
    scheduler = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
    engine = run.start(network(), {**sampling, **scheduler, "train_micro_batch_size_per_gpu": 1})
    lengths = [_TOKENS] * _SAMPLES
    _, engine.lr_scheduler, options = vary_batch_size(
        dataset=_samples(), dataset_seqlens=lengths, engine=engine, dataloader_collate_fn=torch.stack
    )
    _train_on(run, engine, engine.deepspeed_io(**options))


def curriculum(run: Run) -> None:
    """Train on samples that DeepSpeed's curriculum picks for all ranks."""
    schedule = {"total_curriculum_step": 4, "difficulty_step": 1}
    metric = {
        "index_to_sample_path": "unused",
        "index_to_metric_path": "unused",
        "difficulty_type": "value",
        "clustering_type": "single_cluster",
        "min_difficulty": 1,
        "max_difficulty": 2,
        "schedule_type": "fixed_linear",
        "schedule_config": schedule,
    }
    run.directory.mkdir(parents=True, exist_ok=True)
    learning = {"enabled": True, "data_cluster_path": str(run.directory), "curriculum_metrics": {"length": metric}}
    engine = run.start(network(), _sampling(curriculum_learning=learning))
    _train_on(run, engine, engine.deepspeed_io(_samples()))


PROGRAMS = (
    Program("dynamic batching", dynamic_batching),
    Program("curriculum of data sampling", curriculum),
)
