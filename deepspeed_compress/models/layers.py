"""Layers of a pipeline, made from the modules of a transformers causal LM.

Layers pass on hidden states (batch, length, width), or a pair of hidden states and an attention mask (batch, length)
of the tokens that are not padding. The first layer takes token ids in place of hidden states.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.module_inject.layers import ColumnParallel, VocabParallelEmbedding
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

_CACHE = "cache" if "cache" in inspect.signature(create_causal_mask).parameters else "past_key_values"
"""Name of the argument that takes a cache. transformers 5.24 renamed it, and warns of the old name at every call."""

StageInput = Tensor | tuple[Tensor, Tensor]


class _HiddenLayer(nn.Module):
    """Layer that changes the hidden states and passes a mask on unchanged."""

    def transform(self, hidden: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, inputs: StageInput) -> StageInput:
        if isinstance(inputs, tuple):
            return self.transform(inputs[0]), inputs[1]
        return self.transform(inputs)


class Embedding(_HiddenLayer):
    """Layer that maps token ids to hidden states."""

    def __init__(self, tokens: nn.Module) -> None:
        super().__init__()
        self.tokens = tokens

    def transform(self, hidden: Tensor) -> Tensor:
        embedded: Tensor = self.tokens(hidden)
        return embedded


class Prologue(_HiddenLayer):
    """Layer between the embedding and the first decoder layer: adds learned positions, or applies dropout."""

    def __init__(self, module: nn.Module, positions: bool) -> None:
        super().__init__()
        self.module, self.positions = module, positions

    def transform(self, hidden: Tensor) -> Tensor:
        if not self.positions:
            dropped: Tensor = self.module(hidden)
            return dropped
        added: Tensor = hidden + self.module(_positions(hidden))
        return added


class DecoderLayer(nn.Module):
    """Decoder layer of transformers that computes the mask and the rotary embedding its model would pass to it."""

    def __init__(self, layer: nn.Module, index: int, config: Any, rotary: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.rotary, self.config = layer, rotary, config
        self.make_mask = _mask_of(config, index)

    def forward(self, inputs: StageInput) -> StageInput:
        hidden, padding = inputs if isinstance(inputs, tuple) else (inputs, None)
        positions = _positions(hidden)
        mask = self.make_mask(
            config=self.config,
            inputs_embeds=hidden,
            attention_mask=padding,
            position_ids=positions,
            **{_CACHE: None},
        )
        rotated = {} if self.rotary is None else {"position_embeddings": self.rotary(hidden, positions)}
        output = self.layer(hidden, attention_mask=mask, position_ids=positions, **rotated)
        return output if padding is None else (output, padding)


class Head(nn.Module):
    """Final norm and, unless another layer projects, the projection to logits (batch, length, vocabulary)."""

    def __init__(self, norm: nn.Module, projection: nn.Module | None, config: Any) -> None:
        super().__init__()
        self.norm, self.projection, self.config = norm, projection, config

    def forward(self, inputs: StageInput) -> Tensor:
        hidden = self.norm(inputs[0] if isinstance(inputs, tuple) else inputs)
        return hidden if self.projection is None else _cap(self.projection(hidden), self.config)


def project_with(config: Any) -> Callable[[Embedding, Tensor], Tensor]:
    """Return a function that projects hidden states to logits with the weight of a tied embedding."""

    def project(embedding: Any, hidden: Tensor) -> Tensor:
        if isinstance(embedding.tokens, VocabParallelEmbedding):
            # Every rank multiplies by its own rows; the backward pass sums the gradients of the hidden states.
            hidden = ColumnParallel.apply(embedding.tokens.mp_group, hidden)
        return _cap(F.linear(hidden, embedding.tokens.weight), config)

    return project


def next_token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross entropy in fp32 of each label given the tokens before it, as transformers computes it.

    Args:
        logits: (batch, length, vocabulary).
        labels: (batch, length); -100 marks tokens without a loss.
    """
    loss: Tensor = ForCausalLMLoss(logits, labels, logits.shape[-1])
    return loss


def _positions(hidden: Tensor) -> Tensor:
    return torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)


def _mask_of(config: Any, index: int) -> Callable[..., Tensor | None]:
    """Return the function that makes the mask of layer `index`: causal over all tokens, or over a sliding window.

    `layer_types` of the config decides if present; otherwise all layers are alike.
    """
    kinds = getattr(config, "layer_types", None)
    window = kinds[index] == "sliding_attention" if kinds else getattr(config, "sliding_window", None) is not None
    make: Callable[..., Tensor | None] = create_sliding_window_causal_mask if window else create_causal_mask
    return make


def _cap(logits: Tensor, config: Any) -> Tensor:
    """Apply the soft capping of logits that Gemma 2 uses, if the config asks for it."""
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap
