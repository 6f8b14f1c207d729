"""Files for the best layout: its ds_config.json and the command that starts it."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.layout import Layout, Optimizer
from deepspeed_compress.planner.search import Job

_RATES: Mapping[Optimizer, dict[str, Any]] = {
    "AdamW": {"lr": 3e-4},
    "Muon": {"muon_lr": 0.02, "adam_lr": 3e-4, "momentum": 0.95},
}
_OTHERS = {"betas": [0.9, 0.95], "weight_decay": 0.1}


def ds_config(layout: Layout, cluster: Cluster) -> dict[str, Any]:
    """Return the DeepSpeed configuration of a layout that DeepSpeed can start.

    `train_batch_size` is left to DeepSpeed, which counts tensor ranks as replicas in its check of that key.
    """
    zero: dict[str, Any] = {"stage": layout.zero}
    if layout.zero >= 2:
        zero["overlap_comm"] = True
    if layout.offload != "none":
        zero["offload_optimizer"] = {"device": "cpu"}
    if layout.offload == "all":
        zero["offload_param"] = {"device": "cpu"}
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
        "gradient_clipping": 0.0 if layout.optimizer == "Muon" else 1.0,
        **({} if cluster.gpu.precision == "fp32" else {cluster.gpu.precision: {"enabled": True}}),
        "optimizer": {"type": layout.optimizer, "params": _RATES[layout.optimizer] | _OTHERS},
        "zero_optimization": zero,
        "deepspeed_compress": section,
    }


def _parallelism(layout: Layout) -> dict[str, Any]:
    sizes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "shard_within": layout.shard_within}
    again = {"activation_checkpointing": True} if layout.recompute == "full" else {}
    return {"zero_stage": layout.zero, **{key: size for key, size in sizes.items() if size > 1}, **again}


def _gradients(layout: Layout, cluster: Cluster) -> dict[str, Any]:
    """Return the section of gradients. If a node has several replicas, they are summed before the network."""
    if not layout.gradient_bits:
        return {"method": "none"}
    found: dict[str, Any] = {"method": "blockwise", "bits": layout.gradient_bits}
    if not layout.shard_within and layout.tensor < cluster.per_node and layout.data * layout.tensor > cluster.per_node:
        found["hierarchy"] = {"ranks_per_node": cluster.per_node}
    return found


def start_command(job: Job, layout: Layout, config: Path, model: Path, hostfile: Path | None) -> str:
    """Return the shell command that starts training: on every node, or on one of them if there is a hostfile.

    Args:
        job: Job to start: by a script with Hugging Face's Trainer, or by `launch/train_gpt.py`.
        layout: Layout to start.
        config: Path of ds_config.json, relative to the project unless it is absolute.
        model: Path of the model.
        hostfile: Hostfile of the nodes, if there is one.
    """
    start = _trainer_start if job.software.name == "hf" else _start
    paths = (shlex.quote(str(path)) if path else "" for path in (config, model, hostfile))
    return start(job, layout, *paths)


def _trainer_start(job: Job, layout: Layout, config: str, _: str, hostfile: str) -> str:
    """Return the command that starts Trainer, which refuses arguments that differ from ds_config.json."""
    nodes, precision = job.cluster.nodes, job.cluster.gpu.precision
    several = f"--nnodes {nodes} --node_rank $NODE_RANK --master_addr $MASTER_ADDR " * (nodes > 1)
    torchrun = f"--launcher torchrun {several}--nproc_per_node {job.cluster.per_node}"
    batch = f"--per_device_train_batch_size {layout.micro} --gradient_accumulation_steps {layout.accumulation}"
    half = f" --{precision} True" * (precision != "fp32")
    again = " --gradient_checkpointing True" * (layout.recompute == "full")
    options = f"{batch} --learning_rate 3e-4 --adam_beta2 0.95 --weight_decay 0.1{half}{again}"
    launcher = f"--hostfile {hostfile}" if hostfile else torchrun
    return f"ds-compress run {launcher} train.py --deepspeed {config} {options}"


def _start(job: Job, _: Layout, config: str, model: str, hostfile: str) -> str:
    """Return the command that starts `launch/train_gpt.py`."""
    nodes, steps = job.cluster.nodes, max(1, round(job.tokens / (job.batch * job.seq * job.trained)))
    several = f"NODES={nodes} NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR " * (nodes > 1)
    torchrun = f"RANKS={job.cluster.per_node} {several}launch/torchrun.sh"
    launcher = f"HOSTFILE={hostfile} launch/multi_node.sh" if hostfile else torchrun
    options = f"--model {model} --seq-len {job.seq} --steps {steps} --data DATA --output-dir runs/plan"
    return f"{launcher} {config} {options}"
