"""Shape of a causal language model, from its config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError


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


_KEYS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "vocab": ("vocab_size",),
}
_LEARNED = ("gpt2", "gpt_neo", "opt")


def read_model(path: Path) -> Model:
    """Return the shape in `path`, a config.json or a directory with one.

    Raises:
        ConfigError: The file is not a JSON object, or lacks a key.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"--model {file}: is not JSON: {error}; write the path of a model's config.json") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model {file}: is not an object; write the path of a model's config.json")
    return _model(file.parent.name if file.name == "config.json" else file.stem, config, str(file))


def _model(name: str, config: Mapping[str, Any], file: str) -> Model:
    sizes = {size: _positive(config, keys, file) for size, keys in _KEYS.items()}
    family = str(config.get("model_type", ""))
    learned = family in _LEARNED
    hidden, heads = sizes["hidden"], sizes["heads"]
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    ffn = config.get("moe_intermediate_size") if experts > 1 else None
    return Model(
        name=name,
        family=family,
        **sizes,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        ffn=ffn or config.get("intermediate_size") or config.get("n_inner") or 4 * hidden,
        gated=not learned and family not in ("gpt_neox", "phi", "bloom", "falcon"),
        tied=bool(config.get("tie_word_embeddings", learned)),
        positions=config.get("n_positions", config.get("max_position_embeddings", 0)) if learned else 0,
        experts=experts,
        active=config.get("num_experts_per_tok") or 1,
        dropout=any(config.get(key, 0.1 if family == "gpt2" else 0) for key in ("resid_pdrop", "hidden_dropout")),
    )


def _positive(config: Mapping[str, Any], keys: tuple[str, ...], file: str) -> int:
    found = next((config[key] for key in keys if key in config), None)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ConfigError(f"--model {file}: {keys[0]} is {found}, but must be a positive integer")
    return found
