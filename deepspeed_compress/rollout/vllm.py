"""Extension of vLLM's worker that loads the newest published weights into an engine.

Source: vLLM's documentation of `worker_extension_cls` and `collective_rpc`. vLLM adds this class to the bases of its
worker, whose `model_runner.model` loads weights by their names in Hugging Face's model.
"""

from typing import TYPE_CHECKING, Any

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import open_store
from deepspeed_compress.rollout.holder import make_holder
from deepspeed_compress.rollout.receiver import Receiver

if TYPE_CHECKING:
    from torch import nn


class WeightUpdates:
    """Methods of a vLLM worker that follows published weights.

    Each worker holds a copy of the published model in host memory, to which changes are applied. The engine then loads
    all of it from there, so only changes travel over the network. Call `load_published_weights` while no request runs.

    Examples:
        >>> llm = vllm.LLM("model", worker_extension_cls="deepspeed_compress.rollout.vllm.WeightUpdates")
        >>> llm.collective_rpc("follow_weights", args=("/shared/policy",))
        >>> llm.collective_rpc("load_published_weights")
    """

    model_runner: Any
    """vLLM's runner of the worker's model."""
    _published: "tuple[nn.Module, Receiver] | None" = None
    _loaded: str | None = None
    """Digest of the version that the engine has loaded."""

    def follow_weights(self, place: str) -> None:
        """Follow the weights that are published at `place`: a directory, or the address of a store.

        Raises:
            RolloutError: nothing has been published there.
        """
        store = open_store(place)
        holder = make_holder(store)
        self._published, self._loaded = (holder, Receiver(holder, store)), None

    def load_published_weights(self) -> int:
        """Load the newest version, and return its number.

        Raises:
            RolloutError: `follow_weights` was not called, or the version cannot be reached.
        """
        if self._published is None:
            raise RolloutError("the worker follows no weights: call follow_weights first")
        holder, receiver = self._published
        receiver.update()
        if receiver.version is None:
            raise RolloutError("the published versions have been deleted")
        if receiver.digest != self._loaded:
            self._loaded = None
            self.model_runner.model.load_weights(holder.named_parameters())
            self._loaded = receiver.digest
        return receiver.version
