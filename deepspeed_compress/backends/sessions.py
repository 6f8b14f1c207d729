"""The session of a model outside DeepSpeed, and the handle that its user holds: `Attached`."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed import ProcessGroup
from torch.nn import Parameter
from torch.optim import Optimizer

from deepspeed_compress.backends.groups import make_groups
from deepspeed_compress.backends.limits import check_alike, check_torch
from deepspeed_compress.backends.steps import StepFollower, TorchSteps
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reduction import Groups
from deepspeed_compress.compression import state
from deepspeed_compress.compression.state_description import Moment, Position
from deepspeed_compress.config import SECTION, CompressConfig, check_world, parse_section, read_ds_config
from deepspeed_compress.diagnostics import pointer
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.model_families import user_name
from deepspeed_compress.session.engine import EngineDescription
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.reporting import Sizes
from deepspeed_compress.session.session import Session
from deepspeed_compress.session.state_files import NOT_SAVED, Place, load_state_files, result_on_all, save_state_files

Config = str | Path | dict[str, Any]
"""Path or content of a ds_config.json, of which only the section `deepspeed_compress` is used."""


@dataclass(frozen=True)
class Target:
    """Gradients of whole `parameters`, by name, which the ranks of `group` reduce."""

    parameters: Mapping[str, Parameter]
    group: ProcessGroup

    @property
    def device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def described(self) -> Parameters:
        """Return the description of the parameters for reducers.

        Uncompressed elements are sent in a dtype that holds all gradients exactly.
        """
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

    `session` holds the settings in force and reports on them (`subscribe`, `settings`, `events`).
    """

    session: Session
    steps: StepFollower
    place: Place

    def save(self, directory: str | Path) -> None:
        """Write the state of compression into `directory`, two files per rank.

        All ranks of the model must call this, between steps.

        Raises:
            StateError: on all ranks, if one of them cannot write.
        """
        moment = Moment(zero_stage=0, step=self.steps.count, loss_scale=self.session.clock.loss_scale)
        save = partial(save_state_files, self.session, Path(directory), self.place, moment, state.write)
        result_on_all(save, self.place.group, NOT_SAVED)

    def load(self, directory: str | Path) -> None:
        """Resume from the files that `save` wrote.

        All ranks of the model must call this before a step, after the model, the optimizer and the gradient scaler have
        been loaded. If the number of ranks differs, the sums of the residuals are preserved.

        An error on one rank raises StateError on all ranks or, with `on_missing_state` "reset", emits a CompressWarning
        and leaves the residuals empty.
        """
        self.session.residuals.clear()
        self.session.journal.adopt(None)
        step = load_state_files(self.session, Path(directory), self.place, self.steps.loss_scale)
        self.steps.begin(self.steps.count if step is None else step)
        self.session.journal.continue_from(self.steps.count)


def read_section(config: Config) -> tuple[CompressConfig, dict[str, Any]]:
    """Return the validated section and the whole configuration.

    Emits a CompressWarning that names DeepSpeed keys outside the section, which have no effect. Raises ConfigError as
    `parse_section` does.
    """
    document = read_ds_config(config)
    section, others = parse_section(document), sorted(document.keys() - {SECTION, "scheduler"})
    if others:
        text = f"{', '.join(pointer((key,)) for key in others)}: no effect without DeepSpeed; pass {SECTION} alone"
        warnings.warn(text, CompressWarning, stacklevel=3)
    return section, document


def describe(
    config: CompressConfig,
    document: Mapping[str, Any],
    group: ProcessGroup,
    parameters: Parameters,
    device: torch.device,
    make_groups: Callable[[ProcessGroup, CompressConfig], Groups] = make_groups,
    writes: bool | None = None,
) -> EngineDescription:
    """Return the description of an engine whose gradients the ranks of `group` reduce.

    Args:
        config: the section.
        document: the whole configuration.
        group: the ranks.
        parameters: the parameters.
        device: device of the gradients.
        make_groups: creates the groups for messages. Engines that partition the ranks replace it.
        writes: True if this rank reports; None for the first rank of `group`.
    """
    reports = group.rank() == 0 if writes is None else writes

    def groups() -> Groups:
        made = make_groups(group, config)
        dist.barrier(group)
        return made

    def byte_report(sizes: Sizes) -> tuple[int, Sizes] | None:
        # All ranks send alike, so only the first one reports.
        return (0, sizes) if reports else None

    return EngineDescription(config, document, parameters, device, byte_report, reports, groups, group=group)


def make_session(engine: EngineDescription, patches: Patches) -> Session:
    """Return the session of an engine that `describe` described. All ranks of its group must call this."""
    assert engine.group is not None, "without DeepSpeed, a group of ranks trains one model"
    check_torch(torch.__version__)
    check_world(engine.config, engine.group.size())
    check_alike(engine.config, engine.document, engine.group)
    session = Session(engine, patches)
    if engine.writes:
        session.journal.write_configuration(engine.document)
    return session


def attach_session(
    engine: EngineDescription, position: Position, optimizer: Optimizer, scaler: GradScaler | None
) -> Attached:
    """Create the session of an engine, and follow the steps of `optimizer`, some of which `scaler` may skip.

    All ranks of the group must call this. `position` is that of this rank among those whose states are saved together.
    """
    session = make_session(engine, Patches())
    with session.patches.undone_on_failure():
        steps = TorchSteps(session, optimizer, scaler)
        steps.begin(0)
    return Attached(session, steps, Place(dist.get_rank(engine.group), position, engine.device, engine.group))
