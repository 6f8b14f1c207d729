"""Megatron-core as an engine of the studies: steps of `launch/train_megatron.py`, with and without this package."""

from argparse import Namespace
from collections.abc import Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from torch import Tensor

from deepspeed_compress import megatron
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.models.megatron import without_cuda
from deepspeed_compress.tools.bench.peers import INT4, Optimizer, Peer
from deepspeed_compress.tools.bench.workload import Workload
from launch.train_megatron import Steps, gpt, make_optimizer, model_config, wrapped

NAMES: Mapping[str, str] = {
    "embedding.word_embeddings.": "transformer.wte.",
    "embedding.position_embeddings.": "transformer.wpe.",
    "decoder.layers.": "transformer.h.",
    "decoder.final_layernorm.": "transformer.ln_f.",
    ".input_layernorm.": ".ln_1.",
    ".self_attention.linear_qkv.": ".attn.c_attn.",
    ".self_attention.linear_proj.": ".attn.c_proj.",
    ".pre_mlp_layernorm.": ".ln_2.",
    ".mlp.linear_fc1.": ".mlp.c_fc.",
    ".mlp.linear_fc2.": ".mlp.c_proj.",
}
"""Parts of the names of Megatron's parameters, and the same parts in transformers' GPT-2."""


@torch.no_grad()
def copy_weights(source: Mapping[str, Tensor], module: Any) -> None:
    """Copy the weights of transformers' GPT-2 with tied embeddings into a whole GPTModel.

    GPT-2 stores transposed matrices (`Conv1D`), and the queries of all heads, then the keys, then the values. Megatron
    stores the three head by head.
    """
    for name, parameter in module.named_parameters():
        found = reduce(lambda known, part: known.replace(part, NAMES[part]), NAMES, name)
        value = source[found]
        if ".linear_" in name:
            value = value.t()
        if ".linear_qkv." in name:
            of_heads = value.reshape(3, module.config.num_attention_heads, -1, *value.shape[1:])
            value = of_heads.transpose(0, 1).reshape(value.shape)
        parameter.copy_(value)


class MegatronStepper:
    """Training loop of the workload's model as GPTModel, with Megatron's distributed optimizer.

    Gradients and weights are communicated during backward and forward. The stepper owns `parallel_state` until it is
    closed. `section` is the package's section, or None for plain Megatron.
    """

    def __init__(
        self, workload: Workload, optimizer: Optimizer, start: int, section: Mapping[str, Any] | None = None
    ) -> None:
        options = Namespace(
            tensor=1,
            pipeline=1,
            virtual=0,
            bf16=workload.precision == "bf16",
            distributed_optimizer=True,
            overlap=True,
            # The last token is only a label.
            seq_len=workload.seq_len - 1,
        )
        path, described = Path(workload.model), read_model_config(Path(workload.model))
        with without_cuda():
            parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
            model_parallel_cuda_manual_seed(workload.seed)
            config = model_config(options, described)
            module = gpt(options, described, config, 0)
            copy_weights(build_model(path, described, workload.seed).state_dict(), module)
            self.chunk = wrapped(options, config, module, first=True)
            trained = make_optimizer(options, [self.chunk], alike=True, **_adam(workload, optimizer))
            document = {SECTION: dict(section or {})}
            attached = None if section is None else megatron.attach(self.chunk, trained, document)
        self.session: Any = None if attached is None else attached.session
        self.steps = Steps(options, config, [self.chunk], trained)
        [part] = trained.chained_optimizers
        self.schedule = optimizer.scheduled(part.optimizer)

    def train(self, batch: Tensor) -> Tensor:
        """Run one optimizer step on tokens (micro_batches, micro_size, length). Return the mean loss of all ranks."""
        self.chunk.train()
        with without_cuda():
            loss = self.steps.train(list(batch))
        if self.schedule is not None:
            self.schedule.step()
        return torch.tensor(loss)

    def evaluate(self, batch: Tensor) -> Tensor:
        """Return the mean loss of all ranks without computing gradients."""
        self.chunk.eval()
        with torch.no_grad(), without_cuda():
            return torch.tensor(self.steps.run(list(batch), forward_only=True))

    def close(self) -> None:
        with without_cuda():
            parallel_state.destroy_model_parallel()


def _adam(workload: Workload, optimizer: Optimizer) -> dict[str, Any]:
    """Return AdamW with the same settings as PyTorch's and DeepSpeed's. It decays all parameters alike."""
    given = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2, **optimizer.adamw}
    (adam_beta1, adam_beta2), clip_grad = given["betas"], workload.clipping
    moments = {"adam_beta1": adam_beta1, "adam_beta2": adam_beta2, "adam_eps": given["eps"]}
    return {"lr": given["lr"], **moments, "weight_decay": given["weight_decay"], "clip_grad": clip_grad}


PEERS: Mapping[str, Peer] = {
    "megatron": Peer(MegatronStepper),
    "megatron-int4": Peer(partial(MegatronStepper, section=INT4)),
}
"""Peers by name."""
