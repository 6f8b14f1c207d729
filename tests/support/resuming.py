"""Runs that save and continue, runs that resume, and their residuals."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.jobs import Job, data, own_data, run, start, weights

State = tuple[dict[str, list[float]], dict[str, list[Any]]]
"""Weights at the end of a run, and residuals at its checkpoint."""


def take(engine: Any, rank: int, job: Job, first: int, last: int | None) -> list[float]:
    """Train the micro-steps from `first` to `last`, and return the losses."""
    return run(engine, own_data(engine, rank, job)[first:last])


def save_and_continue(
    rank: int,
    job: Job,
    directory: str,
    first: int,
    tag: str | None = None,
    begin: Callable[[Job], Any] = start,
    steps: Callable[..., list[float]] = take,
) -> State:
    """Train by `steps`, and save after `first` of them. `begin` makes the engine."""
    engine = begin(job)
    steps(engine, rank, job, 0, first)
    engine.save_checkpoint(directory, tag=tag)
    kept = residuals_of(engine)
    steps(engine, rank, job, first, None)
    return _end(engine), kept


def resume(
    rank: int,
    job: Job,
    directory: str,
    first: int,
    tag: str | None = None,
    begin: Callable[[Job], Any] = start,
    steps: Callable[..., list[float]] = take,
) -> State:
    """Load a checkpoint, and train all steps after the first `first`."""
    engine = begin(job)
    path, _ = engine.load_checkpoint(directory, tag=tag)
    assert path is not None
    kept = residuals_of(engine)
    steps(engine, rank, job, first, None)
    return _end(engine), kept


def save_and_resume(
    rank: int,
    job: Job,
    directory: str,
    first: int,
    begin: Callable[[Job], Any] = start,
    steps: Callable[..., list[float]] = take,
) -> tuple[State, State]:
    """Return the results of a run that saves and continues, and of one that resumes in the same process."""
    return tuple(work(rank, job, directory, first, None, begin, steps) for work in (save_and_continue, resume))


def _end(engine: Any) -> dict[str, list[float]]:
    """End an engine, and the process that writes its checkpoints, and return its weights."""
    found = weights(engine)
    engine.destroy()
    return found


def save_and_continue_all(rank: int, all_jobs: Mapping[str, Job], directory: str) -> dict[str, dict]:
    """Take eight steps, save twice after four of them, and return the final weights by name of the job."""
    found = {}
    for name, job in all_jobs.items():
        batches, engine = data(rank, job), start(job)
        run(engine, batches[:4])
        engine.save_checkpoint(f"{directory}/{name}")
        engine.save_checkpoint(f"{directory}/{name}")
        run(engine, batches[4:])
        found[name] = _end(engine)
    return found


def resume_all(rank: int, all_jobs: Mapping[str, Job], directory: str) -> dict[str, dict]:
    """Load what `save_and_continue_all` saved, take the last four steps, and return the final weights."""
    return {name: resume(rank, job, f"{directory}/{name}", 4)[0] for name, job in all_jobs.items()}


def residuals_of(engine: Any) -> dict[str, list[Any]]:
    """Return the residuals and momenta of a rank: by store, pairs of a range and its values."""
    stores = engine.compression.residuals.by_name if "compression" in vars(engine) else {}
    return {name: [(piece, values.tolist()) for piece, values in store.items()] for name, store in stores.items()}
