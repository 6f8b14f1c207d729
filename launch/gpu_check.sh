#!/usr/bin/env bash
# Run the tests marked `gpu` and benchmarks on the GPU of this machine. See --help and docs/gpu.md.
#
# PYTHON is the interpreter with torch and Triton (default: python3).

set -euo pipefail
PYTHONPATH="$(dirname "$(dirname "$(realpath "$0")")")${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "${PYTHON:-python3}" -m tests.gpu.check "$@"
