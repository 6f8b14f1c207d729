"""Small models for megatron-core on the CPU."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_compress.models.megatron import without_cuda

_NEVER_CLOSED = ExitStack()


def on_cpu() -> None:
    """Make Megatron use the CPU in place of CUDA for the rest of this process."""
    _NEVER_CLOSED.enter_context(without_cuda())


def start(**sizes: Any) -> None:
    """Join the ranks of a job, with `sizes` for `initialize_model_parallel`."""
    on_cpu()
    dist.init_process_group("gloo")
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(0)


@dataclass(frozen=True)
class Options:
    """Options of Megatron. `ddp` and `optimizer` are further options of its configurations."""

    distributed: bool = True
    overlap: bool = True
    dtype: torch.dtype = torch.float32
    bucket_size: int | None = 16
    ddp: Mapping[str, Any] = field(default_factory=dict)
    optimizer: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **more: Any) -> Any:
        """Return the configuration of a small transformer."""
        from megatron.core.transformer import TransformerConfig

        given = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 2, **more}
        return TransformerConfig(
            use_cpu_initialization=True,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            params_dtype=self.dtype,
            pipeline_dtype=self.dtype,
            bf16=self.dtype is torch.bfloat16,
            gradient_accumulation_fusion=False,
            bias_dropout_fusion=False,
            **given,
        )

    def wrap(self, modules: list[nn.Module], config: Any) -> tuple[list[Any], Any]:
        """Return `modules` wrapped in Megatron's DDP, and their optimizer."""
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        chunks = [
            DistributedDataParallel(
                config,
                DistributedDataParallelConfig(
                    grad_reduce_in_fp32=True,
                    use_distributed_optimizer=self.distributed,
                    overlap_grad_reduce=self.overlap,
                    bucket_size=self.bucket_size,
                    **self.ddp,
                ),
                module,
                disable_bucketing=number > 0,
            )
            for number, module in enumerate(modules)
        ]
        given = {"optimizer": "adam", "lr": 0.01, "clip_grad": 1.0, "weight_decay": 0.0, **self.optimizer}
        settings = OptimizerConfig(
            use_distributed_optimizer=self.distributed,
            bf16=self.dtype is torch.bfloat16,
            fp16=self.dtype is torch.float16,
            params_dtype=self.dtype,
            **given,
        )
        return chunks, get_megatron_optimizer(settings, chunks, use_gloo_process_groups=False)


SEQUENCE, WORDS = 16, 64


class Gpt:
    """GPTModel of megatron-core, trained with Megatron's schedules.

    Args:
        options: options of Megatron.
        text: tokens; every rank of a data-parallel group reads different ones.
        micro_batches: number of micro-batches per step.
        layout: further options of the configuration. The sizes of groups are those passed to `start`.
    """

    def __init__(self, options: Options, text: Tensor, micro_batches: int = 2, **layout: Any) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import finalize_model_grads

        self.text, self.micro_batches, self.options = text.clamp(max=WORDS - 1), micro_batches, options
        config = options.config(
            pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
            tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
            expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
            **layout,
        )
        self.virtual = layout.get("virtual_pipeline_model_parallel_size") or 0
        modules = [self._chunk(config, number if self.virtual else None) for number in range(self.virtual or 1)]
        self.chunks, self.optimizer = options.wrap(modules, config)
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = self.optimizer.scale_loss
        every = [chunk.no_sync for chunk in self.chunks]
        config.no_sync_func = every if self.virtual else every[0]
        self.mask = torch.ones(SEQUENCE, SEQUENCE).triu(1).bool()[None, None]
        self.positions = torch.arange(SEQUENCE).expand(2, SEQUENCE)

    def _chunk(self, config: Any, number: int | None) -> nn.Module:
        from megatron.core import parallel_state
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.module import Float16Module

        torch.manual_seed(0)
        module = GPTModel(
            config,
            get_gpt_layer_local_spec(num_experts=config.num_moe_experts),
            WORDS,
            SEQUENCE,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=number),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=number),
            share_embeddings_and_output_weights=True,
            vp_stage=number,
        )
        return Float16Module(config, module) if config.bf16 else module

    def step(self, step: int) -> float:
        """Do one optimizer step, and return the mean loss of this rank's share, or 0 on stages without a loss."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        batches = list(self._batches(step))
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(batches) for _ in self.chunks] if self.virtual else iter(batches),
            model=self.chunks if self.virtual else self.chunks[0],
            num_microbatches=self.micro_batches,
            seq_length=SEQUENCE,
            micro_batch_size=2,
            forward_only=False,
        )
        applied, *_ = self.optimizer.step()
        assert applied
        return sum(float(loss["loss"]) for loss in losses) / max(1, len(losses))

    def _batches(self, step: int) -> Iterator[Tensor]:
        from megatron.core import parallel_state

        generator = torch.Generator().manual_seed(1000 * parallel_state.get_data_parallel_rank() + step)
        for _ in range(self.micro_batches):
            first = torch.randint(len(self.text) - SEQUENCE - 1, (2,), generator=generator)
            yield torch.stack([self.text[start : start + SEQUENCE + 1] for start in first.tolist()])

    def _forward(self, batches: Iterator[Tensor], chunk: nn.Module) -> tuple[Tensor, Any]:
        tokens = next(batches)
        output = chunk(tokens[:, :-1], self.positions, self.mask, labels=tokens[:, 1:])
        return output, _sum if chunk.config.calculate_per_token_loss else _mean

    def gathered(self) -> None:
        """Gather the weights of all ranks, even if the next forward pass would do it."""
        for chunk in self.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def weights(self) -> dict[str, Tensor]:
        self.gathered()
        return {
            f"{number}.{name}": parameter.detach().clone()
            for number, chunk in enumerate(self.chunks)
            for name, parameter in chunk.module.named_parameters()
        }


def _mean(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = losses.float().mean()
    return loss, {"loss": loss.detach()}


def _sum(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return the sum of the losses. Megatron divides by the number of tokens after the reduction of gradients."""
    loss = losses.float()
    return loss.sum(), torch.tensor(loss.numel()), {"loss": loss.mean().detach()}
