"""Description of an engine, of which a session is made, and interfaces of what works next to a session."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reduction import Groups, SeparateParameters
from deepspeed_compress.compression.state import Contents
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.monitor import EventSink, Meter
from deepspeed_compress.session.reporting import ByteReport


@dataclass(frozen=True)
class EngineDescription:
    """Description of an engine, and of this rank.

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
        deciding: the ranks that decide alike; None for the whole job.
        differences: True if weights are sent as differences.
        step: number of optimizer steps that the engine has taken.
        sink: another receiver of the figures.
        island: number of this island, if there are several.
        meter: counts and times of this rank.
    """

    config: CompressConfig
    document: Mapping[str, Any]
    parameters: Parameters
    device: torch.device
    byte_report: ByteReport
    writes: bool
    make_groups: Callable[[], Groups]
    find_separate: Callable[[], Sequence[SeparateParameters]] = lambda: ()
    transactional: bool = True
    group: ProcessGroup | None = None
    deciding: ProcessGroup | None = None
    differences: bool = False
    step: int = 0
    sink: EventSink | None = None
    island: int | None = None
    meter: Meter = field(default_factory=Meter)


class BackgroundCheckpoints(Protocol):
    """Checkpoints that are written in the background."""

    def set_client_state(self, client_state: Callable[[], dict[str, Any]]) -> None:
        """Save what `client_state` returns as the `client_state` of checkpoints that are saved automatically."""

    def write_state(self, contents: Contents, file: Path) -> None:
        """Have a state written with the checkpoint that is being saved, as `compression.state.write` does."""

    def newest_step(self, directory: str) -> int | None:
        """Return the step of the newest checkpoint in `directory`; None without any. Collective."""

    def before_step(self) -> None:
        """Prepare for a change of the fp32 master weights."""

    def step_ended(self, step: int, applied: bool) -> None:
        """Update after each optimizer step."""

    def wait(self) -> None:
        """Wait until everything that was saved is written. Collective; raises StateError as `on_error` says."""

    def leave_by(self, leave: Callable[[], None]) -> None:
        """Call `leave` on all ranks after SIGTERM has arrived."""

    def listen(self, tell: Callable[[bool], None]) -> None:
        """Save on SIGTERM from now on, and report to `tell` whether it does, now and whenever that changes."""


class IslandExchanges(Protocol):
    """Exchanges with other islands."""

    @property
    def number(self) -> int:
        """Return the unique number of this island. Numbers are never reused."""

    def step_ended(self, step: int) -> None:
        """Update after optimizer step `step` (1-based). Collective."""
