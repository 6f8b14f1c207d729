"""`ds-compress schema`: print the JSON Schema of the section for editors, or a table of its keys for readers."""

import argparse
import json
import sys

from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.tools.key_page import key_page


def run(options: argparse.Namespace) -> int:
    """Print the schema or the keys, or write them to a file. Return the exit code."""
    text = key_page() if options.markdown else json.dumps(json_schema(), indent=2) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, encoding="utf-8")
    return 0
