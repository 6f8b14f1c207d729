"""Building of the data, the model and the engine from the options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from deepspeed_compress.config import SECTION, CompressConfig, parse_section, read_ds_config
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import TENSOR
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.models import Layout, build_parallel, check_layout, read_model_config
from deepspeed_compress.training.data import corpus, tokens
from deepspeed_compress.training.options import Options
from deepspeed_compress.training.ranks import Ranks


@dataclass(frozen=True)
class RunConfig:
    """Contents of the configuration files, before anything is built."""

    ds_config: dict[str, Any]
    model_config: PretrainedConfig
    layout: Layout


@dataclass(frozen=True)
class Data:
    """Windows for training and evaluation, and the key of the cache that holds their tokens."""

    train: tokens.Windows
    held_out: tokens.Windows
    key: str


def read_run_config(options: Options, ranks: Ranks) -> RunConfig:
    """Read both configurations and check that they agree. Raises ConfigError or UnsupportedError."""
    ds_config = read_ds_config(options.deepspeed_config)
    section = parse_section(ds_config) if SECTION in ds_config else None
    if section:
        ds_config = _with_monitor_path(ds_config, section, options.output_dir)
    if "optimizer" not in ds_config:
        raise ConfigError(
            f'{options.deepspeed_config}: /optimizer is missing; write {{"type": "AdamW", "params": {{}}}}'
        )
    parallelism = (section.parallelism if section else None) or Parallelism()
    tensor, recompute = TENSOR.effective(ds_config, parallelism), parallelism.activation_checkpointing
    layout = Layout(tensor, parallelism.pipeline, parallelism.partition, recompute)
    model_config = read_model_config(options.model)
    check_layout(model_config, layout, ranks.world_size)
    positions = getattr(model_config, "max_position_embeddings", options.seq_len)
    if options.seq_len > positions:
        raise ConfigError(
            f"--seq-len {options.seq_len}: the model {options.model} has only {positions} positions; write at most that"
        )
    return RunConfig(ds_config, model_config, layout)


def prepare_data(options: Options, ranks: Ranks, model_config: PretrainedConfig) -> Data:
    """Train the tokenizer and encode the text, unless both exist already, and map the tokens. Raises DataError."""
    files = corpus.text_files(options.data)
    if not ranks.first_only((options.tokenizer / "tokenizer.json").is_file):
        ranks.print_once(f"training a tokenizer into {options.tokenizer}")
    ranks.once_per_node(lambda: _tokenizer(options, files, model_config))
    key = ranks.first_only(lambda: tokens.cache_key(files, options.tokenizer))
    ranks.print_once(f"tokens in {options.cache_dir}, which are encoded if they are missing")
    ranks.once_per_node(lambda: tokens.build_cache(files, options.tokenizer, options.cache_dir, key))
    cache = tokens.open_cache(options.cache_dir, key)
    if cache.vocab_size > model_config.vocab_size:
        raise ConfigError(
            f"--tokenizer {options.tokenizer}: has {cache.vocab_size} tokens, but /vocab_size of {options.model} is "
            f"{model_config.vocab_size}; write at least {cache.vocab_size} there, or use a smaller tokenizer"
        )
    return Data(*tokens.split_windows(cache, options.seq_len, options.held_out), key)


def start_training(options: Options, config: RunConfig) -> Any:
    """Build the model and the engine. Raises ConfigError if DeepSpeed rejects its configuration."""
    module = build_parallel(options.model, config.model_config, options.seed, config.layout)
    try:
        return make_engine(module, config.ds_config)
    except (AssertionError, ValueError) as error:
        if isinstance(error, ConfigError | UnsupportedError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ConfigError(f"{options.deepspeed_config}: DeepSpeed rejects this configuration: {reason}") from error


def make_engine(module: Any, ds_config: dict[str, Any], mpu: Any = None) -> Any:
    """Return the engine of DeepSpeed that trains `module`, created by the package if `ds_config` has its section."""
    import deepspeed

    import deepspeed_compress

    initialize = deepspeed_compress.initialize if SECTION in ds_config else deepspeed.initialize
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return initialize(model=module, model_parameters=trained, config=ds_config, mpu=mpu)[0]


def _with_monitor_path(ds_config: dict[str, Any], section: CompressConfig, output_dir: Path) -> dict[str, Any]:
    """Return `ds_config` with `output_dir` as the directory of compression.jsonl, unless it sets another one."""
    if section.monitor.path is not None:
        return ds_config
    written = ds_config[SECTION]
    monitor = (written.get("monitor") or {}) | {"path": str(output_dir)}
    return ds_config | {SECTION: written | {"monitor": monitor}}


def _tokenizer(options: Options, files: list[Path], model_config: PretrainedConfig) -> None:
    if not (options.tokenizer / "tokenizer.json").is_file():
        tokens.train_tokenizer(files, options.tokenizer, options.vocab_size or model_config.vocab_size)
