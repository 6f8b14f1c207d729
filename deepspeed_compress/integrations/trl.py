"""TRL's GRPO with a vLLM server that follows published weights, in place of TRL's pushes of whole weights.

TRL calls `VLLMGeneration.sync_weights` before it generates with new weights. Plain TRL then gathers all parameters, one
after the other, and broadcasts them to the server by NCCL. Here the section's `rollout` has published the changes of
the last step, and the server is told to load them. No NCCL group with the server is needed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from trl.generation import vllm_generation
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.rollout.checkpoint_names import check_no_adapters
from deepspeed_compress.rollout.vllm import ServedEngine, follow_weights, load_version
from deepspeed_compress.rollout.vllm_adapters import ServedAdapters
from deepspeed_compress.session.patches import replaced


@contextmanager
def published_weights(directory: str, adapters: str = "") -> Iterator[None]:
    """Let a GRPOTrainer that is made inside the block update its vLLM server by published weights.

    The trainer's DeepSpeed configuration must have the key `rollout` in the section. The server must have been started
    with the weight transfer backend "deepspeed_compress", or for adapters that are published alone, with --enable-lora
    and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1.

    Args:
        directory: the published versions, as the hosts of the server see them.
        adapters: directory to which adapters that are published alone are exported, as the hosts of the server see it.

    Raises:
        ConfigError: the trainer does not use a vLLM server; or when it trains, the section has no `rollout`, or
            adapters are published alone without a directory.
        UnsupportedError: when it trains, it trains adapters of PEFT, but `rollout` does not say how they are published.

    Examples:
        >>> with published_weights("/shared/policy"):
        ...     trainer = GRPOTrainer(model, reward, GRPOConfig(use_vllm=True, vllm_mode="server", deepspeed=config))
        >>> trainer.train()
    """
    generation = replaced(grpo_trainer, VLLMGeneration=partial(_Generation, directory, adapters))
    with generation, replaced(vllm_generation, VLLMClient=_Client):
        yield


class _Client(VLLMClient):  # type: ignore[misc]  # TRL has no types
    """Client that does not connect to the server by NCCL."""

    def init_communicator(self, device: Any = 0) -> None:
        """Do nothing: weights travel through the store."""


class _Generation(VLLMGeneration):  # type: ignore[misc]  # TRL has no types
    """Generation on a server that loads published weights."""

    def __init__(self, directory: str, adapters: str, *args: Any, mode: str = "colocate", **options: Any) -> None:
        if mode != "server":
            raise ConfigError(f'vllm_mode is {mode!r}, but only a server loads published weights; write "server"')
        super().__init__(*args, mode=mode, **options)
        self._directory, self._adapter_directory = directory, adapters
        self._served_adapters: ServedAdapters | None = None
        self._followed = False

    def sync_weights(self) -> None:
        """Let the server load the weights of the last step. Collective.

        Raises:
            ConfigError: the section has no `rollout`, or adapters are published without a directory for them.
            RolloutError: the server does not receive the weights.
            UnsupportedError: the names of PEFT are published.
        """
        wrapped = self.accelerator.deepspeed_engine_wrapped
        publisher = None if wrapped is None else vars(wrapped.engine).get("rollout")
        if publisher is None:
            raise ConfigError('no weights are published; write "rollout": {"directory": ...} into deepspeed_compress')
        if publisher.adapters is None:
            check_no_adapters(name for name, _ in self.model.named_parameters())
        if publisher.adapters == "alone" and not self._adapter_directory:
            remedy = "write published_weights(..., adapters=DIR), with a directory that the server sees"
            raise ConfigError(f"adapters are published alone; {remedy}")
        if not publisher.calls:
            publisher.publish()
        publisher.wait()
        if self.accelerator.is_main_process:
            load = self._load_adapter if publisher.adapters == "alone" else self._load_weights
            load(publisher.version)

    def _load_weights(self, version: int) -> None:
        engine = ServedEngine(self.vllm_client.base_url)
        if not self._followed:
            follow_weights(engine, self._directory)
            self._followed = True
        load_version(engine, version)

    def _load_adapter(self, version: int) -> None:
        """Let the server load an adapter, which TRL's client then asks for."""
        if self._served_adapters is None:
            url = self.vllm_client.base_url
            self._served_adapters = ServedAdapters(url, self._directory, self._adapter_directory)
        self.vllm_client.model = self._served_adapters.load(version)
