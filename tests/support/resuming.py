"""Runs that save and continue, runs that resume, and their residuals."""

from tests.support.jobs import Job, data, run, start, weights

__all__ = ["residuals_of", "resume", "save_and_continue"]


def save_and_continue(rank: int, all_jobs: dict[str, Job], directory: str) -> dict[str, dict]:
    """Take eight steps, save twice after four of them, and return the final weights by name of the job."""
    found = {}
    for name, job in all_jobs.items():
        batches, engine = data(rank, job), start(job)
        run(engine, batches[:4])
        engine.save_checkpoint(f"{directory}/{name}")
        engine.save_checkpoint(f"{directory}/{name}")
        run(engine, batches[4:])
        found[name] = weights(engine)
        engine.destroy()
    return found


def resume(rank: int, all_jobs: dict[str, Job], directory: str) -> dict[str, dict]:
    """Load what `save_and_continue` saved, take the last four steps, and return the final weights."""
    found = {}
    for name, job in all_jobs.items():
        engine = start(job)
        engine.load_checkpoint(f"{directory}/{name}")
        run(engine, data(rank, job)[4:])
        found[name] = weights(engine)
        engine.destroy()
    return found


def residuals_of(engine) -> dict[str, list]:
    """Return the residuals and momenta of a rank: by store, pairs of a range and its values."""
    return {
        name: [(piece, values.tolist()) for piece, values in store.items()]
        for name, store in engine.compression.stores.items()
    }
