"""Trainer's side of the weight transfer backend of vLLM: it publishes weights, and lets the engine load them."""

from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import nn
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    VLLMWeightSyncClient,
    WeightSource,
)

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.rollout import open_store
from deepspeed_compress.rollout.module_weights import make_module
from deepspeed_compress.rollout.publisher import Publisher
from deepspeed_compress.rollout.versions import Dtype
from deepspeed_compress.rollout.vllm import BACKEND, follow_weights, load_version


@dataclass
class PublishingInfo(TrainerInitInfo):  # type: ignore[misc]  # mypy does not see vLLM
    """Settings of the trainer's side, which select this backend.

    Attributes:
        rank: rank of this process; rank 0 calls the engine.
        place: the store as the engine's hosts see it, and without `publisher` the trainer's too.
        publisher: publisher of the model in training, with which each rank publishes what it holds. None publishes what
            the `WeightSource` yields, of which rank 0 then holds a copy in host memory.
        dtype: type of weights that a `WeightSource` yields, when they are published.
    """

    backend: ClassVar[str] = BACKEND

    place: str
    publisher: Publisher | None = None
    dtype: Dtype = "bf16"


class PublishingTrainerEngine(TrainerWeightTransferEngine[PublishingInfo]):  # type: ignore[misc]  # mypy does not see vLLM
    """Trainer's engine that publishes versions. All ranks make it, and call `send_weights`.

    Examples:
        >>> info = PublishingInfo(rank=rank, place="/shared/policy", publisher=Publisher(model, store))
        >>> engine = WeightTransferTrainerFactory.trainer_init(info, client=ServedEngine("http://10.0.0.7:8000"))
        >>> engine.send_weights()
    """

    init_info_cls = PublishingInfo

    @classmethod
    def trainer_init(
        cls, init_info: PublishingInfo, *, client: VLLMWeightSyncClient, source: WeightSource | None = None
    ) -> Self:
        """Return an engine, and let the inference side follow its store.

        Raises:
            ConfigError: there is neither a publisher nor a source.
        """
        engine = cls(client=client, source=source, is_sender=init_info.is_sender)
        engine._copy = nn.Module()
        if init_info.publisher is not None:
            engine.source, engine._publisher = None, init_info.publisher
        elif source is None:
            raise ConfigError("nothing to publish: pass PublishingInfo(publisher=...) or source=...")
        else:
            if engine.is_sender:
                shapes = {one.name: tuple(one.shape) for one in source.metadata()}
                engine._copy = make_module(shapes, init_info.dtype)
            engine._publisher = Publisher(engine._copy, open_store(init_info.place), init_info.dtype)
        if engine.is_sender:
            follow_weights(client, init_info.place)
        return engine

    def send_weights(self) -> None:
        """Publish the present weights, and let the engine load them. Collective."""
        if self.source is not None:
            self._read(self.source)
        self._publisher.publish()
        self._publisher.wait()
        if self.is_sender and self._publisher.version is not None:
            load_version(self.client, self._publisher.version)

    @torch.no_grad()
    def _read(self, source: WeightSource) -> None:
        """Copy the weights of a source to host memory. All ranks take part in its collectives."""
        held = dict(self._copy.named_parameters())
        for name, values in source:
            if name in held:
                held[name].copy_(values)
