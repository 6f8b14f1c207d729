"""The cases of the contract that train under DeepSpeed."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed.utils import safe_get_full_grad
from torch import Tensor

from tests.support.attached import Case, Gradients, Run, Section
from tests.support.jobs import Job, data, start, weights
from tests.support.methods import FP16


class ZeroRun(Run):
    """A run of a job, under DeepSpeed alone if `given` is None. With `still`, weights stay."""

    def __init__(self, job: Job, rank: int, given: Section | None, still: bool = False) -> None:
        if still:
            adam = {"type": "AdamW", "params": {"lr": 0.0, "torch_adam": True}}
            job = replace(job, extra={**job.extra, "optimizer": adam, "gradient_clipping": 0.0})
        self._engine = start(replace(job, section=given))
        self._batches, self._accumulation = data(rank, job), job.accumulation
        self.model = self._engine.module
        self.attached = None if given is None else self._engine.compression

    @property
    def session(self) -> Any:
        return self.attached

    def backward(self, step: int, factor: float = 1.0) -> float:
        loss, first = 0.0, step * self._accumulation
        for number, (x, y) in enumerate(self._batches[first : first + self._accumulation]):
            if number:
                self._engine.step()
            output = self._engine(x.to(next(self.model.parameters()).dtype))
            result = (output.float() - y).square().mean() * factor
            self._engine.backward(result)
            loss += result.item()
        return loss

    def update(self) -> bool:
        skipped = self._engine.skipped_steps
        self._engine.step()
        return bool(self._engine.skipped_steps == skipped)

    def gradients(self) -> Gradients:
        return {(name, 0): safe_get_full_grad(one).flatten().clone() for name, one in self.model.named_parameters()}

    def weights(self) -> list[Tensor]:
        return [torch.tensor(values) for values in weights(self._engine).values()]

    def steps(self) -> int:
        return int(self._engine.global_steps)

    def save(self, directory: str) -> None:
        self._engine.save_checkpoint(directory)

    def load(self, directory: str, kept: None, residuals: bool) -> None:
        self._engine.load_checkpoint(directory)
        if not residuals:
            self.session.residuals.clear()


@dataclass(frozen=True)
class Staged(Case):
    """A case under DeepSpeed."""

    job: Job

    def run(self, rank: int, section: Section | None, still: bool = False) -> ZeroRun:
        return ZeroRun(self.job, rank, section, still)


def every(**job: Any) -> dict[str, Staged]:
    """Return a case of each ZeRO stage."""
    return {f"stage {stage}": Staged(Job(stage, steps=20, **job)) for stage in range(4)}


EXACT = {
    f"{name} {accumulation} {clipping}": case
    for accumulation in (1, 2)
    for clipping in (0.0, 0.5)
    for name, case in every(accumulation=accumulation, extra={"gradient_clipping": clipping}).items()
}
CONSERVED = RESUMED = every()
SCALES = (16.0, 16.0, 8.0, 8.0, 8.0, 8.0, 16.0, 16.0)
SKIPPED = {name: replace(case, scales=SCALES) for name, case in every(extra=FP16).items()}
