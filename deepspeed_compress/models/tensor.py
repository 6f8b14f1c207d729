"""Tensor parallelism: DeepSpeed's AutoTP splits transformers layers on the meta device, before they have weights.

The two matrices of a pair are split by columns and by rows, as in Megatron-LM (arXiv:1909.08053, section 3). Norms are
replicated on every rank. See `vocabulary` for the embedding and the head.
"""

import re
from typing import Any

import torch.distributed as dist
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
from deepspeed.module_inject.layers import set_autotp_mode
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from deepspeed_compress.models.families import Family


def split_layers(module: nn.Module, config: PretrainedConfig, family: Family, group: ProcessGroup) -> AutoTP:
    """Split the layers of `module` that `family` names between the ranks of `group`. Weights are filled in afterwards.

    Returns:
        The splitter, for `finish_split`.
    """
    # Otherwise the weights of DeepSpeed's layers require no gradient.
    set_autotp_mode(training=True)
    splitter = AutoTP(
        module=module,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=_partition(config, family, dist.get_world_size(group)),
        model_config=config,
        training_mode=True,
    )
    # AutoTP's own setter only supports groups of a job without a pipeline.
    splitter.mp_group, splitter.mp_size = group, dist.get_world_size(group)
    splitter.update_linear_policies()
    splitter._replace_module(module)
    _narrow(module, family, splitter.mp_size)
    return splitter


def finish_split(splitter: AutoTP, module: Any) -> None:
    """Register the hooks that sum the gradients of replicated norms. Call this after the weights are filled in."""
    splitter.register_replicated_grad_hooks(module)
    # Tell DeepSpeed not to split the module again.
    module.ds_autotp_parsed = True


def _partition(config: PretrainedConfig, family: Family, size: int) -> AutoTPConfig:
    fused = family.fused(config)
    specs = [_spec([name], PartitionType.COLUMN, (rows, -1)) for name, rows in fused.items()]
    specs.append(_spec([name for name in family.columns if name not in fused], PartitionType.COLUMN))
    specs.append(_spec(family.rows, PartitionType.ROW))
    if family.norms:
        specs.append(_spec(family.norms, PartitionType.SKIP, grad_allreduce=True))
    return AutoTPConfig(tp_size=size, layer_specs=specs)


def _spec(names: Any, kind: PartitionType, shape: Any = None, grad_allreduce: bool = False) -> TPLayerSpec:
    patterns = [rf".*\.{re.escape(name)}\.weight$" for name in names]
    return TPLayerSpec(patterns, kind, shape=shape, partition_dim=None, grad_allreduce=grad_allreduce)


def _narrow(module: nn.Module, family: Family, size: int) -> None:
    for name, child in module.named_modules():
        if name.rpartition(".")[2] == family.attention:
            family.narrow(child, size)
