"""What a step cost and how good its compression was: measured, named and written here."""

from deepspeed_compress.monitor.meter import KINDS, Meter
from deepspeed_compress.monitor.writer import EventSink, StatisticsWriter, StepStatistics

__all__ = ["KINDS", "EventSink", "Meter", "StatisticsWriter", "StepStatistics"]
