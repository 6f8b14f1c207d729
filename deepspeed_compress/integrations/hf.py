"""Hugging Face Trainer: `attach` compresses the training of one Trainer."""

from transformers import Trainer

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations.install import install
from deepspeed_compress.integrations.trainer_callback import CompressionCallback
from deepspeed_compress.integrations.trainers import add_callback, configuration_of, follow_trainers, refuse_pipeline

__all__ = ["CompressionCallback", "attach"]


def attach(trainer: Trainer) -> Trainer:
    """Compress the training of `trainer`, log compression figures, and return it. Call this before `trainer.train()`.

    You need not call this after `deepspeed_compress.install()`, which does it for every Trainer.

    Raises:
        ConfigError: if the trainer has no DeepSpeed configuration, or its section is missing or invalid.
        UnsupportedError: if the model is a PipelineModule.
    """
    ds_config = configuration_of(trainer)
    if ds_config is None:
        raise ConfigError(
            "the trainer does not use DeepSpeed; write TrainingArguments(deepspeed=FILE_OR_DICT), with the section "
            f'"{SECTION}" in the file or dict'
        )
    refuse_pipeline(trainer.model)
    parse_section(ds_config)
    install()
    # `install` does it when a configuration is read, but that of `trainer` has been read already.
    follow_trainers()
    add_callback(trainer)
    return trainer
