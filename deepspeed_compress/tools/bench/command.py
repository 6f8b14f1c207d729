"""`ds-compress bench`: each benchmark imports what it needs when it runs."""

import argparse
from importlib import import_module

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Run the benchmark of `options` and return its exit code."""
    code: int = import_module(f"deepspeed_compress.tools.bench.{options.benchmark}").run(options)
    return code
