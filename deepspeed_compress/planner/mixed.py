"""GPUs of several kinds in one job: the kind that limits a step, and a division of the batch for their rates."""

from dataclasses import dataclass, replace

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.gpus import Gpu
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.schedule import micro_batch
from deepspeed_compress.planner.search import Candidate, Job, Plan, search


@dataclass(frozen=True, slots=True)
class Kind:
    """GPUs of one kind in a job.

    Attributes:
        gpu: Type of the GPUs.
        count: Number of GPUs.
        seconds: Seconds in which a replica of these GPUs computes one sequence.
    """

    gpu: Gpu
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Division:
    """Division of a batch over GPUs of several kinds, in proportion to the rates at which they compute.

    Attributes:
        kinds: Kinds of GPUs, the slowest first.
        sequences: Sequences of a step for a replica of each kind.
        gain: Largest factor by which a step becomes shorter, if no message gets in the way.
    """

    kinds: tuple[Kind, ...]
    sequences: tuple[float, ...]
    gain: float


def divide(job: Job, candidate: Candidate) -> Division:
    """Return the division with which all replicas of a layout without a pipeline compute for the same time."""
    layout = candidate.layout
    kinds = tuple(sorted(_kinds(job, layout), key=lambda kind: -kind.seconds))
    together = layout.tensor * job.batch / sum(kind.count / kind.seconds for kind in kinds)
    idle = 1 + job.predictor().device.issued(job.software.idle)
    saved = idle * (kinds[0].seconds * job.batch / layout.data - together)
    step = candidate.prediction.seconds
    return Division(kinds, tuple(together / kind.seconds for kind in kinds), step / (step - saved))


def _kinds(job: Job, layout: Layout) -> list[Kind]:
    found = []
    for gpu, count in job.cluster.kinds:
        batch = micro_batch(Device(gpu, job.constants, job.software), job.model, job.seq, layout)
        found.append(Kind(gpu, count, (batch.forward + batch.backward) / layout.micro))
    return found


def fastest_alone(job: Job, plan: Plan) -> tuple[float, Cluster] | None:
    """Return how many times as fast the best kind trains without the others, and its GPUs.

    None if the model fits into the memory of no kind alone.
    """
    parts = [replace(job.cluster, gpu=gpu, gpus=count, kinds=()) for gpu, count in job.cluster.kinds]
    found = ((search(replace(job, cluster=part)).candidates, part) for part in parts)
    gains = [(plan.candidates[0].days / candidates[0].days, part) for candidates, part in found if candidates]
    return max(gains, key=lambda gain: gain[0], default=None)
