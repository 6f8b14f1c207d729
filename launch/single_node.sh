#!/usr/bin/env bash
# Train on one machine, with DeepSpeed's launcher.
#
# usage: launch/single_node.sh CONFIG [OPTION ...]
#
#   CONFIG   one of configs/ (configs/README.md says how many processes each needs), or your own ds_config.json
#   OPTION   of launch/train_gpt.py, see its --help; --data and --output-dir are needed. Paths are those of
#            the directory that holds launch/
#
# What to change, in the environment:
#   RANKS=8             processes; without it one for each GPU, or two on the CPU of a machine that has none
#   MASTER_PORT=29500   another port for each job, when several run at a time
#   DS_ACCELERATOR=cpu  leave the GPUs alone
#   DRY_RUN=1           print the command and do not run it
#
# example, four processes as two stages of a pipeline:
#   RANKS=4 launch/single_node.sh configs/pipeline2_zero1_int4.json --data data/shakespeare --output-dir runs/pipeline

# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"
check "$@"
choose_ranks
run deepspeed --num_gpus "$RANKS" --master_port "${MASTER_PORT:-29500}" \
    launch/train_gpt.py --deepspeed_config "$1" "${@:2}"
