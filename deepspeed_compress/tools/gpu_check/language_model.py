"""Part 7: the effect of compression on a language model's loss, and on its step time without a network limit."""

import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from deepspeed_compress.tools.gpu_check.findings import Finding, Task
from deepspeed_compress.tools.gpu_check.ranks import Said, backend_here, missing, run_ranks

__all__ = ["SHAPES", "findings", "judge_losses", "judge_times", "learn", "measure"]

SHAPES: Mapping[str, Mapping[str, int]] = {
    "cuda": {"layers": 12, "width": 768, "heads": 12, "vocabulary": 50257, "length": 1024, "micro_batch": 8},
    "cpu": {"layers": 2, "width": 32, "heads": 2, "vocabulary": 64, "length": 16, "micro_batch": 4},
}
"""Shapes of GPT-2 with 124 million parameters and of a toy model: fields of `workload.Shape`."""
_SHORT: Mapping[str, int] = {"cuda": 256, "cpu": 16}
"""Tokens per sequence for the loss, which takes 200 steps."""
_STEPS: Mapping[str, int] = {"cuda": 200, "cpu": 12}
_RANKS, _STAGE, _BUCKET = 2, 2, 50_000_000
_WARM_UP, _TIMED = 3, 15
_LAST = 10
"""Number of last steps whose mean loss is compared."""
_GOAL_LOSS, _GOAL_TIME = 0.02, 0.03
_TIME_SHARE = 0.25
_NAMES = {"cuda": "GPT-2, 124M", "cpu": "a toy of GPT-2"}
_SECTIONS = ("uncompressed", "4 bits")


def findings(task: Task) -> Iterator[Finding]:
    """Yield findings on the step time and then on the loss, with as many steps as the remaining time allows."""
    if absent := missing():
        yield Finding(_NAMES[task.device], "not run", why=absent)
        return
    begin = time.monotonic()
    job = {"device": task.device, "backend": "mirror"}
    yield judge_times(run_ranks(1, f"{__name__}:measure", job, _TIME_SHARE * task.seconds), task)
    backend, seconds = backend_here(task.device, _RANKS), task.seconds - (time.monotonic() - begin)
    long_job = {"device": task.device, "backend": backend, "seconds": 0.7 * seconds}
    yield from judge_losses(run_ranks(_RANKS, f"{__name__}:learn", long_job, 0.95 * seconds), task)


def judge_times(said: Said, task: Task) -> Finding:
    """Compare the time of a compressed step with that of an uncompressed one."""
    what, goal = f"{_NAMES[task.device]}: step, no network", f"at most {_GOAL_TIME:.0%} more"
    if said.trouble or len(said.results[0]) < len(_SECTIONS):
        return Finding(what, "fail", goal=goal, why=said.trouble or "it did not get to the end")
    plain, compressed = (statistics.median(one["seconds"]) for one in said.results[0])
    more = compressed / plain - 1
    figure = f"{1e3 * plain:.1f} to {1e3 * compressed:.1f} ms, {more:+.1%}"
    if not task.on_gpu:
        return Finding(what, "not run", figure, goal, "needs CUDA; the figure is of the CPU")
    return Finding(what, "pass" if more <= _GOAL_TIME else "missed", figure, goal)


def judge_losses(said: Said, task: Task) -> Iterator[Finding]:
    """Compare the means of the last losses over all ranks, with and without compression."""
    what, goal = f"{_NAMES[task.device]}: loss", f"within {_GOAL_LOSS:.0%}"
    if said.trouble or any(len(results) < len(_SECTIONS) for results in said.results):
        yield Finding(what, "fail", goal=goal, why=said.trouble or "ranks did not get to the end")
        return
    plain, compressed = (_last([one["losses"] for one in both]) for both in zip(*said.results, strict=True))
    steps, first = len(said.results[0][0]["losses"]), said.results[0][0]["losses"][0]
    yield Finding(
        f"{what}, uncompressed", "pass" if plain < first else "fail", f"{first:.4f} to {plain:.4f}, {steps} steps"
    )
    apart = compressed / plain - 1
    reached = abs(apart) <= _GOAL_LOSS
    yield Finding(f"{what}, 4 bits", "pass" if reached else "missed", f"{compressed:.4f}, {apart:+.2%}", goal)


def _last(losses: Sequence[Sequence[float]]) -> float:
    return statistics.mean(statistics.mean(one[-_LAST:]) for one in losses)


def measure(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the seconds of steps without and with compression. Runs on the one real rank of two."""
    for section in _SECTIONS:
        engine, text = _start(job, section, _WARM_UP + _TIMED, SHAPES[job["device"]]["length"])
        seconds = [_timed(engine, batch)[1] for batch in text]
        engine.destroy()
        yield {"seconds": seconds[_WARM_UP:]}


def learn(job: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the losses of steps without and with compression on a rank. Slow machines make fewer steps."""
    steps = None
    for section in _SECTIONS:
        engine, text = _start(job, section, steps or _STEPS[job["device"]], _SHORT[job["device"]])
        first = [_timed(engine, batch) for batch in text[:_WARM_UP]]
        steps = steps or _affordable(first[-1][1], job["seconds"] / len(_SECTIONS), len(text))
        losses = [loss for loss, _ in first] + [_timed(engine, batch)[0] for batch in text[_WARM_UP:steps]]
        engine.destroy()
        yield {"losses": losses}


def _affordable(step: float, seconds: float, wanted: int) -> int:
    """Return the number of steps that fit into `seconds`, the same on all ranks."""
    import torch.distributed as dist

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, min(wanted, max(_WARM_UP + 1, int(seconds / step))))
    return int(min(found))


def _timed(engine: Any, batch: Any) -> tuple[float, float]:
    """Return the loss and the seconds of a step."""
    from deepspeed.accelerator import get_accelerator

    from deepspeed_compress.tools.gpu_check.workload import train_step

    begin = time.perf_counter()
    loss = train_step(engine, batch)
    get_accelerator().synchronize()
    return float(loss), time.perf_counter() - begin


def _start(job: Mapping[str, Any], section: str, steps: int, length: int) -> tuple[Any, Any]:
    """Return an engine and a batch for each step."""
    import torch
    from deepspeed.accelerator import get_accelerator

    from deepspeed_compress.tools.gpu_check.workload import INT4, LanguageModel, Shape, make_engine, markov_text

    shape = Shape(**{**SHAPES[job["device"]], "length": length})
    torch.manual_seed(0)
    compressed = INT4 if section == "4 bits" else None
    engine = make_engine(LanguageModel(shape), job["device"], _STAGE, compressed, _BUCKET)
    text = markov_text(shape, steps, seed=1 + torch.distributed.get_rank())
    return engine, text.to(get_accelerator().current_device_name())
