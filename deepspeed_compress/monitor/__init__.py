"""Statistics of each step: bytes, times and compression quality, and the files they go to. Importing needs no torch."""

from deepspeed_compress.monitor.journal import STATISTICS, Event, EventLog, Journal
from deepspeed_compress.monitor.meter import KINDS, SAVED, Meter, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from deepspeed_compress.monitor.writer import VERSIONS, EventSink, StatisticsWriter, StepStatistics

__all__ = [
    "KINDS",
    "SAVED",
    "STATISTICS",
    "VERSIONS",
    "Event",
    "EventLog",
    "EventSink",
    "Journal",
    "Meter",
    "StatisticsWriter",
    "StepStatistics",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
]
