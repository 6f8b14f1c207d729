"""Tensor parallelism: splits layers, embedding and head of transformers on the meta device, before they have weights.

DeepSpeed's AutoTP splits the two matrices of a pair by columns and by rows, as in Megatron-LM (arXiv:1909.08053,
section 3). Norms are replicated on every rank. Each rank holds some of the rows of the vocabulary, and computes the
logits of its own tokens and its part of the loss, so sums over the vocabulary are communicated in place of logits. A
vocabulary that is not divisible by the number of ranks is split as evenly as possible, without padding.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.autotp_config import AutoTPConfig, PartitionType, TPLayerSpec
from deepspeed.module_inject.layers import (
    TensorParallel_Layer,
    VocabParallelEmbedding,
    VocabParallelLinear,
    set_autotp_mode,
)
from deepspeed.pipe import PipelineModule
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss
from torch import nn
from torch.distributed import ProcessGroup
from transformers import PretrainedConfig

from deepspeed_compress.model_families import HF_NAME, Modules


def split_layers(module: nn.Module, config: PretrainedConfig, modules: Modules, group: ProcessGroup) -> AutoTP:
    """Split the layers of `module` that `modules` names between the ranks of `group`. Weights are filled in afterwards.

    Returns:
        The splitter, which registers hooks once the weights are there.
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
        partition_config=_partition(config, modules, dist.get_world_size(group)),
        model_config=config,
        training_mode=True,
    )
    # AutoTP's own setter only supports groups of a job without a pipeline.
    splitter.mp_group, splitter.mp_size = group, dist.get_world_size(group)
    splitter.update_linear_policies()
    splitter._replace_module(module)
    for name, child in module.named_modules():
        if name.rpartition(".")[2] == modules.attention:
            modules.narrow(child, splitter.mp_size)
    return splitter


def _partition(config: PretrainedConfig, modules: Modules, size: int) -> AutoTPConfig:
    fused = modules.fused(config)
    specs = [_spec([name], PartitionType.COLUMN, (rows, -1)) for name, rows in fused.items()]
    specs.append(_spec([name for name in modules.columns if name not in fused], PartitionType.COLUMN))
    specs.append(_spec(modules.rows, PartitionType.ROW))
    if modules.norms:
        specs.append(_spec(modules.norms, PartitionType.SKIP, grad_allreduce=True))
    return AutoTPConfig(tp_size=size, layer_specs=specs)


def _spec(names: Any, kind: PartitionType, shape: Any = None, grad_allreduce: bool = False) -> TPLayerSpec:
    patterns = [rf".*\.{re.escape(name)}\.weight$" for name in names]
    return TPLayerSpec(patterns, kind, shape=shape, partition_dim=None, grad_allreduce=grad_allreduce)


def vocabulary_weights(model: Any) -> frozenset[str]:
    """Return the weight names of the token embedding and the head, or an empty set if they must stay whole.

    DeepSpeed cannot split an embedding that does more than a lookup (Gemma 2 scales the result).
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding).forward is not nn.Embedding.forward:
        return frozenset()
    return frozenset(getattr(module.weight, HF_NAME) for module in (embedding, head))


def split_vocabulary(module: nn.Module, names: frozenset[str], splitter: AutoTP) -> TensorParallel_Layer | None:
    """Split the modules in `module` whose weight is one of `names`; return the one that makes logits, or None."""
    options = {"mp_group": splitter.mp_group, "tp_meta": splitter.tp_meta}
    head = None
    for parent, name, child in _found(module, names, nn.Linear):
        head = VocabParallelLinear(child, name="lm_head", **options)
        setattr(parent, name, head)
    for parent, name, child in _found(module, names, nn.Embedding):
        tied = head if head is not None and child.weight is head.weight else None
        split = VocabParallelEmbedding(child, tied_vocab_parallel_linear=tied, name="lm_head", **options)
        setattr(parent, name, split)
        if isinstance(module, PipelineModule) and module.stage_id == module.num_stages - 1:
            # The last stage makes logits even if it has no head of its own.
            head = head or split
    return head


def _found(module: nn.Module, names: frozenset[str], kind: type[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, kind) and getattr(child.weight, HF_NAME, None) in names
    ]


def use_split_loss(module: Any, head: Any) -> None:
    """Make `module` compute its loss from logits that are split over the ranks."""
    loss = VocabParallelCausalLMLoss(head.mp_group, None, head.vocab_start_index, head.vocab_end_index)
    if isinstance(module, PipelineModule):
        module.loss_fn = loss
    else:
        module.loss_function = loss


@contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """Make a model with a split head return the logits of all tokens on every rank. No loss can be computed inside."""
    heads = [module for module in model.modules() if isinstance(module, VocabParallelLinear)]
    for head in heads:
        head.gather_output = True
    try:
        yield
    finally:
        for head in heads:
            head.gather_output = False
