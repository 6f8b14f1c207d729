#!/usr/bin/env bash
# Train on the machines that Slurm gives, with one torchrun on each.
#
# usage: sbatch [options of sbatch] launch/slurm.sh CONFIG [OPTION ...]      in the directory that holds launch/
#
#   CONFIG   one of configs/ (configs/README.md says how many processes each needs), or your own ds_config.json
#   OPTION   of launch/train_gpt.py, see its --help; --data and --output-dir are needed. Paths are those of
#            the directory that holds launch/
#
# What to change: the lines #SBATCH below, or the same as options of sbatch, which win. Keep one task a node: torchrun
# starts the processes of a node. In the environment, which Slurm hands on:
#   RANKS=8              processes of each node; without it one for each GPU that the job has there, or two on the CPU
#   MASTER_PORT=         a port that is free on the first node; without it one that follows from the number of the job
#   NCCL_SOCKET_IFNAME=  (GPUs), GLOO_SOCKET_IFNAME= (CPUs): the network interface, if the wrong one is taken
#   DRY_RUN=1            print the command and do not run it
#   RESTARTS=10          start all again when a rank or a node fails, at most so often (docs/faults.md); also give
#                        --no-kill to sbatch, and --signal=TERM@120 to save before the time is over
#   SPARES=1             of the nodes, that wait to take the place of one that fails
# Activate the virtual environment before sbatch. --output-dir and the text of --data must be on a disk that all nodes
# share. With --save-every 500 --resume the same command goes on where a job was ended, and with #SBATCH --requeue
# by itself.
#
# example, 16 processes as pipeline 2 x tensor 2 x data 4:
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh configs/pipeline2_tensor2_zero1_int4.json \
#       --data /shared/text --output-dir /shared/runs/parts --model configs/models/llama_3m.json

#SBATCH --job-name=train_gpt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --output=slurm-%j.log

# Slurm runs a copy of this file, so that only it knows where it was submitted.
# shellcheck source=launch/common.sh
source "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/launch/common.sh" || exit 2
check "$@"
[[ -n "${SLURM_JOB_ID:-}" ]] || fail "this is no Slurm job; submit it: sbatch launch/slurm.sh $1 ..."
choose_ranks
# Not through a pipe into head, which ends before scontrol has written all: pipefail would end the job.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${hosts%%$'\n'*}
port=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}
on_failure=(--kill-on-bad-exit=1)
start=(torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc_per_node "$RANKS"
    --rdzv_id "$SLURM_JOB_ID" --rdzv_backend c10d --rdzv_endpoint "$first:$port")
if [[ -n "${RESTARTS:-}" ]]; then
    on_failure=(--kill-on-bad-exit=0 --no-kill)
    start=(ds-compress run --restarts "$RESTARTS" --ranks "$RANKS" --hosts "$((SLURM_JOB_NUM_NODES - ${SPARES:-0}))"
        --spares "${SPARES:-0}" --rendezvous "$first:$port")
fi
# srun does not take over --cpus-per-task by itself.
run srun "${on_failure[@]}" ${SLURM_CPUS_PER_TASK:+--cpus-per-task "$SLURM_CPUS_PER_TASK"} "${start[@]}" \
    launch/train_gpt.py --deepspeed_config "$1" "${@:2}"
