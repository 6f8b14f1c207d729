"""What a run was started with (`ds_config.json`), and what was decided in it, and why (`events.jsonl`)."""

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.monitor.writer import finite

__all__ = ["CONFIGURATION", "EVENTS", "Event", "EventLog", "write_configuration"]

EVENTS = "events.jsonl"
CONFIGURATION = "ds_config.json"


@dataclass(frozen=True)
class Event:
    """A decision of the schedule, the guard or the adaptation.

    `step`: optimizer steps done. `kind`: "schedule", "anomaly", "return", "full_sync", "residuals_cleared", "rollback",
    "checkpoint_rollback" or "adapt". `evidence`: the figures that led to it. `before`, `after`: settings of gradients
    in short form, equal where nothing changed. `dry_run`: it was not carried out.
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
    """Appends to `directory`/events.jsonl, and to Python's log, on one rank; elsewhere (`writes` off) does nothing."""

    def __init__(self, directory: str | None, writes: bool) -> None:
        self._path = Path(directory) / EVENTS if directory and writes else None
        self._writes = writes

    def tell(self, event: Event) -> None:
        if not self._writes:
            return
        level = logging.WARNING if event.evidence else logging.INFO
        logging.getLogger("deepspeed_compress").log(level, "%s", event)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            fields = {**asdict(event), "evidence": {name: finite(value) for name, value in event.evidence.items()}}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")


def write_configuration(directory: str | None, ds_config: Mapping[str, Any]) -> None:
    """Write the configuration that a run was started with beside its statistics."""
    if directory is not None:
        path = Path(directory) / CONFIGURATION
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(ds_config, indent=2, default=str) + "\n", encoding="utf-8")
