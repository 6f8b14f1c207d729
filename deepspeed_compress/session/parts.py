"""Parts that a session is made of, for any engine.

An engine describes itself as an `Attachment`. The parts exist before the session, so whatever else attaches to the
engine gets the parts that it needs, and the session gets everything in its constructor.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.grouped import GroupedReductions, SeparateParameters
from deepspeed_compress.collectives.pace import make_pace
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import Run, StepClock, chunk_numel
from deepspeed_compress.collectives.reduction import Groups, ReductionContext
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.config import CompressConfig, total_steps
from deepspeed_compress.monitor import EventSink, Journal, Meter
from deepspeed_compress.monitor.journal import utc_now
from deepspeed_compress.policy import AllowedChoices, Policy
from deepspeed_compress.session.observer import new_run, of_first
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.reporting import ByteReport, Records, Reporter, make_records
from deepspeed_compress.session.residual_state import ResidualState
from deepspeed_compress.session.step_settings import StepSettings


def _nobody_listens() -> bool:
    return False


def _nothing_separate() -> Sequence[SeparateParameters]:
    return ()


@dataclass(frozen=True)
class Attachment:
    """Description of an engine, and of this rank, for which a session is made.

    Attributes:
        config: the section.
        document: the whole configuration.
        parameters: the model's parameters.
        device: device of the gradients.
        byte_report: see `Reporter`.
        writes: True if this rank writes decisions.
        make_groups: makes the groups for messages; called only if gradients are compressed.
        find_separate: makes the groups of parameters that are averaged over other ranks; called after `make_groups`.
        transactional: True if a step may be skipped, or its reductions rolled back.
        group: the ranks that report together; None for the whole job.
        available: the choices of an adaptive policy.
        step: number of optimizer steps that the engine has taken.
        sink: another receiver of the figures.
        island: number of this island, if there are several.
        others_listen: see `Reporter`.
    """

    config: CompressConfig
    document: Mapping[str, Any]
    parameters: Parameters
    device: torch.device
    byte_report: ByteReport
    writes: bool
    make_groups: Callable[[], Groups]
    find_separate: Callable[[], Sequence[SeparateParameters]] = _nothing_separate
    transactional: bool = True
    group: ProcessGroup | None = None
    available: AllowedChoices = field(default_factory=AllowedChoices)
    step: int = 0
    sink: EventSink | None = None
    island: int | None = None
    others_listen: Callable[[], bool] = _nobody_listens


@dataclass(frozen=True)
class Parts:
    """Parts of a session.

    Attributes:
        config: the section.
        parameters: the model's parameters.
        policy: decides at the beginning of every step which settings are in force.
        run: step clock, meter, seed and pace, shared with all reducers.
        reductions: the reducers for each choice of gradient settings; None for method "none", which leaves reduction to
            the engine.
        settings: the settings in force.
        residuals: residuals and momenta.
        records: statistics and events of the run.
        patches: the attributes that are replaced on the engine; undone by `detach`.
    """

    config: CompressConfig
    parameters: Parameters
    policy: Policy
    run: Run
    reductions: GroupedReductions | None
    settings: StepSettings
    residuals: ResidualState
    records: Records
    patches: Patches


def make_parts(attachment: Attachment, patches: Patches) -> Parts:
    """Return the parts of a session. Collective in the group of `attachment`."""
    config, group = attachment.config, attachment.group
    total = total_steps(attachment.document, config.schedule)
    pace, chunk = make_pace(config.communication, group), chunk_numel(attachment.device)
    run = Run(StepClock(), Meter(), config.seed, pace, chunk)
    reporter = Reporter(
        config.monitor, run.meter, attachment.byte_report, attachment.device, attachment.others_listen, group
    )
    journal = Journal(config.monitor.path, new_run(group), attachment.step, of_first(utc_now(), group))
    records = make_records(reporter, journal, attachment.writes, attachment.sink, attachment.island)
    policy = Policy(config, total, records.log.record, attachment.available)
    reductions = _reductions(attachment, run)
    settings = StepSettings(config, policy, reductions)
    residuals = ResidualState(ResidualStores(False) if reductions is None else reductions.context.stores, config)
    return Parts(config, attachment.parameters, policy, run, reductions, settings, residuals, records, patches)


def _reductions(attachment: Attachment, run: Run) -> GroupedReductions | None:
    if attachment.config.gradients.method == "none":
        return None
    stores = ResidualStores(attachment.transactional)
    context = ReductionContext(attachment.make_groups(), attachment.parameters, stores, run)
    return GroupedReductions(context, attachment.find_separate())
