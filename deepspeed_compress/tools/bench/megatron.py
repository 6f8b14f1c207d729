"""Megatron-core as a peer of DeepSpeed: its distributed optimizer, with and without this package."""

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from deepspeed_compress import megatron
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import read_model_config
from deepspeed_compress.models.megatron import gpt_options, load_weights, without_cuda
from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.peers import DTYPES, Optimizer
from deepspeed_compress.tools.bench.workload import Workload

_RECOMPUTE: Mapping[str, Any] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


class MegatronStepper:
    """Training loop of the workload's model as GPTModel, in Megatron's own schedule with its distributed optimizer.

    Gradients and weights are communicated during backward and forward. The loss is this rank's own. The stepper owns
    `parallel_state` until it is closed. `section` is the package's section, or None for plain Megatron.
    """

    def __init__(self, workload: Workload, optimizer: Optimizer, section: Mapping[str, Any] | None) -> None:
        self.workload = workload
        with without_cuda():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
            model_parallel_cuda_manual_seed(workload.seed)
            self.chunk = _chunk(workload)
            self.optimizer: Any = _optimizer(workload, optimizer, self.chunk)
            _connect(self.chunk, self.optimizer)
            document = None if section is None else {SECTION: dict(section)}
            attached = None if document is None else megatron.attach(self.chunk, self.optimizer, document)
        self.session: Any = None if attached is None else attached.session
        [part] = self.optimizer.chained_optimizers
        self.schedule = optimizer.scheduled(part.optimizer)
        self.positions = torch.arange(workload.seq_len, device=device())
        self.mask = torch.ones(workload.seq_len, workload.seq_len, device=device()).triu(1).bool()[None, None]

    def train(self, batch: Tensor) -> Tensor:
        """Run one optimizer step and return the mean loss, of shape ().

        `batch` holds token windows of shape (micro_batches, micro_size, length).
        """
        self.chunk.train()
        with without_cuda():
            self.chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            loss = self._run(batch, forward_only=False)
            self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return loss

    def evaluate(self, batch: Tensor) -> Tensor:
        """Return the mean loss on `batch` without computing gradients."""
        self.chunk.eval()
        with torch.no_grad(), without_cuda():
            return self._run(batch, forward_only=True)

    def close(self) -> None:
        with without_cuda():
            parallel_state.destroy_model_parallel()

    def _run(self, batch: Tensor, forward_only: bool) -> Tensor:
        losses = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter(batch),
            model=self.chunk,
            num_microbatches=len(batch),
            seq_length=batch.shape[-1],
            micro_batch_size=batch.shape[1],
            forward_only=forward_only,
        )
        return torch.stack(losses).mean()

    def _forward(self, batches: Iterator[Tensor], chunk: Any) -> tuple[Tensor, Any]:
        tokens = next(batches)
        losses = chunk(tokens, self.positions.expand_as(tokens), self.mask, labels=tokens.roll(-1, 1))
        return losses, partial(_mean_loss)


def _mean_loss(losses: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean of losses (micro_size, length) twice. The last token is excluded, because nothing follows it."""
    loss = losses[:, :-1].float().mean()
    # Megatron's schedule divides the first one in place.
    return loss, loss.detach().clone()


def _chunk(workload: Workload) -> Any:
    """Return the whole model, wrapped in Megatron's data parallelism."""
    path, dtype = Path(workload.model), DTYPES[workload.precision]
    described = read_model_config(path)
    options = gpt_options(described)
    config = TransformerConfig(
        **options.transformer,
        **_precision(workload),
        **(_RECOMPUTE if workload.recompute else {}),
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        # These need kernels of Apex.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )
    module = GPTModel(config, get_gpt_layer_local_spec(), **options.model).to(device())
    load_weights([module], path, described, workload.seed)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, overlap_param_gather=True, use_distributed_optimizer=True
    )
    whole = module if dtype is torch.float32 else Float16Module(config, module)
    return DistributedDataParallel(config, ddp, whole)


def _optimizer(workload: Workload, optimizer: Optimizer, chunk: Any) -> Any:
    """Return AdamW with the same settings as PyTorch's and DeepSpeed's. It decays all parameters alike."""
    given = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, **optimizer.adamw}
    config = OptimizerConfig(
        optimizer="adam",
        lr=given["lr"],
        adam_beta1=given["betas"][0],
        adam_beta2=given["betas"][1],
        adam_eps=given["eps"],
        weight_decay=given["weight_decay"],
        clip_grad=workload.clipping,
        use_distributed_optimizer=True,
        overlap_param_gather=True,
        **_precision(workload),
    )
    return get_megatron_optimizer(config, [chunk], config_overrides={}, use_gloo_process_groups=False)


def _connect(chunk: Any, optimizer: Any) -> None:
    """Register the model and the optimizer with Megatron's schedule."""
    config = chunk.config
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    config.no_sync_func = chunk.no_sync


def _precision(workload: Workload) -> dict[str, Any]:
    named = {name: workload.precision == name for name in ("bf16", "fp16")}
    return {**named, "params_dtype": DTYPES[workload.precision]}
