"""Training program, from the command line to summary.json and the exported model."""

import os
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import PretrainedConfig

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.launcher.heartbeat import RESUME
from deepspeed_compress.models import save_pretrained
from deepspeed_compress.models.sources import build_skeleton
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.run_directory import SUMMARY
from deepspeed_compress.training.data.tokens import load_tokenizer
from deepspeed_compress.training.loop import Identity, Loop, add_program_state, first_step
from deepspeed_compress.training.options import Options, parse_options
from deepspeed_compress.training.output import Metrics, check_new, final_figures
from deepspeed_compress.training.ranks import Ranks, end_ranks, start_ranks
from deepspeed_compress.training.setup import RunConfig, prepare_data, read_run_config, start_training
from deepspeed_compress.training.stepper import PipelineStepper, PlainStepper, share_of


def main(argv: list[str] | None = None) -> int:
    """Train, and return the exit status: 0, or 2 after one line on stderr if the user has to correct something."""
    options = parse_options(argv)
    ranks = start_ranks(options.local_rank)
    status = 0
    try:
        _train(options, ranks)
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        status = 2
    end_ranks()
    return status


def _train(options: Options, ranks: Ranks) -> None:
    resuming = options.resume or os.environ.get(RESUME) == "1"
    if not resuming:
        check_new(options.output_dir)
    config = read_run_config(options, ranks)
    check_export(options)
    data = prepare_data(options, ranks, config.model_config)
    engine, parameters = start_training(options, config), build_skeleton(config.model_config).num_parameters()
    batch_size = share_of(engine).batch_size
    identity = Identity(options.seed, options.seq_len, options.held_out, data.key, batch_size)
    add_program_state(engine, identity)
    first = first_step(engine, options.output_dir, identity, ranks, resuming)
    metrics = Metrics(options.output_dir, ranks.is_first)
    metrics.begin(first)
    stepper = PipelineStepper(engine) if config.layout.pipeline > 1 else PlainStepper(engine)
    ranks.print_once(_headline(options, ranks, parameters, first))
    # Data follow the number of an elastic island, which a loaded checkpoint may have changed.
    share = share_of(engine)
    loss = Loop(options, engine, stepper, share, data, identity, metrics, ranks).run(first)
    _finish(options, config, engine, parameters, ranks, batch_size, loss)
    # The engine holds process groups, and its parameters' hooks keep the engine alive.
    engine.destroy()


def _headline(options: Options, ranks: Ranks, parameters: int, first: int) -> str:
    begin = f"resuming after step {first}" if first else "starting at step 0"
    missing = " (--resume found no checkpoint)" if options.resume and not first else ""
    return f"{parameters:,} parameters on {ranks.world_size} ranks, {begin}{missing}, to step {options.steps}"


def _finish(
    options: Options, config: RunConfig, engine: Any, parameters: int, ranks: Ranks, batch_size: int, loss: float
) -> None:
    if options.export:
        export_model(engine, config.model_config, options.tokenizer, options.export)
    if not ranks.is_first:
        return
    session = vars(engine).get("compression")
    run = None if session is None else session.journal.part.id
    monitor_path = config.ds_config.get(SECTION, {}).get("monitor", {}).get("path") or options.output_dir
    batch_tokens = batch_size * options.seq_len
    summary = {
        **final_figures(options.output_dir, Path(monitor_path), batch_tokens, run),
        "run": run,
        "eval_loss": loss,
        "steps": options.steps,
        "parameters": parameters,
        "world_size": ranks.world_size,
        "tensor": config.layout.tensor,
        "pipeline": config.layout.pipeline,
        "tokens_per_step": batch_tokens,
        "seq_len": options.seq_len,
        "seed": options.seed,
        "monitor_path": str(monitor_path),
        "config": options.deepspeed_config,
        "model": str(options.model),
        "export": str(options.export) if options.export else None,
    }
    write_json(options.output_dir / SUMMARY, summary)
    if options.export:
        print(f"model and tokenizer in {options.export}")
    print(f"held-out loss {loss:.4f}, figures in {options.output_dir / SUMMARY}", flush=True)


def check_export(options: Options) -> None:
    """Check that the directory of `--export` can be written, and that it holds no other model.

    Raises:
        ConfigError: if the export would overwrite a model that this run has not exported, or the directory cannot be
            written.
    """
    directory = options.export
    if directory is None:
        return
    if directory.resolve() == options.model.resolve():
        raise ConfigError(f"--export {directory}: would overwrite --model; choose another directory")
    if (directory / "config.json").exists() and not options.resume:
        raise ConfigError(f"--export {directory}: already holds a model; choose another directory, or remove it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--export {directory}: cannot be created ({error.strerror}); choose another") from None


def export_model(engine: Any, config: PretrainedConfig, tokenizer: Path, directory: Path) -> None:
    """Write the weights, `config`, and the tokenizer in the directory `tokenizer`. Collective."""
    save_pretrained(engine, config, directory)
    if dist.get_rank() == 0:
        load_tokenizer(tokenizer).save_pretrained(directory)
