"""The session of a model outside DeepSpeed, and what its user holds: `Attached`."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed_compress.adapters.groups import find_place_in, make_groups
from deepspeed_compress.adapters.steps import Scaler, Steps
from deepspeed_compress.communication.reducer import Run, StepClock
from deepspeed_compress.communication.reduction import Parameters, Reductions, Site
from deepspeed_compress.compression.residuals import ResidualStores
from deepspeed_compress.config import SECTION, CompressConfig, check_world, parse_section, read_ds_config, total_steps
from deepspeed_compress.config.names import user_name
from deepspeed_compress.engine.memories import Place, load_memories, save_memories, save_on_all
from deepspeed_compress.engine.observer import new_run
from deepspeed_compress.engine.patches import Patches
from deepspeed_compress.engine.records import make_records
from deepspeed_compress.engine.reporting import Reporter, Sizes
from deepspeed_compress.engine.seams import check_torch
from deepspeed_compress.engine.session import Session
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import Journal, Meter, write_configuration
from deepspeed_compress.policy import Policy

__all__ = ["Attached", "Config", "Target", "attach_session", "read_section"]

Config = str | Path | dict[str, Any]
"""A ds_config.json, or what is in one; only the section `deepspeed_compress` counts."""


@dataclass(frozen=True)
class Target:
    """What is compressed: the gradients of `parameters`, by name, reduced over `group` before `optimizer` steps.

    `scaler`: of the loss, which may leave out steps.
    """

    parameters: Mapping[str, Parameter]
    group: ProcessGroup
    optimizer: Optimizer
    scaler: Scaler | None = None

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def described(self) -> Parameters:
        """For reducers. What is not compressed travels in a type that holds all gradients exactly."""
        dtypes = {parameter.dtype for parameter in self.parameters.values()}
        names = {name: user_name(parameter, name) for name, parameter in self.parameters.items()}
        return Parameters(
            shapes={name: tuple(parameter.shape) for name, parameter in self.parameters.items()},
            everywhere=sorted(names.values()),
            dtype=reduce(torch.promote_types, dtypes),
            user_names=names,
        )


@dataclass(frozen=True)
class Attached:
    """Compression of one model, for as long as the model lives.

    `session` has what is in force, and tells of it (`subscribe`, `settings`, `events`).
    """

    session: Session
    steps: Steps
    place: Place

    def save(self, directory: str | Path) -> None:
        """Write what is remembered into `directory`, two files a rank. All ranks of the model must call it, between
        steps. StateError on all of them if one cannot write."""
        scale = self.session.clock.loss_scale
        save = partial(save_memories, self.session, Path(directory), self.place, 0, self.steps.count, scale)
        save_on_all(save, self.place.group)

    def load(self, directory: str | Path) -> None:
        """Go on from what `save` has written. All ranks of the model must call it, before a step, and after the model,
        the optimizer and the scaler of the loss have been loaded.

        What is wrong on one rank is a StateError on all, or with `on_missing_state` "reset" a CompressWarning: memories
        start empty then. Another number of ranks takes the sums of the memories over.
        """
        self.session.reset()
        self.session.journal.adopt(None)
        step = load_memories(self.session, Path(directory), self.place, self.steps.loss_scale)
        self.steps.begin(self.steps.count if step is None else step)
        self.session.journal.go_on(self.steps.count)


def read_section(config: Config) -> tuple[CompressConfig, dict[str, Any]]:
    """The section, validated, and the whole configuration. CompressWarning names keys of DeepSpeed beside it.

    Raises ConfigError as `parse_section` does.
    """
    document = read_ds_config(config)
    section, others = parse_section(document), sorted(document.keys() - {SECTION, "scheduler"})
    if others:
        text = f"{', '.join(f'/{key}' for key in others)}: no effect without DeepSpeed; pass {SECTION} alone"
        warnings.warn(text, CompressWarning, stacklevel=3)
    return section, document


def attach_session(target: Target, section: CompressConfig, document: Mapping[str, Any]) -> Attached:
    """Make the session of `target` and follow its optimizer. All ranks of its group must call it."""
    check_torch(torch.__version__)
    check_world(section, target.group.size())
    run, first = Run(StepClock(), Meter(), section.seed), target.group.rank() == 0
    reporter = Reporter(section.monitor, run.meter, partial(_first_alone, first), target.device, group=target.group)
    journal = Journal(section.monitor.path, new_run(target.group))
    records = make_records(reporter, journal, first)
    policy = Policy(section, total_steps(document, section.schedule), records.log.record)
    session = Session(section, policy, run, _reductions(target, section, run), records, None, Patches())
    steps = Steps(session, target.optimizer, target.scaler)
    steps.begin(0)
    if first:
        write_configuration(journal, document)
    place = Place(target.group.rank(), find_place_in(target.group, section), target.device, target.group)
    return Attached(session, steps, place)


def _reductions(target: Target, section: CompressConfig, run: Run) -> Reductions | None:
    if section.gradients.method == "none":
        return None
    # Any step may be left out: by a scaler, or by the program.
    stores = ResidualStores(transactional=True)
    groups = make_groups(target.group, section)
    dist.barrier(target.group)
    return Reductions(Site(groups, target.described(), stores, run))


def _first_alone(first: bool, sizes: Sizes) -> tuple[int, Sizes] | None:
    """Ranks send alike, so the first one tells of itself."""
    return (0, sizes) if first else None
