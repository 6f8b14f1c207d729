# To be sourced by the scripts beside it: help, checks, processes of a machine, DRY_RUN. It goes to the project.
# shellcheck shell=bash

set -euo pipefail
SCRIPT=$(realpath "$0")
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# The package need not be installed, only what it needs.
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

# The comment at the top of the script, which is its help.
usage() { sed -n '2,/^$/s/^# \{0,1\}//p' "$SCRIPT"; }

fail() {
    echo "error: $*" >&2
    exit 2
}

# check CONFIG [OPTION ...]: answers --help, and stops where there is nothing to start.
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

# Sets RANKS, the processes of this machine, unless it is set: one a GPU, or two on the CPU.
choose_ranks() {
    local gpus
    gpus=$(count_gpus)
    if ((gpus == 0)); then
        export DS_ACCELERATOR="${DS_ACCELERATOR:-cpu}" OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    fi
    RANKS=${RANKS:-$((gpus > 0 ? gpus : 2))}
}

# run COMMAND ...: prints it instead when DRY_RUN is 1, so that a shell could read it.
run() {
    if [[ "${DRY_RUN:-0}" == 1 ]]; then
        printf '%q ' "$@"
        echo
    else
        "$@"
    fi
}
