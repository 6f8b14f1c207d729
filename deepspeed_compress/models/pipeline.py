"""Transformers causal LMs as DeepSpeed PipelineModules; each stage holds the weights of its own layers."""

from collections.abc import Callable, Sequence
from typing import Any

from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipeModelDataParallelTopology
from torch import nn

from deepspeed_compress.models.balance import Partition
from deepspeed_compress.models.families import Family
from deepspeed_compress.models.layers import DecoderLayer, Embedding, Head, Prologue, next_token_loss, project_with

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


def pipeline_layers(model: Any, family: Family) -> list[Layer]:
    """Return the modules of a causal LM as a sequence. A tied head and its embedding are one module in two places."""
    backbone, config = getattr(model, family.backbone), model.config
    tokens, norm = model.get_input_embeddings(), getattr(backbone, family.norm)
    tied = config.tie_word_embeddings
    first: Layer = _tied(tokens) if tied else Embedding(tokens)
    rotary = getattr(backbone, "rotary_emb", None)
    return [
        first,
        *(Prologue(getattr(backbone, name), name == family.positions) for name in family.prologue),
        *(DecoderLayer(layer, index, config, rotary) for index, layer in enumerate(getattr(backbone, family.layers))),
        Head(norm, None if tied else model.get_output_embeddings(), config),
        *([_tied(tokens, project_with(config))] if tied else []),
    ]


def _tied(tokens: nn.Module, project: Any = None) -> TiedLayerSpec:
    return TiedLayerSpec(TIED, Embedding, tokens, forward_fn=project, tied_weight_attr=["tokens.weight"])
