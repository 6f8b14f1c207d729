#!/usr/bin/env bash
# Train with PyTorch's launcher: on one machine, or on several where you start it on each yourself.
#
# usage: launch/torchrun.sh CONFIG [OPTION ...]
#
#   CONFIG   one of configs/ (configs/README.md says how many processes each needs), or your own ds_config.json
#   OPTION   of launch/train_gpt.py, see its --help; --data and --output-dir are needed. Paths are those of
#            the directory that holds launch/
#
# What to change, in the environment:
#   RANKS=8              processes of each machine; without it one for each GPU, or two on the CPU of a machine
#                        that has none
#   NODES=1              machines
#   DS_ACCELERATOR=cpu   leave the GPUs alone
#   DRY_RUN=1            print the command and do not run it
# with several machines also, and the same command on each:
#   NODE_RANK=           0 on the first machine, 1 on the next ...
#   MASTER_ADDR=         address of the first one in the network that training is to use
#   MASTER_PORT=29500    a port that is free there
#   NCCL_SOCKET_IFNAME=  (GPUs), GLOO_SOCKET_IFNAME= (CPUs): the network interface, if the wrong one is taken
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
