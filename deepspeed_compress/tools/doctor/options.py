"""Command-line options of `ds-compress doctor`. Every command loads this module, so its imports are light."""

import argparse
from pathlib import Path


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN_DIR and the options of `doctor` to `parser`."""
    what = "output directory of a run, or the directory of its compression.jsonl (monitor.path)"
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=what)
    parser.add_argument("--baseline", type=Path, metavar="RUN_DIR", help="an uncompressed run to compare with")
    config = "configuration of the run, if it has left no RUN_DIR/ds_config.json"
    parser.add_argument("--config", type=Path, metavar="FILE", help=config)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    applied = "write the changed configuration to FILE, which must not exist"
    parser.add_argument("--apply", type=Path, metavar="FILE", help=applied)
