"""Shape of a causal language model, from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.model_families import FAMILIES, Family, read_config


@dataclass(frozen=True, slots=True)
class Model:
    """Shape of a decoder.

    Attributes:
        name: Name to print.
        family: `model_type` of transformers.
        layers: Number of decoder layers.
        hidden: Width of the hidden states.
        heads: Number of attention heads.
        kv_heads: Number of key and value heads.
        head_size: Width of a head.
        ffn: Width inside the MLP, or inside one expert.
        gated: Whether the MLP has a gate, as Llama's; such models have RMS norms and rotary positions.
        vocab: Number of tokens in the vocabulary.
        tied: Whether embedding and head share their weights.
        positions: Number of learned positions; 0 for rotary ones.
        experts: Number of experts per layer; 1 without a mixture.
        active: Number of experts that a token uses.
        dropout: Whether the model has dropout.
        longest: Most tokens of a sequence.
        rank: Rank of LoRA's adapters, which every matrix of the layers has; 0 if all parameters are trained.
        base_bits: Bits of a frozen element, such as 4.5 for nf4 with its scales; 0 for those of the GPUs' precision.
    """

    name: str
    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    ffn: int
    gated: bool
    vocab: int
    tied: bool
    positions: int = 0
    experts: int = 1
    active: int = 1
    dropout: bool = False
    longest: int = 10**9
    rank: int = 0
    base_bits: float = 0.0

    @property
    def qkv(self) -> int:
        """Width of queries, keys and values together."""
        return (self.heads + 2 * self.kv_heads) * self.head_size

    @property
    def mlp_parameters(self) -> int:
        """Parameters of one expert."""
        return (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def attention_parameters(self) -> int:
        """Parameters of the attention of a layer."""
        return self.hidden * (self.qkv + self.heads * self.head_size)

    @property
    def layer_parameters(self) -> int:
        """Parameters of a decoder layer. Biases are neglected."""
        router = self.hidden * self.experts if self.experts > 1 else 0
        return self.attention_parameters + self.experts * self.mlp_parameters + router + 2 * self.hidden

    @property
    def adapted(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of each matrix of a layer that LoRA gives an adapter (2106.09685)."""
        width, part = self.heads * self.head_size, self.kv_heads * self.head_size
        read = (width, part, part) if self.reads_separately else (self.qkv,)
        up = (self.ffn, self.ffn) if self.reads_separately else ((1 + self.gated) * self.ffn,)
        mlp = (*((self.hidden, size) for size in up), (self.ffn, self.hidden))
        return (*((self.hidden, size) for size in read), (width, self.hidden), *mlp * self.experts)

    @property
    def trained_layer_parameters(self) -> int:
        """Parameters of a decoder layer that are trained: those of its adapters, or all."""
        if not self.rank:
            return self.layer_parameters
        return self.rank * sum(rows + columns for rows, columns in self.adapted)

    @property
    def trained_parameters(self) -> int:
        """Number of all parameters that are trained."""
        return self.layers * self.trained_layer_parameters if self.rank else self.parameters

    def small_parameters(self, limit: float) -> int:
        """Return the parameters of a layer in tensors of at most `limit` elements."""
        mlp = [self.hidden * self.ffn] * self.experts * (3 if self.gated else 2)
        sizes = (self.hidden * self.qkv, self.hidden * self.heads * self.head_size, self.hidden, self.hidden, *mlp)
        return sum(size for size in sizes if size <= limit)

    @property
    def reads_separately(self) -> bool:
        """True if queries, keys, values, gate and up have matrices of their own."""
        return self.gated and self.family != "phi3"

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding and the positions."""
        return (self.vocab + self.positions) * self.hidden

    @property
    def head_parameters(self) -> int:
        """Parameters of the head that are not those of the embedding."""
        return 0 if self.tied else self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """Number of all parameters."""
        return self.layers * self.layer_parameters + self.embedding_parameters + self.head_parameters

    def flops_per_token(self, seq: int) -> float:
        """Return the operations per token of forward and backward without recomputation (2001.08361, causal)."""
        dense = self.attention_parameters + self.active * self.mlp_parameters
        return self.layers * (6 * dense + 6 * seq * self.heads * self.head_size) + 6 * self.vocab * self.hidden


_SIZES: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "vocab": ("vocab_size",),
}
_DROPOUT = ("resid_pdrop", "hidden_dropout", "resid_dropout", "dropout")
_LARGEST = 10**9


_SHAPES = (
    ("0.5B", 24, 896, 14, 2, 4864, 151936, True),  # Qwen2.5
    ("1B", 16, 2048, 32, 8, 8192, 128256, True),  # Llama 3.2
    ("3B", 28, 3072, 24, 8, 8192, 128256, True),  # Llama 3.2
    ("7B", 28, 3584, 28, 4, 18944, 152064, False),  # Qwen2.5
    ("8B", 32, 4096, 32, 8, 14336, 128256, False),  # Llama 3.1
    ("13B", 40, 5120, 40, 40, 13824, 32000, False),  # Llama 2
    ("14B", 48, 5120, 40, 8, 13824, 152064, False),  # Qwen2.5
    ("32B", 64, 5120, 40, 8, 27648, 152064, False),  # Qwen2.5
    ("70B", 80, 8192, 64, 8, 28672, 128256, False),  # Llama 3.1
)
TYPICAL: Mapping[str, Model] = {
    name: Model(name, "llama", layers, hidden, heads, kv_heads, hidden // heads, ffn, True, vocab, tied)
    for name, layers, hidden, heads, kv_heads, ffn, vocab, tied in _SHAPES
}
"""Models of usual sizes, which stand for others of their size."""


def read_model(path: Path) -> Model:
    """Return the shape in `path`, a config.json, a directory with one, or a key of `TYPICAL`.

    Raises:
        ConfigError: The file cannot be read, lacks a key, or describes layers that are not predicted.
    """
    if str(path).upper() in TYPICAL and not path.exists():
        return TYPICAL[str(path).upper()]
    config, file = read_config(path), path / "config.json" if path.is_dir() else path
    try:
        return _model(file.resolve().parent.name if file.name == "config.json" else file.stem, config)
    except ValueError as error:
        raise ConfigError(f"--model {file}: {error}; write the path of a language model's config.json") from error


def _model(name: str, config: Mapping[str, Any]) -> Model:
    model_type = str(config.get("model_type") or "llama")
    family, sizes = _family(model_type, config), {size: _size(config, *keys) for size, keys in _SIZES.items()}
    hidden, heads, experts = sizes["hidden"], sizes["heads"], _size(config, "num_local_experts", "num_experts", usual=1)
    longest = _size(config, "n_positions", "max_position_embeddings", usual=family.positions or _LARGEST)
    widths = ("intermediate_size", "n_inner", "ffn_dim")
    model = Model(
        name=name,
        family=model_type,
        **sizes,
        kv_heads=_size(config, "num_key_value_heads", usual=heads),
        head_size=_size(config, "head_dim", usual=hidden // heads if hidden % heads == 0 else None),
        ffn=_size(config, *("moe_intermediate_size",) * (experts > 1), *widths, usual=4 * hidden),
        gated=family.gated,
        tied=bool(config.get("tie_word_embeddings", family.tied)),
        positions=longest if family.positions else 0,
        experts=experts,
        active=_size(config, "num_experts_per_tok", usual=1) if experts > 1 else 1,
        dropout=bool(next((config[key] for key in _DROPOUT if key in config), family.dropout)),
        longest=longest,
    )
    if model.heads % model.kv_heads or model.active > model.experts:
        divided = f"num_key_value_heads {model.kv_heads} must divide num_attention_heads {heads}"
        raise ValueError(f"{divided}, and num_experts_per_tok {model.active} be at most the {experts} experts")
    return model


def _family(name: str, config: Mapping[str, Any]) -> Family:
    """Return the facts about the `model_type` `name`.

    Raises:
        ValueError: It has other layers than those that are predicted.
    """
    if name not in FAMILIES:
        raise ValueError(f"model_type is {name!r} (allowed: {', '.join(FAMILIES)}); write one that has equal layers")
    if config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1:
        raise ValueError("mlp_only_layers and decoder_sparse_step make layers differ, which is not predicted")
    return FAMILIES[name]


def _size(config: Mapping[str, Any], *keys: str, usual: int | None = None) -> int:
    """Return the value of the first of `keys` that is there and not null, or else `usual`.

    Raises:
        ValueError: It is not a positive integer.
    """
    key, found = next(((key, config[key]) for key in keys if config.get(key) is not None), (keys[0], usual))
    if not isinstance(found, int) or isinstance(found, bool) or not 0 < found <= _LARGEST:
        raise ValueError(f"{key} is {found!r}, but must be a positive integer")
    return found
