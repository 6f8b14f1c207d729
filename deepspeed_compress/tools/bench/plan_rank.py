"""One rank of the measurements of `plan cluster`: probes, and steps of layouts with the same groups of ranks."""

from deepspeed_compress.tools.bench import probe_rank, step_rank
from deepspeed_compress.tools.bench.jobs import Emit, Log, Row, rank_main


def measure(job: Row, emit: Emit, log: Log) -> None:
    """Measure `job["probes"]`, a job of `probe_rank` or None, and `job["steps"]`, jobs of `step_rank`."""
    if job["probes"] is not None:
        probe_rank.measure(job["probes"], emit, log)
    for steps in job["steps"]:
        step_rank.measure(steps, emit, log)


if __name__ == "__main__":
    rank_main(measure)
