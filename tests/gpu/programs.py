"""Programs of ranks: training at every ZeRO stage, with and without delays, and a language model."""

import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from tests.gpu.delays import Late, delay_messages, late_streams
from tests.gpu.training import INT4, LanguageModel, Shape, digest, make_engine, markov_text, network, train_step

STAGES = (0, 1, 2, 3)
STEPS = 6
SIZES = {"cuda": (1024, 8), "cpu": (24, 3)}
"""Width and number of layers by device."""
WEIGHTS = {"method": "blockwise", "bits": 8, "block_size": 64}
SECTIONS = (None, INT4)
STAGE, BUCKET, WARM_UP = 2, 50_000_000, 3
"""ZeRO stage and bucket size of the language model, and its steps until their time is known."""


def train(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the runs of every stage on a rank, undisturbed and with pauses. An error on all ranks ends one run."""
    for stage in STAGES:
        for number, seed in enumerate(job["seeds"]):
            yield _tried(job["device"], stage, number, seed, _both(stage))


def _both(stage: int) -> Mapping[str, Any]:
    """Return the section that compresses gradients and, if ranks send them, weights. Those of ZeRO 1 overlap."""
    return {**INT4, **({"weights": {**WEIGHTS, "overlap": stage == 1}} if stage else {})}


def train_nodes(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the runs of every stage that shards within nodes, undisturbed and with pauses."""
    section = {**INT4, "parallelism": {"shard_within": job["node"]}}
    for stage in STAGES[1:]:
        for number, seed in enumerate(job["seeds"]):
            yield _tried(job["device"], stage, number, seed, section)


def _tried(device: str, stage: int, number: int, seed: int | None, section: Mapping[str, Any]) -> dict[str, Any]:
    try:
        found = _train(device, stage, seed, section)
    except Exception as error:
        found = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {"stage": stage, "run": number, "losses": [], "weights": "", "error": ""} | found


def train_in_mirror(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the runs of every stage on the one real rank, with messages that arrive at once and late."""
    for stage in STAGES:
        for number, seed in enumerate(job["seeds"]):
            delay_messages(None if seed is None else Late(job["device"], seed))
            yield _tried(job["device"], stage, number, None, _both(stage))


def _train(device: str, stage: int, seed: int | None, section: Mapping[str, Any]) -> dict[str, Any]:
    width, layers = SIZES[device]
    model, batch = network(width, layers)
    engine = make_engine(model, device, stage, section, bucket=2 * width * width)
    with late_streams(engine, stage, seed) if seed is not None else nullcontext():
        losses = [train_step(engine, *batch) for _ in range(STEPS)]
    found = {"losses": [float(loss) for loss in losses], "weights": digest(engine)}
    engine.destroy()
    return found


def learn(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the losses of steps without and with compression on a rank. Slow machines make fewer steps."""
    steps, shape = None, Shape(**job["shape"])
    for section in SECTIONS:
        torch.manual_seed(0)
        engine = make_engine(LanguageModel(shape), job["device"], STAGE, section, BUCKET)
        text = markov_text(shape, steps or job["steps"], seed=1 + dist.get_rank())
        text = text.to(get_accelerator().current_device_name())
        first = [_timed(engine, batch) for batch in text[:WARM_UP]]
        steps = steps or _affordable(first[-1][1], job["seconds"] / len(SECTIONS), len(text))
        losses = [loss for loss, _ in first] + [_timed(engine, batch)[0] for batch in text[WARM_UP:steps]]
        engine.destroy()
        yield {"losses": losses}


def _affordable(step: float, seconds: float, wanted: int) -> int:
    """Return the number of steps that fit into `seconds`, the same on all ranks."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, min(wanted, max(WARM_UP + 1, int(seconds / step))))
    return int(min(found))


def _timed(engine: Any, batch: Any) -> tuple[float, float]:
    """Return the loss and the seconds of a step."""
    begin = time.perf_counter()
    loss = train_step(engine, batch)
    get_accelerator().synchronize()
    return float(loss), time.perf_counter() - begin
