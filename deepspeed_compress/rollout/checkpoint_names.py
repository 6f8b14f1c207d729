"""Names and shapes of weights in a checkpoint of transformers, which engines load."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from deepspeed_compress.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor, nn


class CheckpointNames:
    """Conversion of published weights to those of a checkpoint.

    Since version 5, modules of transformers have other names and shapes than their checkpoints: all experts of a layer
    are one parameter, for example. Those names are published, because a `Receiver` holds such a module.

    Args:
        config: configuration of transformers for the model; None for a model that transformers does not have.
    """

    def __init__(self, config: Any) -> None:
        import torch
        import transformers

        names = getattr(config, "architectures", None) or [""]
        kind: Any = getattr(transformers, names[0], lambda config: None)
        with torch.device("meta"):
            self._plain: nn.Module | None = kind(config)
        own = () if self._plain is None else self._plain.named_parameters(remove_duplicate=False)
        self._parameters = dict(own)
        """Parameters of the model as transformers has it, without values; none if it has no such class."""

    def convert(self, weights: Mapping[str, "Tensor"]) -> Mapping[str, "Tensor"]:
        """Return weights of the whole model under the names and in the shapes of a checkpoint.

        They share memory with `weights` if a checkpoint has them as they are. Other names than those of the model are
        taken for the names of a checkpoint.

        Raises:
            UnsupportedError: a name belongs to an adapter of PEFT.
        """
        check_no_adapters(weights)
        if self._plain is None or not weights.keys() <= self._parameters.keys():
            return weights
        from transformers.core_model_loading import revert_weight_conversion

        converted: Mapping[str, Tensor] = revert_weight_conversion(self._plain, dict(weights))
        return converted

    def tie(self, weights: Mapping[str, "Tensor"], names: Iterable[str]) -> Mapping[str, "Tensor"]:
        """Return `weights`, and again under those of the `names` that the model ties to them, such as of its head."""
        plain = self._parameters
        published = {id(plain[name]): value for name, value in weights.items() if name in plain}
        tied = {name: published[id(plain[name])] for name in names if name in plain and id(plain[name]) in published}
        return {**weights, **tied}


def check_no_adapters(names: Iterable[str]) -> None:
    """Check that no parameter belongs to an adapter of PEFT.

    Raises:
        UnsupportedError: one does.
    """
    found = next((name for name in names if name.startswith("base_model.model.")), None)
    if found is not None:
        raise UnsupportedError(
            f'"{found}" is a name of PEFT, which no engine has among its weights: write "adapters": "merged" to '
            'publish merged weights, or "alone" for engines that load adapters (rollout.vllm_adapters)'
        )
