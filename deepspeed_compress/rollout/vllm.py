"""Extension of vLLM's worker that loads the newest published weights into an engine.

Source: vLLM's documentation of `worker_extension_cls` and `collective_rpc`. vLLM adds this class to the bases of its
worker, whose `reload_weights` takes weights under the names of a checkpoint. It restores layers that vLLM has
rearranged after loading (such as experts and quantized ones), loads, and rearranges them again.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_compress.errors import RolloutError, UnsupportedError
from deepspeed_compress.rollout import open_store
from deepspeed_compress.rollout.holder import make_holder
from deepspeed_compress.rollout.receiver import Receiver

if TYPE_CHECKING:
    from torch import Tensor, nn

_PATIENCE = 120.0
"""Seconds in which all workers must load the same version. A network file system may show new files a minute late."""


class WeightUpdates:
    """Methods of a vLLM worker that follows published weights.

    Each worker holds a copy of the published model in host memory, to which changes are applied. The engine then loads
    all of it from there, so only changes travel over the network.

    Examples:
        >>> llm = vllm.LLM("model", worker_extension_cls="deepspeed_compress.rollout.vllm.WeightUpdates")
        >>> llm.collective_rpc("follow_weights", args=("/shared/policy",))
        >>> load_published_weights(llm)
    """

    if TYPE_CHECKING:
        model_runner: Any
        """vLLM's runner of the worker's model."""
        vllm_config: Any
        reload_weights: Callable[..., None]
    _published: "tuple[nn.Module, Receiver, nn.Module | None] | None" = None
    """Copy of the published model, its receiver, and the model's class without values (see `_make_plain_model`)."""
    _loaded: str | None = None
    """Digest of the version that the engine has loaded."""
    _is_loading = False
    """True during a load, and after one that has failed."""

    def follow_weights(self, place: str) -> None:
        """Follow the weights that are published at `place`: a directory, or the address of a store.

        Raises:
            RolloutError: nothing has been published there.
            UnsupportedError: adapters of PEFT are published.
        """
        store = open_store(place)
        holder = make_holder(store)
        check_no_adapters(name for name, _ in holder.named_parameters())
        plain = _make_plain_model(self.vllm_config.model_config.hf_config)
        self._published, self._loaded = (holder, Receiver(holder, store), plain), None

    def load_published_weights(self) -> int:
        """Load the newest version, and return its number.

        Call it while no request runs, and reset the engine's prefix cache afterwards, which this worker cannot reach.
        The function `load_published_weights` of this module does both.

        Raises:
            RolloutError: `follow_weights` was not called, the version cannot be reached, or it has not all parameters
                of the engine. An engine that has loaded a part of a version must be restarted.
        """
        if self._published is None:
            raise RolloutError("the worker follows no weights: call follow_weights first")
        if self._is_loading:
            raise RolloutError("an earlier version was loaded in part, and its rest was not: restart the engine")
        holder, receiver, plain = self._published
        receiver.update()
        if receiver.version is None:
            raise RolloutError("the published versions have been deleted")
        if receiver.digest != self._loaded:
            self._is_loading = True
            _load(self, _checkpoint_weights(plain, dict(holder.named_parameters())))
            self._loaded, self._is_loading = receiver.digest, False
        return receiver.version


def load_published_weights(llm: Any) -> int:
    """Let all workers of a vLLM engine load the newest version, and return its number. Call it while no request runs.

    Args:
        llm: a `vllm.LLM` whose workers have the extension `WeightUpdates`, and follow published weights.

    Raises:
        RolloutError: the workers have not loaded the same version in time, or requests run.
    """
    until = time.monotonic() + _PATIENCE
    # A version that is published meanwhile may reach some workers only.
    while len(versions := set(llm.collective_rpc("load_published_weights"))) > 1:
        if time.monotonic() > until:
            raise RolloutError(f"the workers have loaded different versions for {_PATIENCE:g} seconds: {versions}")
    # Otherwise, answers would continue from keys and values that older weights have computed.
    if not llm.reset_prefix_cache():
        raise RolloutError("the prefix cache has entries of older weights, because requests run: wait for them first")
    return int(versions.pop())


def check_no_adapters(names: Iterable[str]) -> None:
    """Check that no parameter belongs to an adapter of PEFT.

    Raises:
        UnsupportedError: one does.
    """
    found = next((name for name in names if name.startswith("base_model.model.")), None)
    if found is not None:
        raise UnsupportedError(
            f'"{found}" is a name of PEFT, which vLLM cannot load: adapters are published apart from the weights that '
            "they change. Train all weights, or let a Receiver update the same PEFT model and generate with that"
        )


def _load(worker: WeightUpdates, weights: Mapping[str, "Tensor"]) -> None:
    """Load `weights` into the engine of `worker`.

    Raises:
        RolloutError: parameters of the engine are not among them. vLLM only warns about these.
    """
    model, found = worker.model_runner.get_model(), list[Any]()
    load = model.load_weights
    _forget_packed_experts(model)
    model.load_weights = lambda given: found.append(load(given))
    try:
        worker.reload_weights(weights_iterator=iter(weights.items()), is_checkpoint_format=True)
    finally:
        del model.load_weights
    _process_tied_layers(model)
    # As in vLLM's first load, models that do not report what they have loaded, and quantized ones, are not checked.
    if found[0] is not None and worker.vllm_config.model_config.quantization is None:
        names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
        if missing := sorted(names - found[0]):
            raise RolloutError(
                f"the published weights have no values for {', '.join(missing[:3])} of vLLM's model: publish the model "
                "that the engine was started with (buffers are not published)"
            )


def _forget_packed_experts(model: "nn.Module") -> None:
    """Let experts on CPU be repacked by the next load.

    vLLM does so only if an expert layer has no kernel yet. On GPUs it updates the kernel's weights in place.
    """
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        devices = {parameter.device.type for parameter in layer.parameters()}
        if hasattr(method, "moe_kernel") and devices == {"cpu"}:
            method.moe_kernel = None


def _process_tied_layers(model: "nn.Module") -> None:
    """Let layers whose weight is that of another layer, such as a head, make their own copies of it again.

    On CPU, a layer computes with a repacked copy. vLLM makes that of the layer that owns the weight, and only that.
    """
    owners: dict[int, nn.Module] = {}
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is None or weight.device.type != "cpu" or owners.setdefault(id(weight), layer) is layer:
            continue
        method: Any = getattr(layer, "quant_method", None)
        if method is not None:
            method.process_weights_after_loading(layer)


def _make_plain_model(config: Any) -> "nn.Module | None":
    """Return the model of `config` as transformers has it, without values; None if it has no such class."""
    import torch
    import transformers

    names = getattr(config, "architectures", None) or [""]
    kind = getattr(transformers, names[0], None)
    if kind is None:
        return None
    with torch.device("meta"):
        model: nn.Module = kind(config)
    return model


def _checkpoint_weights(plain: "nn.Module | None", weights: Mapping[str, "Tensor"]) -> Mapping[str, "Tensor"]:
    """Return published weights under the names and in the shapes of a checkpoint, which vLLM's models load.

    Since version 5, modules of transformers have other names and shapes than their checkpoints: all experts of a layer
    are one parameter, for example. Those names are published, because receivers hold such modules.
    """
    if plain is None or not weights.keys() <= {name for name, _ in plain.named_parameters(remove_duplicate=False)}:
        return weights
    from transformers.core_model_loading import revert_weight_conversion

    converted: Mapping[str, Tensor] = revert_weight_conversion(plain, dict(weights))
    return converted
