"""Transformers causal LMs as DeepSpeed PipelineModules: their layers, and the stages that these are divided into.

Layers pass on hidden states (batch, length, width), or a pair of hidden states and an attention mask (batch, length)
of the tokens that are not padding. The first layer takes token ids in place of hidden states. Each stage holds the
weights of its own layers.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from deepspeed.module_inject.layers import ColumnParallel, VocabParallelEmbedding
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from deepspeed.runtime.utils import partition_balanced
from torch import Tensor, nn
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.model_families import Modules

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
        value: Tensor = self.module(_positions(hidden) if self.positions else hidden)
        return hidden + value if self.positions else value


class DecoderLayer(nn.Module):
    """Decoder layer of transformers that computes the mask and the rotary embedding its model would pass to it."""

    def __init__(self, layer: nn.Module, index: int, config: Any, rotary: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.rotary, self.config = layer, rotary, config
        # The mask is causal over all tokens, or over a sliding window. Without `layer_types`, all layers are alike.
        kinds = getattr(config, "layer_types", None)
        window = kinds[index] == "sliding_attention" if kinds else getattr(config, "sliding_window", None) is not None
        self.make_mask = create_sliding_window_causal_mask if window else create_causal_mask

    def forward(self, inputs: StageInput) -> StageInput:
        hidden, padding = inputs if isinstance(inputs, tuple) else (inputs, None)
        positions = _positions(hidden)
        mask = self.make_mask(
            config=self.config, inputs_embeds=hidden, attention_mask=padding, position_ids=positions, **{_CACHE: None}
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


def _cap(logits: Tensor, config: Any) -> Tensor:
    """Apply the soft capping of logits that Gemma 2 uses, if the config asks for it."""
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


Partition = Callable[[Sequence[Any], int], list[int]]
"""Function of (layers, stages) to stages + 1 bounds; stage i has the layers in range(bounds[i], bounds[i + 1])."""

LOOKUP = 0.1
"""Relative cost of a weight in a lookup table, which is reduced and updated but not used in a matrix multiplication."""


def partition_by(method: str | tuple[int, ...]) -> Partition:
    """Return the partition for "balanced", "parameters", "uniform", or the number of decoder layers per stage."""
    return partial(_cut, _COSTS[method]) if isinstance(method, str) else _by_counts(method)


def _multiplications(layer: Any) -> float:
    """Return the cost of a layer: the head costs as much as its weight, and the embedding almost nothing."""
    tied = isinstance(layer, TiedLayerSpec)
    is_lookup = layer.forward_fn is None if tied else isinstance(layer, Embedding | Prologue)
    return _parameters(layer) * (LOOKUP if is_lookup else 1.0)


def _parameters(layer: Any) -> float:
    module = layer.module_args[0] if isinstance(layer, TiedLayerSpec) else layer
    return float(sum(parameter.numel() for parameter in module.parameters()))


_COSTS: Mapping[str, Callable[[Any], float]] = {
    "balanced": _multiplications,
    "parameters": _parameters,
    "uniform": lambda layer: float(isinstance(layer, DecoderLayer)),
}
"""Costs of a layer, by the name of the method that balances them."""


def _by_counts(counts: tuple[int, ...]) -> Partition:
    """Return a partition with `counts` decoder layers per stage.

    The first stage also gets everything before the decoder layers and the last stage everything after them, so only
    these two may have no decoder layers.
    """

    def cut(layers: Sequence[Any], stages: int) -> list[int]:
        decoders = [index for index, layer in enumerate(layers) if isinstance(layer, DecoderLayer)]
        if len(counts) != stages or sum(counts) != len(decoders) or 0 in counts[1:-1]:
            raise ConfigError(
                f"/deepspeed_compress/parallelism/partition: {list(counts)} (allowed: {stages} numbers, one per stage, "
                f"with a sum of {len(decoders)} decoder layers; only the first and the last stage may have 0). Write "
                'such numbers, or "balanced".'
            )
        starts = [decoders[0] + sum(counts[:stage]) for stage in range(1, stages)]
        return [0, *starts, len(layers)]

    return cut


def _cut(cost: Callable[[Any], float], layers: Sequence[Any], stages: int) -> list[int]:
    # DeepSpeed's search needs integers.
    return [int(bound) for bound in partition_balanced([round(cost(layer) * 10) for layer in layers], stages)]


TIED = "embedding"
"""Key of the tied weight that the first and the last stage share."""

Layer = Any
"""Module or TiedLayerSpec."""


def make_topology(pipeline: int, tensor: int, world_size: int) -> Any:
    """Return a topology in which the ranks that share layers are adjacent, because they communicate most."""
    data = world_size // (pipeline * tensor)
    if tensor == 1:
        return PipeDataParallelTopology(num_pp=pipeline, num_dp=data)
    return PipeModelDataParallelTopology(num_pp=pipeline, num_mp=tensor, num_dp=data)


class CausalLMPipeline(PipelineModule):  # type: ignore[misc]  # DeepSpeed has no types
    """Pipeline of `layers` (from `pipeline_layers`, on the meta device), split into stages by `partition`.

    `finish` splits and fills the stage of this rank. torch.distributed must be initialized.
    """

    def __init__(
        self, layers: Sequence[Layer], topology: Any, partition: Partition, finish: Callable[["CausalLMPipeline"], None]
    ) -> None:
        # DeepSpeed's constructor calls the methods that use these.
        self._partition, self._finish = partition, finish
        super().__init__(layers, topology=topology, loss_fn=next_token_loss)

    def _partition_layers(self, method: str = "") -> None:
        self.parts = self._partition(self._layer_specs, self.num_stages)
        self._set_bounds(*self.parts[self.stage_id : self.stage_id + 2])

    def _build(self) -> None:
        super()._build()
        self._finish(self)


def pipeline_layers(model: Any, modules: Modules) -> list[Layer]:
    """Return the modules of a causal LM as a sequence. A tied head and its embedding are one module in two places."""
    backbone, config = getattr(model, modules.backbone), model.config
    tokens, norm = model.get_input_embeddings(), getattr(backbone, modules.norm)
    tied = config.tie_word_embeddings
    first: Layer = _tied(tokens) if tied else Embedding(tokens)
    rotary = getattr(backbone, "rotary_emb", None)
    return [
        first,
        *(Prologue(getattr(backbone, name), name == modules.positions) for name in modules.prologue),
        *(DecoderLayer(layer, index, config, rotary) for index, layer in enumerate(getattr(backbone, modules.layers))),
        Head(norm, None if tied else model.get_output_embeddings(), config),
        *([_tied(tokens, project_with(config))] if tied else []),
    ]


def _tied(tokens: nn.Module, project: Any = None) -> TiedLayerSpec:
    return TiedLayerSpec(TIED, Embedding, tokens, forward_fn=project, tied_weight_attr=["tokens.weight"])
