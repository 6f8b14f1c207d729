#!/usr/bin/env bash
# What holds on the GPU of this machine: kernels, speed, training steps. See --help, and docs/gpu.md.
#
# PYTHON names the interpreter (default: python3), which has torch and Triton.

set -euo pipefail
PYTHONPATH="$(dirname "$(dirname "$(realpath "$0")")")${PYTHONPATH:+:$PYTHONPATH}"
export PYTHONPATH
exec "${PYTHON:-python3}" -m deepspeed_compress.tools.gpu_check "$@"
