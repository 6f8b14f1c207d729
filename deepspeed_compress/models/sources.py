"""Where the weights of a model come from, one tensor at a time."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PretrainedConfig

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.models.gpt import build_model, has_weights

__all__ = ["Source", "open_source"]

Source = Callable[[str], Tensor]
"""Name of a parameter in the causal LM of transformers to its whole tensor, in fp32 on the CPU."""

FORMER = {"lm_head.": "embed_out."}
"""Names that transformers gave before its version 5 (GPT-NeoX), by how they begin now."""
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def open_source(path: Path, config: PretrainedConfig, seed: int) -> Source:
    """Weights of the directory `path`, else new ones, equal to those of one process with this `seed`.

    Saved tensors are read when they are asked for. New ones exist whole on every rank until the source is forgotten.
    Raises ConfigError when a file is missing; the source does when a tensor is.
    """
    if has_weights(path):
        return _Saved(path)
    weights: dict[str, Tensor] = build_model(path, config, seed).state_dict()
    return weights.__getitem__


class _Saved:
    """A directory in the form of transformers' save_pretrained."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.file_of = _files(directory)

    def __call__(self, name: str) -> Tensor:
        found = next((key for key in _names(name) if key in self.file_of), None)
        if found is None:
            raise ConfigError(f"--model {self.directory}: no file there holds the weight {name}; save the model again")
        with _opened(self.file_of[found]) as file:
            tensor: Tensor = file.get_tensor(found)
            return tensor.to(torch.float32)


def _names(name: str) -> list[str]:
    """What a tensor may be called: a model that was saved without its head has names from the backbone on."""
    former = [old + name.removeprefix(new) for new, old in FORMER.items() if name.startswith(new)]
    return [name, name.partition(".")[2], *former]


def _files(directory: Path) -> dict[str, Path]:
    """The file of every tensor."""
    if (directory / SINGLE).is_file():
        with _opened(directory / SINGLE) as file:
            return dict.fromkeys(file.keys(), directory / SINGLE)
    try:
        named = json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model {directory / INDEX}: not an index of weights ({error}); copy it again") from None
    found = {name: directory / file for name, file in named.items()}
    missing = sorted({file.name for file in found.values() if not file.is_file()})
    if missing:
        raise ConfigError(
            f"--model {directory}: {INDEX} names files that are not there: {', '.join(missing)}; copy them, too"
        )
    return found


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"--model {file}: cannot be read ({error}); copy it again") from None
