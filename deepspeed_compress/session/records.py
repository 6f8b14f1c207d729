"""Statistics and decisions of a run, and the files and sinks that receive them."""

from dataclasses import dataclass

from deepspeed_compress.monitor import EventLog, EventSink, Journal, StatisticsWriter
from deepspeed_compress.session.reporting import Reporter


@dataclass(frozen=True)
class Records:
    """Statistics of steps and decisions of a run, and where they are written."""

    reporter: Reporter
    journal: Journal
    log: EventLog


def make_records(
    reporter: Reporter, journal: Journal, writes: bool, sink: EventSink | None = None, island: int | None = None
) -> Records:
    """Return the records of a rank.

    Args:
        reporter: its figures are written to `journal` and `sink`.
        journal: the files of the run.
        writes: True if this rank writes decisions to `journal`.
        sink: another receiver of the figures.
        island: number of this island, if there are several.
    """
    writer = StatisticsWriter(journal, sink)
    if writer.active:
        reporter.sinks.append(writer.write)
    return Records(reporter, journal, EventLog(journal, writes, island))
