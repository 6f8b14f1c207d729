#!/usr/bin/env bash
# Train on one machine, with DeepSpeed's launcher.
#
# usage: launch/single_node.sh CONFIG [OPTION ...]
#
#   CONFIG   one of configs/ (configs/README.md says how many processes each needs), or your own ds_config.json
#   OPTION   options of launch/train_gpt.py (see its --help); --data and --output-dir are required. Paths are
#            relative to the directory that holds launch/
#
# What to change, in the environment:
#   RANKS=8             number of processes; default: one per GPU, or two on the CPU if there is no GPU
#   MASTER_PORT=29500   use another port for each concurrent job
#   DS_ACCELERATOR=cpu  do not use the GPUs
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
