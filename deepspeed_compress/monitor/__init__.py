"""What a step cost and how good its compression was: measured, named and written here."""

from deepspeed_compress.monitor.meter import KINDS, PHASES, Meter
from deepspeed_compress.monitor.writer import EventSink, StatisticsWriter, StepStatistics

__all__ = ["KINDS", "PHASES", "EventSink", "Meter", "StatisticsWriter", "StepStatistics"]
