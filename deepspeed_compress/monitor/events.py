"""The configuration of a run (`ds_config.json`) and the decisions made in it, with reasons (`events.jsonl`)."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.config import masked
from deepspeed_compress.config.islands import island_directory
from deepspeed_compress.config.numbers import finite
from deepspeed_compress.monitor.journal import Journal

EVENTS = "events.jsonl"
CONFIGURATION = "ds_config.json"


@dataclass(frozen=True)
class Event:
    """A decision of the schedule, the guard, the adaptive policy or `auto`.

    Attributes:
        step: optimizer steps done.
        kind: "schedule", "anomaly", "return", "full_sync", "residuals_cleared", "rollback", "checkpoint_rollback",
            "adapt", "auto", or "crossover_tensor" (pipeline, experts, sequence).
        reason: the reason, for people.
        evidence: the figures that led to the decision.
        before: settings of gradients before, in short form.
        after: settings of gradients after; equal to `before` if nothing changed.
        dry_run: True if the decision did not take effect.
    """

    step: int
    kind: str
    reason: str
    evidence: Mapping[str, float]
    before: str
    after: str
    dry_run: bool = False

    def __str__(self) -> str:
        change = f": {self.before} -> {self.after}" if self.before != self.after else ""
        return f"step {self.step}: {self.kind}{' (dry run)' if self.dry_run else ''}: {self.reason}{change}"


class EventLog:
    """List of the `events` of this process. One rank also appends them to events.jsonl and to Python's log.

    Args:
        journal: the files of the run.
        writes: True if this rank writes.
        island: number of the island, which has its own file; None without islands or if all islands decide together.
    """

    def __init__(self, journal: Journal, writes: bool, island: int | None = None) -> None:
        self._journal = journal
        self._writes = writes
        self._island = island
        self.events: list[Event] = []

    def record(self, event: Event) -> None:
        self.events.append(event)
        if not self._writes:
            return
        level = logging.WARNING if event.evidence else logging.INFO
        prefix = "" if self._island is None else f"island {self._island}: "
        logging.getLogger("deepspeed_compress").log(level, "%s%s", prefix, event)
        evidence = {name: finite(value) for name, value in event.evidence.items()}
        island = {} if self._island is None else {"island": self._island}
        file = Path(island_directory(self._island or 0), EVENTS)
        self._journal.add(str(file), {**asdict(event), "evidence": evidence, **island})


def write_configuration(journal: Journal, ds_config: Mapping[str, Any]) -> None:
    """Write the configuration of the run next to its statistics, with passwords and keys masked."""
    journal.write(CONFIGURATION, json.dumps(masked(ds_config), indent=2, default=str) + "\n")
