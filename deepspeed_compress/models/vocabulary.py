"""Vocabulary-parallel embedding and head of a tensor-parallel model; each rank holds some of the rows.

Each rank computes the logits of its own tokens and its part of the loss, so sums over the vocabulary are communicated
in place of logits (arXiv:1909.08053, section 3). A vocabulary that is not divisible by the number of ranks is split as
evenly as possible, without padding.
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
    """Return True for the last stage of a pipeline, which makes logits even if it has no head of its own."""
    return isinstance(module, PipelineModule) and module.stage_id == module.num_stages - 1


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
