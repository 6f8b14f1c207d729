"""Train a Hugging Face causal language model. See --help and docs/training.md."""

import sys

from deepspeed_compress.training.main import main

if __name__ == "__main__":
    sys.exit(main())
