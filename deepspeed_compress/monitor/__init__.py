"""Statistics of each step: bytes, times and compression quality, and the files they go to. Importing needs no torch."""

from deepspeed_compress.monitor.events import CONFIGURATION, EVENTS, Event, EventLog, write_configuration
from deepspeed_compress.monitor.journal import STATISTICS, Journal, Part, utc_now
from deepspeed_compress.monitor.memory import peak_memory
from deepspeed_compress.monitor.meter import KINDS, PHASES, SAVED, Meter
from deepspeed_compress.monitor.versions import VERSIONS, VersionStatistics
from deepspeed_compress.monitor.writer import EventSink, StatisticsWriter, StepStatistics

__all__ = [
    "CONFIGURATION",
    "EVENTS",
    "KINDS",
    "PHASES",
    "SAVED",
    "STATISTICS",
    "VERSIONS",
    "Event",
    "EventLog",
    "EventSink",
    "Journal",
    "Meter",
    "Part",
    "StatisticsWriter",
    "StepStatistics",
    "VersionStatistics",
    "peak_memory",
    "utc_now",
    "write_configuration",
]
