"""``python -m deepspeed_compress.training.data DIRECTORY``: fetch the example corpus into a directory."""

import argparse
import sys
from pathlib import Path

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data.corpus import fetch_corpus


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_compress.training.data",
        description="Fetch the works of Shakespeare (5 MB, public domain) as text files to train on.",
    )
    parser.add_argument("directory", type=Path, help="directory for the text files, for example data/shakespeare")
    directory = parser.parse_args(argv).directory
    try:
        files = fetch_corpus(directory)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(files)} text files, {sum(f.stat().st_size for f in files):,} bytes, in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
