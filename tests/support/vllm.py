"""A stand-in for the worker of vLLM 0.32, with the methods and attributes that the extension uses."""

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from deepspeed_compress.rollout.vllm import WeightUpdates

Load = Callable[[Iterable[tuple[str, Tensor]]], "set[str] | None"]


class Model(nn.Module):
    """Model of an engine, which loads weights by a function."""

    def __init__(self, load: Load) -> None:
        super().__init__()
        self.load, self.loads = load, 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        self.loads += 1
        return self.load(weights)


class Runner:
    """vLLM's `GPUModelRunner`."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def get_model(self) -> Model:
        return self.model

    def reload_weights(
        self,
        weights_iterator: Iterable[tuple[str, Tensor]] | None = None,
        weights_path: str | None = None,
        is_checkpoint_format: bool = True,
    ) -> None:
        assert weights_iterator is not None
        assert weights_path is None
        assert is_checkpoint_format
        self.get_model().load_weights(weights_iterator)


class Worker:
    """vLLM's worker, with methods of its own for weights."""

    def __init__(self, model: Model, config: Any) -> None:
        self.model_runner = Runner(model)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(hf_config=config, quantization=None))

    def load_model(self, *, load_dummy_weights: bool = False) -> None: ...

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, str]) -> None: ...

    def finish_weight_update(self) -> None: ...

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.model_runner.reload_weights(*args, **kwargs)


def make_worker(load: Load, config: Any = None) -> Any:
    """Return a worker with the extension among its bases, as vLLM makes it, which refuses names that it has itself.

    Args:
        load: the model's `load_weights`.
        config: configuration of transformers for the model; None for a model that transformers does not have.
    """
    assert not [name for name in dir(WeightUpdates) if not name.startswith("__") and hasattr(Worker, name)]
    return type("ExtendedWorker", (Worker, WeightUpdates), {})(Model(load), config)
