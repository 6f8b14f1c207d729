#!/usr/bin/env bash
# Train with PyTorch's launcher, on one machine, or on several if you start it on each of them.
#
# usage: launch/torchrun.sh CONFIG [OPTION ...]
#
#   CONFIG   one of configs/ (configs/README.md says how many processes each needs), or your own ds_config.json
#   OPTION   options of launch/train_gpt.py (see its --help); --data and --output-dir are required. Paths are
#            relative to the directory that holds launch/
#
# What to change, in the environment:
#   RANKS=8              processes per machine; default: one per GPU, or two on the CPU if there is no GPU
#   NODES=1              number of machines
#   DS_ACCELERATOR=cpu   do not use the GPUs
#   DRY_RUN=1            print the command and do not run it
# With several machines, set these too and start the same command on each:
#   NODE_RANK=           0 on the first machine, 1 on the next ...
#   MASTER_ADDR=         address of the first machine in the training network
#   MASTER_PORT=29500    a free port on that machine
#   NCCL_SOCKET_IFNAME=  (GPUs), GLOO_SOCKET_IFNAME= (CPUs): the network interface, if the wrong one is chosen
#
# examples:
#   launch/torchrun.sh configs/zero2_int4.json --data data/shakespeare --output-dir runs/int4
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 launch/torchrun.sh configs/zero1_low_bandwidth.json \
#       --data data/shakespeare --output-dir /shared/runs/two-nodes

# shellcheck source=launch/common.sh
source "$(dirname "$0")/common.sh"
check "$@"
choose_ranks
where=(--standalone)
if ((${NODES:-1} > 1)); then
    [[ -n "${NODE_RANK:-}" && -n "${MASTER_ADDR:-}" ]] ||
        fail "NODES is $NODES: set NODE_RANK (0 on the first machine) and MASTER_ADDR (the first machine), too"
    where=(--nnodes "$NODES" --node_rank "$NODE_RANK" --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
fi
run torchrun "${where[@]}" --nproc_per_node "$RANKS" launch/train_gpt.py --deepspeed_config "$1" "${@:2}"
