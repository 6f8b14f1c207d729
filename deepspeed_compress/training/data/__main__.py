"""``python -m deepspeed_compress.training.data DIRECTORY``: fetch the example corpus into a directory."""

import argparse
from pathlib import Path

from deepspeed_compress.training.data.corpus import fetch_corpus


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m deepspeed_compress.training.data",
        description="Fetch the works of Shakespeare (5 MB, public domain) as text files to train on.",
    )
    parser.add_argument("directory", type=Path, help="directory for the text files, for example data/shakespeare")
    directory = parser.parse_args(argv).directory
    files = fetch_corpus(directory)
    print(f"{len(files)} text files, {sum(f.stat().st_size for f in files):,} bytes, in {directory}")


if __name__ == "__main__":
    main()
