"""Export of a trained model, in any layout, to a directory that transformers' from_pretrained loads."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.pipe import PipelineModule
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig

from deepspeed_compress.model_families import HF_TRANSPOSED, user_name
from deepspeed_compress.models.sources import INDEX, SINGLE, saved_name

FILE_BYTES = 5 * 2**30
"""Maximum bytes of tensors per file and in memory at a time. A single larger tensor gets its own file."""


def save_pretrained(engine: Any, config: PretrainedConfig, directory: Path) -> None:
    """Write the weights of `engine` and `config` as transformers' save_pretrained does. Collective.

    The weights are those that the model computes with, in their dtype. They are sent one at a time to rank 0, which
    writes all files. `config` is the one that the model was built from.
    """
    # Not hasattr: the engine forwards unknown attributes to the model.
    if "compression" in vars(engine):
        engine.compression.synchronise()
    like, rank = next(engine.module.parameters()), dist.get_rank()
    weights, leaders = whole_weights(engine.module), _leaders(engine.module)
    if rank == 0:
        writer = _Writer(directory, config)
        for name, tensor in weights:
            writer.add(name, tensor)
        for leader in leaders[1:]:
            _receive(writer, leader, like.device)
        writer.finish()
        saved = copy.deepcopy(config)
        saved.architectures, saved.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__], like.dtype
        saved.save_pretrained(directory)
    else:
        _send(weights, to_first=rank in leaders)
    dist.barrier()


def whole_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name in the causal LM, whole tensor) once for every parameter of which `module` has a part.

    This is a collective call of the ranks that share the module: the tensor-parallel ranks, and with ZeRO 3 also the
    data-parallel ranks.
    """
    seen: set[str | int] = set()
    for prefix, owner in module.named_modules():
        own = dict(owner.named_parameters(recurse=False))
        with deepspeed.zero.GatheredParameters([p for p in own.values() if hasattr(p, "ds_id")]):
            whole = _put_together(owner) if isinstance(owner, TensorParallel_Layer) else own
            for name, parameter in own.items():
                known = user_name(parameter, f"{prefix}.{name}" if prefix else name)
                if not seen & {known, id(parameter)}:
                    seen |= {known, id(parameter)}
                    value = whole[name].detach()
                    yield known, value.t() if getattr(parameter, HF_TRANSPOSED, False) else value


def _put_together(layer: Any) -> dict[str, nn.Parameter]:
    """Return the whole parameters of a split layer. DeepSpeed gathers in place, so a copy of the layer is used."""
    shell = copy.copy(layer)
    shell._parameters = {
        name: None if parameter is None else nn.Parameter(parameter.detach().clone())
        for name, parameter in layer._parameters.items()
    }
    shell.gather_params([shell.weight, shell.bias])
    return dict(shell.named_parameters(recurse=False))


def _leaders(module: nn.Module) -> list[int]:
    """Return one rank of each stage, in the order of the stages."""
    if not isinstance(module, PipelineModule):
        return [0]
    grid = module._grid
    model = {"model": 0} if grid.get_slice_parallel_world_size() > 1 else {}
    return [grid.stage_to_global(stage_id=stage, data=0, **model) for stage in range(module.num_stages)]


def _send(weights: Iterator[tuple[str, Tensor]], to_first: bool) -> None:
    """Send `weights` to rank 0 if `to_first`; otherwise only take part in gathering them."""
    for name, tensor in weights:
        if to_first:
            dist.send_object_list([(name, tuple(tensor.shape), tensor.dtype)], dst=0)
            dist.send(tensor.contiguous(), dst=0)
    if to_first:
        dist.send_object_list([None], dst=0)


def _receive(writer: "_Writer", leader: int, device: torch.device) -> None:
    while True:
        header: list[Any] = [None]
        dist.recv_object_list(header, src=leader)
        if header[0] is None:
            return
        name, shape, dtype = header[0]
        tensor = torch.empty(shape, dtype=dtype, device=device)
        dist.recv(tensor, src=leader)
        writer.add(name, tensor)


class _Writer:
    """Writer of tensors into files of at most FILE_BYTES. Old files stay until `finish`."""

    def __init__(self, directory: Path, config: PretrainedConfig) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory, self.config = directory, config
        self.pending: dict[str, Tensor] = {}
        self.written: list[tuple[Path, list[str]]] = []
        self.total = 0

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a tensor unless its name is known, as for a tied weight that a second stage sends."""
        name = saved_name(name, self.config)
        if name in self.pending or any(name in names for _, names in self.written):
            return
        if self.pending and sum(one.nbytes for one in self.pending.values()) + tensor.nbytes > FILE_BYTES:
            self._write()
        self.pending[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        self.total += tensor.nbytes

    def finish(self) -> None:
        self._write()
        for old in [*self.directory.glob("model*.safetensors"), self.directory / INDEX]:
            old.unlink(missing_ok=True)
        if len(self.written) == 1:
            self.written[0][0].rename(self.directory / SINGLE)
            return
        weight_map: dict[str, str] = {}
        for number, (scratch, names) in enumerate(self.written, 1):
            file = f"model-{number:05d}-of-{len(self.written):05d}.safetensors"
            scratch.rename(self.directory / file)
            weight_map |= dict.fromkeys(names, file)
        index = {"metadata": {"total_size": self.total}, "weight_map": weight_map}
        (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")

    def _write(self) -> None:
        scratch = self.directory / f"part-{len(self.written)}.tmp"
        save_file(self.pending, scratch, metadata={"format": "pt"})
        self.written.append((scratch, list(self.pending)))
        self.pending = {}
