#!/usr/bin/env bash
# Train on several machines, with DeepSpeed's launcher over pdsh and ssh. Start it on one of them.
#
# usage: launch/multi_node.sh CONFIG [OPTION ...]
#
#   CONFIG   one of configs/ (configs/README.md says how many processes each needs), or your own ds_config.json
#   OPTION   options of launch/train_gpt.py (see its --help); --data and --output-dir are required. Paths are
#            relative to the directory that holds launch/
#
# What to change, in the environment:
#   HOSTFILE=hostfile    a line per machine, "NAME slots=PROCESSES"; start with launch/hostfile.example. Ranks follow
#                        its order: ranks of a machine are neighbors, and pipeline stages are farthest apart
#   MASTER_ADDR=         address of the first machine in the training network; default: the first one of
#                        `hostname -I` there
#   MASTER_PORT=29500    use another port for each concurrent job
#   NCCL_SOCKET_IFNAME=  (GPUs), GLOO_SOCKET_IFNAME= (CPUs): the network interface, if the wrong one is chosen
#   DRY_RUN=1            print the command and do not run it
#
# Requirements: pdsh here; ssh without a password to every machine of the hostfile; this directory, the virtual
# environment and the text of --data at the same paths on all of them. Several machines write checkpoints, so
# --output-dir should be on a shared disk. Environment variables that match PASSED are passed on, and so are those in a
# .deepspeed_env in this directory or in your home directory.
#
# example:
#   HOSTFILE=hosts MASTER_ADDR=10.0.0.1 launch/multi_node.sh configs/zero1_low_bandwidth.json --data data/shakespeare \
#       --output-dir /shared/runs/two-nodes

# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"
PASSED='^(DS|OMP|HF|TOKENIZERS|TORCH|GLOO|NCCL)_[A-Z_]+='

check "$@"
HOSTFILE=${HOSTFILE:-hostfile}
[[ -f "$HOSTFILE" ]] || fail "HOSTFILE $HOSTFILE: no such file; copy launch/hostfile.example, and name your machines"
if [[ "${DRY_RUN:-0}" != 1 ]]; then
    command -v pdsh >/dev/null || fail "pdsh: not installed here; apt-get install pdsh, or start launch/torchrun.sh by hand"
    DS_ENV_FILE=$(mktemp)
    export DS_ENV_FILE
    trap 'rm -f "$DS_ENV_FILE"' EXIT
    { cat ~/.deepspeed_env .deepspeed_env 2>/dev/null || true; env | grep -E "$PASSED" || true; } >"$DS_ENV_FILE"
fi
run deepspeed --hostfile "$HOSTFILE" --launcher pdsh ${MASTER_ADDR:+--master_addr "$MASTER_ADDR"} \
    --master_port "${MASTER_PORT:-29500}" launch/train_gpt.py --deepspeed_config "$1" "${@:2}"
