"""Files for the best layout: its ds_config.json and the command that starts it."""

from typing import Any

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.layout import Layout


def ds_config(layout: Layout, cluster: Cluster) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a layout that DeepSpeed can start.

    `train_batch_size` is left to DeepSpeed, which counts tensor ranks as replicas in its check of that key.
    """
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.zero >= 2:
        zero["overlap_comm"] = True
    section: dict[str, Any] = {"parallelism": _parallelism(layout), "gradients": _gradients(layout, cluster)}
    if layout.weight_bits:
        section["weights"] = {"method": "blockwise", "bits": layout.weight_bits}
        if layout.zero < 3 and layout.pipeline == 1:
            section["weights"]["overlap"] = True
    if layout.islands > 1:
        section["islands"] = {
            "size": layout.island_size,
            "sync_every": layout.sync_every,
            "exchange": {"method": "blockwise", "bits": 4},
            "outer": {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.5},
        }
    return {
        "train_micro_batch_size_per_gpu": layout.micro,
        "gradient_accumulation_steps": layout.accumulation,
        "gradient_clipping": 1.0,
        **({"bf16": {"enabled": True}} if cluster.gpu.element == 2 else {}),
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "zero_optimization": zero,
        "deepspeed_compress": section,
    }


def _parallelism(layout: Layout) -> dict[str, Any]:
    sizes: dict[str, Any] = {"zero_stage": layout.zero, "tensor": layout.tensor, "pipeline": layout.pipeline}
    found = {key: value for key, value in sizes.items() if key == "zero_stage" or value > 1}
    if layout.shard_within:
        found["shard_within"] = layout.shard_within
    if layout.recompute == "full":
        found["activation_checkpointing"] = True
    return found


def _gradients(layout: Layout, cluster: Cluster) -> dict[str, Any]:
    """Return the section of gradients. If a node has several replicas, they are summed before the network."""
    if not layout.gradient_bits:
        return {"method": "none"}
    found: dict[str, Any] = {"method": "blockwise", "bits": layout.gradient_bits}
    if not layout.shard_within and layout.tensor < cluster.per_node and layout.data * layout.tensor > cluster.per_node:
        found["hierarchy"] = {"ranks_per_node": cluster.per_node}
    return found


def command(cluster: Cluster, model: str, seq: int, steps: int, program: str, hosts: bool = False) -> str:
    """Return the shell command that starts training: on every node, or on one of them if there is a hostfile.

    Args:
        cluster: Cluster to start on.
        model: Path of the model.
        seq: Tokens of a sequence.
        steps: Optimizer steps of the run.
        program: Program of the plan: "hf" starts a Trainer script, others `launch/train_gpt.py`.
        hosts: Whether there is a hostfile.
    """
    options = f"--model {model} --seq-len {seq} --steps {steps} --data DATA --output-dir runs/plan"
    if hosts and program == "hf":
        return "ds-compress run --hostfile hostfile train.py --deepspeed ds_config.json"
    if hosts:
        return f"HOSTFILE=hostfile launch/multi_node.sh ds_config.json {options}"
    nodes = f"--nnodes {cluster.nodes} --node_rank $NODE_RANK --master_addr $MASTER_ADDR " if cluster.nodes > 1 else ""
    if program == "hf":
        launcher = f"ds-compress run --launcher torchrun {nodes}--nproc_per_node {cluster.per_node}"
        return f"{launcher} train.py --deepspeed ds_config.json"
    several = f"NODES={cluster.nodes} NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR " if cluster.nodes > 1 else ""
    return f"RANKS={cluster.per_node} {several}launch/torchrun.sh ds_config.json {options}"
