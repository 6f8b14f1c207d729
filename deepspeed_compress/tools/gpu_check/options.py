"""Command-line options, with light imports so that `--help` is fast."""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed_compress.tools.arguments import positive_number

__all__ = ["DESCRIPTION", "parse"]

DESCRIPTION = "Find out what holds on the GPU of this machine: one table, and one JSON file with every figure."
_EXAMPLES = """examples:
  bash launch/gpu_check.sh
  bash launch/gpu_check.sh --parts kernels,speed --minutes 3
  bash launch/gpu_check.sh --wheels wheels --output gpu_check.json
  bash launch/gpu_check.sh --device cpu          # the same program at toy sizes, without a GPU

exit status: 0 nothing failed (a goal may be missed), 1 something failed, 2 wrong usage"""


def parse(parts: Mapping[str, str], arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options. `parts` maps the names that `--parts` accepts to their summaries."""
    parser = argparse.ArgumentParser(
        prog="gpu_check", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "\n".join(["parts:", *(f"  {name:17}{text}" for name, text in parts.items()), "", _EXAMPLES])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    chosen = "some of the parts, by commas (default: all)"
    parser.add_argument("--parts", type=lambda text: _names(text, parts), default=list(parts), help=chosen)
    minutes = "for all parts; each has its share (default: 8)"
    parser.add_argument("--minutes", type=positive_number, default=8.0, metavar="N", help=minutes)
    wheels = "install the .whl files of DIR, without their dependencies and without network, for this run alone"
    parser.add_argument("--wheels", type=Path, metavar="DIR", help=wheels)
    output = "default: gpu_check.json; traces are written beside it"
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), metavar="FILE", help=output)
    return parser.parse_args(arguments)


def _names(text: str, parts: Mapping[str, str]) -> list[str]:
    """Return the named parts in the order of `parts`."""
    given = text.split(",")
    if unknown := [name for name in given if name not in parts]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such part; write some of {','.join(parts)}")
    return [name for name in parts if name in given]
