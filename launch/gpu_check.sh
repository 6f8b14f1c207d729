#!/usr/bin/env bash
# Test kernels, speed and training steps on the GPU of this machine. See --help and docs/gpu.md.
#
# PYTHON is the interpreter with torch and Triton (default: python3).

set -euo pipefail
PYTHONPATH="$(dirname "$(dirname "$(realpath "$0")")")${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "${PYTHON:-python3}" -m deepspeed_compress.tools.gpu_check "$@"
