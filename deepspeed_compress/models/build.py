"""Building of a model for `deepspeed.initialize` in any layout of pipeline, tensor and data parallelism."""

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import PIPELINE_REPLICATED_PARAMETER_PATTERNS, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info
from deepspeed.utils import groups
from torch import nn
from transformers import PretrainedConfig

from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.model_families import Modules, modules_of
from deepspeed_compress.models.pipeline import CausalLMPipeline, make_topology, partition_by, pipeline_layers
from deepspeed_compress.models.sources import Source, build_model, build_skeleton, fill, linear_layers, open_source
from deepspeed_compress.models.tensor import split_layers, split_vocabulary, use_split_loss, vocabulary_weights

KEY = "/deepspeed_compress/parallelism"
_TIED = r"^tied_modules\."
"""Pattern of weights that several pipeline stages hold; the converter takes them from the first of these stages."""


@dataclass(frozen=True)
class Layout:
    """Layout of a model.

    Attributes:
        tensor: number of ranks that share each layer.
        pipeline: number of stages.
        partition: see `pipeline.partition_by`.
        recompute: recompute activations inside decoder layers in the backward pass.
    """

    tensor: int = 1
    pipeline: int = 1
    partition: str | tuple[int, ...] = "balanced"
    recompute: bool = False


def build_parallel(path: Path, config: PretrainedConfig, seed: int, layout: Layout) -> nn.Module:
    """Return this rank's part of the model at `path` in fp32.

    Weights are the saved ones, or new ones that are the same in every layout. torch.distributed must be initialized.
    With a pipeline, the result is a PipelineModule. If `tensor` is above 1, its layers are split already, and DeepSpeed
    does not split them again.

    Raises:
        ConfigError: if the layout does not fit the model or the job, or the saved weights are damaged.
        UnsupportedError: if the model cannot be split like this.
    """
    whole = layout.tensor == layout.pipeline == 1
    model: Any = build_model(path, config, seed) if whole else build_skeleton(config)
    if layout.recompute:
        model.gradient_checkpointing_enable()
    if whole:
        return model  # type: ignore[no-any-return]  # a PreTrainedModel
    check_layout(config, layout, dist.get_world_size())
    source, modules = open_source(path, model, seed), modules_of(config)
    if layout.tensor > 1:
        linear_layers(model)
    if layout.pipeline > 1:
        return _pipeline(model, modules, source, layout)
    groups._init_tp_mesh_device(tensor_model_parallel_size=layout.tensor)
    _split_and_fill(model, model, modules, source, groups.get_tensor_model_parallel_group())
    model.loss_type = getattr(model, "loss_type", None) or "ForCausalLM"
    return model  # type: ignore[no-any-return]


def _pipeline(model: Any, modules: Modules, source: Source, layout: Layout) -> CausalLMPipeline:
    def finish(stage: CausalLMPipeline) -> None:
        group = stage._grid.get_slice_parallel_group() if layout.tensor > 1 else None
        _split_and_fill(stage, model, modules, source, group)

    topology = make_topology(layout.pipeline, layout.tensor, dist.get_world_size())
    return CausalLMPipeline(pipeline_layers(model, modules), topology, partition_by(layout.partition), finish)


def _split_and_fill(module: Any, model: Any, modules: Modules, source: Source, group: Any) -> None:
    """Split `module`, which is the skeleton `model` or a stage of it, over `group` (None: no split), and fill it."""
    splitter = split_layers(module, model.config, modules, group) if group is not None else None
    head = split_vocabulary(module, vocabulary_weights(model), splitter) if splitter is not None else None
    # This is a collective call, so it must come before `fill`, which may fail on some ranks if a file is damaged.
    _describe_parts(module)
    fill(module, source)
    if splitter is not None:
        # Sum the gradients of replicated norms, and tell DeepSpeed not to split the module again.
        splitter.register_replicated_grad_hooks(module)
        module.ds_autotp_parsed = True
    if head is not None:
        use_split_loss(module, head)


def _describe_parts(module: nn.Module) -> None:
    """Record on `module` how the weights of all stages are split, for DeepSpeed's converter of universal checkpoints.

    The converter (`deepspeed.checkpoint.ds_to_universal`) reads only the first stage. Collective over all ranks; it
    needs no weights.
    """
    described: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(described, collect_autotp_universal_checkpoint_info(module))
    whole = functools.reduce(_merge, described)
    setattr(module, UNIVERSAL_CHECKPOINT_INFO, whole | {PIPELINE_REPLICATED_PARAMETER_PATTERNS: [_TIED]})


def _merge(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        both = one.keys() & other.keys()
        return one | other | {key: _merge(one[key], other[key]) for key in both}
    if isinstance(one, list):
        return one + [item for item in other if item not in one]
    return one


def check_layout(config: PretrainedConfig, layout: Layout, world_size: int | None = None) -> None:
    """Check that a model of `config` can be split by `layout`, and `world_size` ranks, if their number is known.

    Raises:
        UnsupportedError: if the family cannot be split, or there are more stages than layers.
        ConfigError: if the head counts, or the ranks, are not divisible.
    """
    if layout.tensor == layout.pipeline == 1:
        return
    modules_of(config)
    heads = {name: getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    for name, count in heads.items():
        if count is not None and count % layout.tensor:
            raise ConfigError(
                f"{KEY}/tensor: {layout.tensor} does not divide the model's {name} {count} (allowed: its divisors). "
                "Write one of them."
            )
    if config.num_hidden_layers < layout.pipeline:
        raise UnsupportedError(
            f"{KEY}/pipeline: {layout.pipeline} stages are more than the model's {config.num_hidden_layers} layers "
            "(allowed: at most that many). Write fewer stages."
        )
    needed = layout.tensor * layout.pipeline
    if world_size is not None and world_size % needed:
        raise ConfigError(
            f"{KEY}: tensor {layout.tensor} x pipeline {layout.pipeline} = {needed} ranks do not divide the world size "
            f"{world_size} (allowed: its divisors). Write other values, or start a multiple of {needed} ranks."
        )
