"""Train megatron-core's GPTModel on text files, with compressed gradients.

This is an ordinary megatron-core program. One call attaches compression to the model chunks and their optimizer.

    python -m deepspeed_compress.training.data data/shakespeare
    echo '{"deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}' >int4.json
    torchrun --nproc_per_node 4 launch/train_megatron.py --config int4.json --data data/shakespeare \\
        --output-dir runs/megatron --steps 300 --pipeline 2 --distributed-optimizer --overlap

It uses megatron-core's own layers and their initialization, without Transformer Engine and Apex. Without CUDA it
trains on the CPU. See docs/engines.md.
"""

import argparse
import json
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn
from transformers import GPT2Config, PretrainedConfig

import deepspeed_compress
from deepspeed_compress.models.megatron import gpt_options, without_cuda
from deepspeed_compress.training.data.corpus import text_files
from deepspeed_compress.training.data.tokens import (
    Windows,
    build_cache,
    cache_key,
    open_cache,
    split_windows,
    step_starts,
    train_tokenizer,
)

SIZES = {"layers": 4, "hidden": 160, "heads": 5, "vocab": 4096}
"""Default sizes of the model."""


def main() -> None:
    """Train with the options of the command line."""
    options = parse_options()
    with without_cuda():
        run(options)


def run(options: argparse.Namespace) -> None:
    """Train and evaluate."""
    start(options)
    described = describe(options)
    train, held_out = read_data(options, described.vocab_size)
    config = model_config(options, described)
    modules = [gpt(options, described, config, number) for number in range(options.virtual or 1)]
    chunks = [wrapped(options, config, module, first=number == 0) for number, module in enumerate(modules)]
    optimizer = make_optimizer(options, chunks, lr=options.lr, adam_beta2=0.95, weight_decay=0.1, clip_grad=1.0)
    if options.config is not None:
        deepspeed_compress.megatron.attach(chunks, optimizer, str(options.config))
    steps = Steps(options, config, chunks, optimizer)
    for step in range(1, options.steps + 1):
        loss = steps.train(batches(options, train, (options.seed, step)))
        if step % options.log_every == 0 or step == options.steps:
            report(options, {"step": step, "loss": loss})
    report(options, {"step": options.steps, "eval_loss": evaluate(options, steps, held_out)})
    dist.barrier()
    dist.destroy_process_group()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train megatron-core's GPTModel with compressed gradients.")
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="JSON with the section deepspeed_compress; default: uncompressed")
    add("--data", type=Path, nargs="+", required=True, metavar="PATH", help="text files or directories")
    add(
        "--output-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="directory for losses (metrics.jsonl), tokenizer and encoded text",
    )
    add("--tokenizer", type=Path, metavar="DIR", help="directory with tokenizer.json; trained if missing")
    numbers = {"steps": 300, "seed": 0, "log-every": 10, "seq-len": 128, "micro-batch": 4, "micro-batches": 1}
    layout = {"tensor": 1, "pipeline": 1, "virtual": 0}
    for name, default in {**numbers, **layout, **SIZES}.items():
        add(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    add("--lr", type=float, default=1e-3, help="constant learning rate of Adam; default: 1e-3")
    add("--bf16", action="store_true", help="weights in bf16, gradients accumulated in fp32")
    add(
        "--distributed-optimizer",
        action="store_true",
        help="each rank keeps a part of the fp32 master weights and moments",
    )
    add("--overlap", action="store_true", help="send gradients and weights during backward and forward")
    options = parser.parse_args()
    options.tokenizer = options.tokenizer or options.output_dir / "tokenizer"
    return options


def describe(options: argparse.Namespace) -> PretrainedConfig:
    """Return the transformers config of a GPT-2 with the sizes of `options`."""
    return GPT2Config(
        vocab_size=options.vocab,
        n_positions=options.seq_len,
        n_embd=options.hidden,
        n_layer=options.layers,
        n_head=options.heads,
        activation_function="gelu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")


def start(options: argparse.Namespace) -> None:
    """Initialize the process groups and the random seeds."""
    if torch.cuda.is_available():
        torch.cuda.set_device(device())
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(
        options.tensor, options.pipeline, options.virtual or None, create_gloo_process_groups=False
    )
    torch.manual_seed(options.seed)
    model_parallel_cuda_manual_seed(options.seed)


def read_data(options: argparse.Namespace, vocab_size: int) -> tuple[Windows, Windows]:
    """Return windows for training and for evaluation. The first rank trains the tokenizer and encodes the text."""
    files, cache = text_files(options.data), options.tokenizer / "tokens"
    if dist.get_rank() == 0:
        options.output_dir.mkdir(parents=True, exist_ok=True)
        if not (options.tokenizer / "tokenizer.json").is_file():
            train_tokenizer(files, options.tokenizer, vocab_size)
        build_cache(files, options.tokenizer, cache, cache_key(files, options.tokenizer))
    dist.barrier()
    found = open_cache(cache, cache_key(files, options.tokenizer))
    # One more token, because the label of a token is the next one.
    return split_windows(found, options.seq_len + 1, 0.05)


def model_config(options: argparse.Namespace, described: PretrainedConfig) -> TransformerConfig:
    """Return the megatron-core config of the model in the layout of `options`."""
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    return TransformerConfig(
        **gpt_options(described).transformer,
        tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline,
        virtual_pipeline_model_parallel_size=options.virtual or None,
        bf16=options.bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        use_cpu_initialization=not torch.cuda.is_available(),
        # These need kernels of Apex.
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
    )


def gpt(options: argparse.Namespace, described: PretrainedConfig, config: TransformerConfig, number: int) -> nn.Module:
    """Build model chunk `number` of this rank. Interleaved stages have several chunks per rank."""
    chunk = number if options.virtual else None
    module: nn.Module = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        **gpt_options(described).model,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
    )
    return module.to(device())


def wrapped(
    options: argparse.Namespace, config: TransformerConfig, module: nn.Module, first: bool
) -> DistributedDataParallel:
    """Wrap a model chunk for data parallelism. `first` marks the chunk whose gradients are ready last."""
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=options.overlap,
        overlap_param_gather=options.overlap and options.distributed_optimizer,
        use_distributed_optimizer=options.distributed_optimizer,
    )
    if options.bf16:
        module = Float16Module(config, module)
    return DistributedDataParallel(config, ddp, module, disable_bucketing=not first)


def make_optimizer(
    options: argparse.Namespace, chunks: list[DistributedDataParallel], *, alike: bool = False, **settings: Any
) -> Any:
    """Make Megatron's Adam for `chunks`. If `alike`, it decays vectors, too."""
    config = OptimizerConfig(
        optimizer="adam",
        **settings,
        bf16=options.bf16,
        params_dtype=torch.bfloat16 if options.bf16 else torch.float32,
        use_distributed_optimizer=options.distributed_optimizer,
        overlap_param_gather=options.overlap and options.distributed_optimizer,
    )
    overrides: dict[str, Any] = {"config_overrides": {}} if alike else {}
    return get_megatron_optimizer(config, chunks, use_gloo_process_groups=False, **overrides)


class Steps:
    """Optimizer steps and evaluations with Megatron's own pipeline schedule."""

    def __init__(
        self,
        options: argparse.Namespace,
        config: TransformerConfig,
        chunks: list[DistributedDataParallel],
        optimizer: Any,
    ) -> None:
        self.length, self.chunks, self.optimizer = options.seq_len, chunks, optimizer
        config.finalize_model_grads_func = finalize_model_grads
        config.grad_scale_func = optimizer.scale_loss
        if options.overlap:
            every = [chunk.no_sync for chunk in chunks]
            config.no_sync_func = every if len(every) > 1 else every[0]
        self.positions = torch.arange(self.length, device=device())
        self.mask = torch.ones(self.length, self.length, device=device()).triu(1).bool()[None, None]

    def train(self, batches: list[Tensor]) -> float:
        """Take a step on micro-batches [sequences, seq_len + 1]. Return the mean loss of all data-parallel ranks."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss = self.run(batches, forward_only=False)
        self.optimizer.step()
        return loss

    def run(self, batches: list[Tensor], forward_only: bool) -> float:
        """Run forward, and backward unless `forward_only`, for all micro-batches. Return the mean loss."""
        several = len(self.chunks) > 1
        losses = get_forward_backward_func()(
            forward_step_func=self.forward,
            data_iterator=[iter(batches) for _ in self.chunks] if several else iter(batches),
            model=self.chunks if several else self.chunks[0],
            num_microbatches=len(batches),
            seq_length=self.length,
            micro_batch_size=len(batches[0]),
            forward_only=forward_only,
        )
        # Only the last stage has losses.
        total = torch.tensor([sum(float(loss["loss"]) for loss in losses), len(losses)], dtype=torch.float64)
        total = total.to(device(), torch.float32)
        dist.all_reduce(total)
        return float(total[0] / total[1])

    def forward(self, batches: Iterator[Tensor], chunk: nn.Module) -> tuple[Tensor, Any]:
        """Run forward for a micro-batch, as Megatron's schedule expects it."""
        tokens = next(batches)
        inputs = tokens[:, :-1]
        output = chunk(inputs, self.positions.expand_as(inputs), self.mask, labels=tokens[:, 1:])
        return output, partial(mean_loss)


def batches(options: argparse.Namespace, windows: Windows, seed: tuple[int, int]) -> list[Tensor]:
    """Return the tokens [micro_batch, seq_len + 1] of this data-parallel rank's micro-batches."""
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    starts = step_starts(windows, ranks * options.micro_batches * options.micro_batch, *seed)
    parts = starts.reshape(ranks, options.micro_batches, options.micro_batch)[rank]
    return [torch.from_numpy(np.ascontiguousarray(windows.read(part))).to(device()) for part in parts]


@torch.no_grad()
def evaluate(options: argparse.Namespace, steps: Steps, windows: Windows, count: int = 8) -> float:
    """Return the mean loss over `count` batches."""
    # Training steps never use these seeds.
    seeds = [(options.seed + 1, number) for number in range(1, count + 1)]
    return sum(steps.run(batches(options, windows, seed), forward_only=True) for seed in seeds) / count


def mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean of the token losses [micro_batch, seq_len], as Megatron's schedule expects it."""
    loss = losses.float().mean()
    # Megatron's schedule divides the first value by the number of micro-batches in place.
    return loss, {"loss": loss.detach().clone()}


def report(options: argparse.Namespace, figures: dict[str, float]) -> None:
    """Print a line of JSON on rank 0 and append it to metrics.jsonl."""
    if dist.get_rank() == 0:
        line = json.dumps(figures)
        print(line, flush=True)
        with (options.output_dir / "metrics.jsonl").open("a") as file:
            file.write(line + "\n")


if __name__ == "__main__":
    main()
