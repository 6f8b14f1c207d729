"""Files for the best layout: its ds_config.json and the command that starts it."""

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.layout import Layout, Optimizer

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


@dataclass(frozen=True, slots=True)
class Start:
    """Start of a layout on a cluster, by Trainer or by `launch/train_gpt.py`.

    Attributes:
        layout: Layout to start.
        cluster: Cluster to start on.
        directory: Directory with ds_config.json, relative to the project unless it is absolute.
        model: Path of the model.
        seq: Tokens of a sequence.
        steps: Optimizer steps of the run.
        is_trainer: Whether a script with Hugging Face's Trainer trains.
        hostfile: Hostfile of the nodes, if there is one.
    """

    layout: Layout
    cluster: Cluster
    directory: Path
    model: Path
    seq: int
    steps: int
    is_trainer: bool
    hostfile: Path | None = None

    def command(self) -> str:
        """Return the shell command that starts training: on every node, or on one of them if there is a hostfile."""
        config, options = _quoted(self.directory / "ds_config.json"), self._options()
        if self.is_trainer:
            return f"ds-compress run {self._launcher()} train.py --deepspeed {config} {options}"
        if self.hostfile:
            return f"HOSTFILE={_quoted(self.hostfile)} launch/multi_node.sh {config} {options}"
        several = f"NODES={self.cluster.nodes} NODE_RANK=$NODE_RANK MASTER_ADDR=$MASTER_ADDR " * self._has_nodes
        return f"RANKS={self.cluster.per_node} {several}launch/torchrun.sh {config} {options}"

    @property
    def _has_nodes(self) -> bool:
        return self.cluster.nodes > 1

    def _launcher(self) -> str:
        if self.hostfile:
            return f"--hostfile {_quoted(self.hostfile)}"
        nodes = f"--nnodes {self.cluster.nodes} --node_rank $NODE_RANK --master_addr $MASTER_ADDR " * self._has_nodes
        return f"--launcher torchrun {nodes}--nproc_per_node {self.cluster.per_node}"

    def _options(self) -> str:
        """Return the options of the program. Trainer refuses arguments that differ from ds_config.json."""
        if not self.is_trainer:
            shape = f"--model {_quoted(self.model)} --seq-len {self.seq} --steps {self.steps}"
            return f"{shape} --data DATA --output-dir runs/plan"
        layout, precision = self.layout, self.cluster.gpu.precision
        batch = f"--per_device_train_batch_size {layout.micro} --gradient_accumulation_steps {layout.accumulation}"
        half = f" --{precision} True" * (precision != "fp32")
        again = " --gradient_checkpointing True" * (layout.recompute == "full")
        return f"{batch} --learning_rate 3e-4 --adam_beta2 0.95 --weight_decay 0.1{half}{again}"


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
