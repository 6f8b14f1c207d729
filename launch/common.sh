# Shared parts of the scripts in this directory: help, checks, number of processes, DRY_RUN. It changes to the project.
# shellcheck shell=bash

set -euo pipefail
SCRIPT=$(realpath "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# Only the dependencies of the package must be installed, not the package.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# Print the comment at the top of the script, which is its help.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$SCRIPT"; }

fail() {
    echo "error: $*" >&2
    exit 2
}

# check CONFIG [OPTION ...]: answer --help, and stop if there is nothing to start.
check() {
    case "${1:-}" in
        --help | -h) usage; exit 0 ;;
        "" | -*) usage >&2; fail "give a configuration first, for example configs/zero2_int4.json" ;;
    esac
    [[ -f "$1" ]] || fail "$1: no such configuration in $PWD; see configs/README.md"
}

count_gpus() {
    if [[ "${DS_ACCELERATOR:-}" == cpu ]]; then
        echo 0
    else
        nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
    fi
}

# Set RANKS, the number of processes on this machine, unless it is set: one per GPU, or two on the CPU.
choose_ranks() {
    local gpus
    gpus=$(count_gpus)
    if ((gpus == 0)); then
        export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    fi
    RANKS=${RANKS:-$((gpus > 0 ? gpus : 2))}
}

# run COMMAND ...: run it, or print it for a shell if DRY_RUN is 1.
run() {
    if [[ "${DRY_RUN:-0}" == 1 ]]; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}
