#!/usr/bin/env bash
# Train on the machines of a Slurm job, with one torchrun on each.
#
# usage: sbatch [options of sbatch] launch/slurm.sh CONFIG [OPTION ...]      in the directory that holds launch/
#
#   CONFIG   one of configs/ (configs/README.md says how many processes each needs), or your own ds_config.json
#   OPTION   options of launch/train_gpt.py (see its --help); --data and --output-dir are required. Paths are
#            relative to the directory that holds launch/
#
# What to change: the lines #SBATCH below, or the same options of sbatch, which take precedence. Keep one task per
# node, because torchrun starts the processes of a node. In the environment, which Slurm passes on:
#   RANKS=8              processes per node; default: one per GPU of the job, or two on the CPU
#   MASTER_PORT=         a free port on the first node; default: derived from the job number
#   NCCL_SOCKET_IFNAME=  (GPUs), GLOO_SOCKET_IFNAME= (CPUs): the network interface, if the wrong one is chosen
#   DRY_RUN=1            print the command and do not run it
#   RESTARTS=10          largest number of restarts after a rank or a node fails (docs/faults.md); also give
#                        --no-kill to sbatch, and --signal=TERM@120 to save before the time limit
#   SPARES=1             number of spare nodes that replace failed ones
# Activate the virtual environment before sbatch. --output-dir and the text of --data must be on a disk that all nodes
# share. With --save-every 500 --resume, the same command continues after a job has ended; with #SBATCH --requeue, Slurm
# does so automatically.
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

# Slurm runs a copy of this file, so only SLURM_SUBMIT_DIR tells where the project is.
# shellcheck source=launch/common.sh
source "${SLURM_SUBMIT_DIR:-$(dirname "$0")/..}/launch/common.sh" || exit 2
check "$@"
[[ -n "${SLURM_JOB_ID:-}" ]] || fail "this is not a Slurm job; submit it: sbatch launch/slurm.sh $1 ..."
choose_ranks
# Do not pipe into head: it ends before scontrol has written everything, and pipefail would end the job.
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
# srun does not inherit --cpus-per-task.
run srun "${on_failure[@]}" ${SLURM_CPUS_PER_TASK:+--cpus-per-task "$SLURM_CPUS_PER_TASK"} "${start[@]}" \
    launch/train_gpt.py --deepspeed_config "$1" "${@:2}"
