"""`ds-compress schema`: print the JSON Schema of the section, for editors."""

import argparse
import json
import sys

from deepspeed_compress.config import json_schema

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """Print the schema or write it to a file. Return the exit code."""
    text = json.dumps(json_schema(), indent=2) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0
