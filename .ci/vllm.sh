#!/usr/bin/env bash
# Install vLLM for CPUs, TRL and Agent-Lightning into an environment of its own, and run the tests with them there.
# usage: bash .ci/vllm.sh DIRECTORY [ARGUMENTS OF PYTEST]
set -euo pipefail
environment="$(realpath -m "$1")"
shift
cd "$(dirname "$0")/.."
if [ ! -d "$environment" ]; then
    "${PYTHON:-python3}" -m venv "$environment"
    "$environment/bin/pip" install torch==2.13.0
    "$environment/bin/pip" install ".[agents,plot,rollout,trl,vllm]" peft pytest pytest-rerunfailures pytest-timeout \
        pytest-xdist ninja
    # Their builds for CUDA do not load without a GPU, which breaks imports of transformers.
    "$environment/bin/pip" uninstall -y torchvision torchaudio torchcodec
    # The plugin must be that of this checkout.
    "$environment/bin/pip" install --no-deps --no-build-isolation -e .
fi
export TORCH_EXTENSIONS_DIR="$environment/torch_extensions" DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 VLLM_CPU_KVCACHE_SPACE=1
exec "$environment/bin/python" -m pytest -m "" tests/rollout/test_vllm_engine.py tests/integrations/test_trl_vllm.py \
    tests/integrations/test_agents_vllm.py "$@"
