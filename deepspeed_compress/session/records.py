"""What is written of a run, and where to."""

from dataclasses import dataclass

from deepspeed_compress.monitor import EventLog, EventSink, Journal, StatisticsWriter
from deepspeed_compress.session.reporting import Reporter

__all__ = ["Records", "make_records"]


@dataclass(frozen=True)
class Records:
    """What is written of a run: statistics of steps, decisions, and where to."""

    reporter: Reporter
    journal: Journal
    log: EventLog


def make_records(
    reporter: Reporter, journal: Journal, writes: bool, sink: EventSink | None = None, island: int | None = None
) -> Records:
    """Those of a rank: what `reporter` reports goes to `journal` and `sink`; decisions too, those of `island` if there
    are several, if this rank `writes`."""
    writer = StatisticsWriter(journal, sink)
    if writer.active:
        reporter.sinks.append(writer.write)
    return Records(reporter, journal, EventLog(journal, writes, island))
