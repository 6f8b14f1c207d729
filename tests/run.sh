#!/usr/bin/env bash
# Sets up what is missing and runs every check, and the quick tests. Arguments go to pytest instead of that: -m "not slow" runs
# the tests of CI, and -m "" all. With --coverage first, what the tests reach is measured, in every process that they start, and
# shown at the end. See docs/testing.md.
set -euo pipefail
cd "$(dirname "$0")/.."

venv="${DS_COMPRESS_VENV:-.venv}"
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
export PATH="$(cd "$venv" && pwd)/bin:$PATH"
stamp="$venv/installed-$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)"
if [ ! -e "$stamp" ]; then
    # torch first and alone: asked for by another package, pip may choose a build with gigabytes of CUDA libraries.
    python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
    python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
    touch "$stamp"
fi

# Hundreds of processes import the package, and each would compile it.
unset PYTHONDONTWRITEBYTECODE
# DeepSpeed compiles an operation at start. A build that was killed leaves a lock on which all later ones would wait.
export TORCH_EXTENSIONS_DIR="$(cd "$venv" && pwd)/torch_extensions"
find "$TORCH_EXTENSIONS_DIR" -name lock -delete 2>/dev/null || true

export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
coverage=()
if [ "${1:-}" = --coverage ]; then
    shift
    # Everything takes twice as long.
    coverage=(--cov --cov-report=term:skip-covered --timeout 1200)
fi
# A process for what is not yet compiled, beside the checks: the first tests of all processes would wait for it.
python -W ignore -m tests.support.operations >/dev/null &
compiled=$!
ruff check .
ruff format --check .
mypy &
typed=$!
NO_MKDOCS_2_WARNING=1 mkdocs build --quiet --strict -f .mkdocs.yml
wait "$typed"
wait "$compiled"
[ $# -gt 0 ] || set -- -m "not slow and not ci"
# Two processes per core, since each waits half of the time for programs that its tests start. nproc would obey OMP_NUM_THREADS.
python -m pytest -n "$((2 * $(env -u OMP_NUM_THREADS nproc)))" --maxprocesses 8 --dist worksteal --durations 15 "${coverage[@]}" "$@"
