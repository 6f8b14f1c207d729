"""Token embedding and head of a model with tensor parallelism, each rank with some of the rows.

Each rank has the logits of its own tokens, and the loss is computed where they are: sums over the vocabulary travel,
not logits (arXiv:1909.08053, section 3). A vocabulary that the ranks do not divide is split as evenly as possible, so
that none needs padding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.module_inject.auto_tp import AutoTP
from deepspeed.module_inject.layers import TensorParallel_Layer, VocabParallelEmbedding, VocabParallelLinear
from deepspeed.pipe import PipelineModule
from deepspeed.sequence.cross_entropy import VocabParallelCausalLMLoss
from torch import nn

from deepspeed_compress.config.names import HF_NAME

__all__ = ["split_vocabulary", "use_split_loss", "vocabulary_weights", "whole_logits"]


def vocabulary_weights(model: Any) -> frozenset[str]:
    """Names of the weights of token embedding and head; none when the embedding does more than looking up.

    DeepSpeed splits no such (Gemma-2 scales what it looked up): then both stay whole.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding).forward is not nn.Embedding.forward:
        return frozenset()
    return frozenset(getattr(module.weight, HF_NAME) for module in (embedding, head))


def split_vocabulary(module: nn.Module, names: frozenset[str], splitter: AutoTP) -> TensorParallel_Layer | None:
    """Split the modules below `module` whose weight is one of `names`. The one that makes logits, if it is there."""
    options = {"mp_group": splitter.mp_group, "tp_meta": splitter.tp_meta}
    head = None
    for parent, name, child in _found(module, names, nn.Linear):
        head = VocabParallelLinear(child, name="lm_head", **options)
        setattr(parent, name, head)
    for parent, name, child in _found(module, names, nn.Embedding):
        tied = head if head is not None and child.weight is head.weight else None
        split = VocabParallelEmbedding(child, tied_vocab_parallel_linear=tied, name="lm_head", **options)
        setattr(parent, name, split)
        head = head or (split if _projects(module) else None)
    return head


def _found(module: nn.Module, names: frozenset[str], kind: type[nn.Module]) -> list[tuple[nn.Module, str, Any]]:
    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, kind) and getattr(child.weight, HF_NAME, None) in names
    ]


def _projects(module: nn.Module) -> bool:
    """Whether this is the last stage of a pipeline, which makes logits even where it has no head of its own."""
    return isinstance(module, PipelineModule) and module.stage_id == module.num_stages - 1


def use_split_loss(module: Any, head: Any) -> None:
    """The loss for logits of which each rank has some, in the place where `module` has its loss."""
    loss = VocabParallelCausalLMLoss(head.mp_group, None, head.vocab_start_index, head.vocab_end_index)
    if isinstance(module, PipelineModule):
        module.loss_fn = loss
    else:
        module.loss_function = loss


@contextmanager
def whole_logits(model: nn.Module) -> Iterator[None]:
    """Inside, a model whose head is split returns the logits of all tokens on every rank; no loss can be computed."""
    heads = [module for module in model.modules() if isinstance(module, VocabParallelLinear)]
    for head in heads:
        head.gather_output = True
    try:
        yield
    finally:
        for head in heads:
            head.gather_output = False
