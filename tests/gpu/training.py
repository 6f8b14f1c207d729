"""Models that ranks train: a network whose bits do not depend on the order of additions, and one of GPT-2's shape."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress.config import SECTION

INT4: Mapping[str, Any] = {"gradients": {"method": "blockwise", "bits": 4, "block_size": 64}}


@dataclass(frozen=True)
class Shape:
    """Shape of a language model and its batches: `micro_batch` sequences of `length` tokens per rank."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    length: int
    micro_batch: int


def make_engine(model: nn.Module, device: str, stage: int, section: Mapping[str, Any] | None, bucket: int) -> Any:
    """Return a DeepSpeed engine with overlap, in bf16 on a GPU. The package creates it if there is a `section`."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": device == "cuda"},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "zero_optimization": {"stage": stage, "overlap_comm": True, "reduce_bucket_size": bucket},
    }
    if section is None:
        return deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    config[SECTION] = dict(section)
    return deepspeed_compress.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]


def train_step(engine: Any, *batch: Tensor) -> Tensor:
    """Make one optimizer step and return the loss, on the device."""
    loss: Tensor = engine(*batch)
    engine.backward(loss)
    engine.step()
    return loss.detach()


def digest(engine: Any) -> str:
    """Return a hash of the bits of all weights."""
    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
            found.update(parameter.detach().float().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


class _Regression(nn.Module):
    """Squared error of a stack of linear layers."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.stack = nn.Sequential(*(one for _ in range(layers) for one in (nn.Linear(width, width), nn.GELU())))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.stack(x).float(), y.float())


def network(width: int, layers: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """Return a model with equal weights on all ranks, and this rank's own batch."""
    torch.manual_seed(0)
    place, kind = get_accelerator().current_device_name(), _float_type()
    generator = torch.Generator().manual_seed(1 + torch.distributed.get_rank())
    x = torch.randn(32, width, generator=generator)
    return _Regression(width, layers), (x.to(place, kind), x.flip(1).to(place, kind))


def _float_type() -> torch.dtype:
    return torch.bfloat16 if get_accelerator().device_name() == "cuda" else torch.float32


class LanguageModel(nn.Module):
    """GPT-2 without dropout. Returns the loss of predicting each of `tokens` (batch, length) but the first."""

    def __init__(self, shape: Shape) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        sizes = {"n_layer": shape.layers, "n_embd": shape.width, "n_head": shape.heads, "n_positions": shape.length}
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        marks = dict.fromkeys(("bos_token_id", "eos_token_id"), shape.vocabulary - 1)
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=shape.vocabulary, **sizes, **dropout, **marks))

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss.float()


_FOLLOWERS = 4
_WORDS = 512


def markov_text(shape: Shape, batches: int, seed: int) -> Tensor:
    """Return tokens (batches, micro_batch, length) in which each word is followed by one of four with fixed odds.

    The best possible loss is the entropy of these odds, about 1.1.
    """
    words, table = min(_WORDS, shape.vocabulary), torch.Generator().manual_seed(0)
    followers = torch.randint(words, (words, _FOLLOWERS), generator=table)
    odds = torch.rand(words, _FOLLOWERS, generator=table)
    own = torch.Generator().manual_seed(seed)
    text = [torch.randint(words, (batches * shape.micro_batch,), generator=own)]
    for _ in range(shape.length - 1):
        chosen = torch.multinomial(odds[text[-1]], 1, generator=own)
        text.append(followers[text[-1]].gather(1, chosen).squeeze(1))
    return torch.stack(text, dim=1).view(batches, shape.micro_batch, shape.length)
