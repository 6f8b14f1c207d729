"""GPT-2 as a DeepSpeed PipelineModule: the blocks of transformers, cut between layers.

The layers compute what GPT2LMHeadModel computes, in the same order, so that the loss is the same for the same
weights. The token embedding and the output projection share one weight, which DeepSpeed keeps equal on the
first and the last stage.
"""

from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from transformers import GPT2Config, PretrainedConfig, PreTrainedModel
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from deepspeed_compress.errors import UnsupportedError

TOKENS = "tokens"


class TokenEmbedding(nn.Module):
    """Token ids (batch, length) to hidden states (batch, length, width)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.n_embd))
        nn.init.normal_(self.weight, std=config.initializer_range)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class PositionEmbedding(nn.Module):
    """Adds the position's vector to each hidden state, then drops out."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.n_positions, config.n_embd))
        nn.init.normal_(self.weight, std=config.initializer_range)
        self.dropout = nn.Dropout(config.embd_pdrop)

    def forward(self, hidden: Tensor) -> Tensor:
        dropped: Tensor = self.dropout(hidden + self.weight[: hidden.shape[1]])
        return dropped


def project(embedding: TokenEmbedding, hidden: Tensor) -> Tensor:
    """Hidden states to logits (batch, length, vocabulary) with the tied token embedding."""
    return F.linear(hidden, embedding.weight)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Mean cross entropy of each token given those before it, as transformers computes it (in fp32)."""
    vocab_size = logits.shape[-1]
    return F.cross_entropy(logits[:, :-1].float().reshape(-1, vocab_size), tokens[:, 1:].reshape(-1))


def build_pipeline(source: PreTrainedModel, stages: int) -> PipelineModule:
    """This rank's stage of `source`, a GPT2LMHeadModel, with its weights. torch.distributed must run.

    `source` is whole on every rank while the stages are built. Raises UnsupportedError for another family,
    an untied output projection, or fewer layers than stages.
    """
    config = source.config
    check_pipeline(config, stages)
    module = PipelineModule(_layers(config), num_stages=stages, loss_fn=next_token_loss)
    copy_weights(source, module)
    return module


def check_pipeline(config: PretrainedConfig, stages: int) -> None:
    """Raises UnsupportedError unless a model of `config` can be cut into `stages`."""
    where = f"/deepspeed_compress/parallelism/pipeline is {stages}"
    if config.model_type != "gpt2":
        raise UnsupportedError(
            f'{where}: built for model_type "gpt2" only, not "{config.model_type}"; write pipeline 1'
        )
    if not config.tie_word_embeddings:
        raise UnsupportedError(f"{where}: needs tie_word_embeddings true in the model config")
    if config.n_layer < stages:
        raise UnsupportedError(f"{where}, but the model has n_layer {config.n_layer}; write at most that many stages")


def copy_weights(source: PreTrainedModel, module: PipelineModule) -> None:
    """Give this rank's layers the weights of `source`."""
    weights = source.state_dict()
    first = module._local_start
    with torch.no_grad():
        for index in range(first, module._local_stop):
            layer = module.forward_funcs[index - first]
            prefix = _name_in_source(index, source.config)
            # A tied layer after its first place is a partial over the module that is already filled.
            if isinstance(layer, nn.Module):
                layer.load_state_dict(_with_prefix(weights, prefix))
        for tied in module.tied_modules.values():
            tied.load_state_dict(_with_prefix(weights, "transformer.wte."))


def _layers(config: PretrainedConfig) -> list[LayerSpec]:
    # sdpa takes causality from the module when no mask is given; eager attention would need a mask.
    config._attn_implementation = "sdpa"
    return [
        TiedLayerSpec(TOKENS, TokenEmbedding, config),
        LayerSpec(PositionEmbedding, config),
        *[LayerSpec(GPT2Block, config, layer_idx=index) for index in range(config.n_layer)],
        LayerSpec(nn.LayerNorm, config.n_embd, eps=config.layer_norm_epsilon),
        TiedLayerSpec(TOKENS, TokenEmbedding, config, forward_fn=project),
    ]


def _name_in_source(index: int, config: PretrainedConfig) -> str:
    """Prefix of the parameters of pipeline layer `index` in GPT2LMHeadModel."""
    blocks = [f"transformer.h.{block}." for block in range(config.n_layer)]
    return ["transformer.wte.", "transformer.wpe.", *blocks, "transformer.ln_f.", "transformer.wte."][index]


def _with_prefix(weights: dict[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
