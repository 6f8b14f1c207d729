"""Programs that save, load, and start again."""

from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist

from tests.backends.deepspeed.programs.models import Adapted, Branches, network
from tests.backends.deepspeed.programs.program import Program, Run

TWO = {"gradient_accumulation_steps": 2}


def save_and_continue(run: Run) -> None:
    engine = run.start(network())
    run.learn(engine)
    engine.save_checkpoint(run.directory)
    run.learn(engine)


def load_and_go_on(run: Run) -> None:
    """Load the checkpoint in the engine that saved it."""
    engine = run.start(network())
    run.learn(engine)
    engine.save_checkpoint(run.directory, client_state={"epoch": 3})
    run.learn(engine)
    run.keep("epoch", engine.load_checkpoint(run.directory)[1]["epoch"])
    run.learn(engine)


def load_in_a_new_engine(run: Run) -> None:
    engine = run.start(network())
    run.learn(engine)
    engine.save_checkpoint(run.directory, tag="here")
    engine = run.start(network())
    engine.load_checkpoint(run.directory, tag="here")
    run.learn(engine)


def load_module_only(run: Run) -> None:
    engine = run.start(network())
    run.learn(engine)
    engine.save_checkpoint(run.directory)
    engine = run.start(network())
    engine.load_checkpoint(run.directory, load_module_only=True)
    run.learn(engine)


def load_without_states(run: Run) -> None:
    engine = run.start(network())
    run.learn(engine)
    engine.save_checkpoint(run.directory)
    engine.load_checkpoint(run.directory, load_optimizer_states=False, load_lr_scheduler_states=False)
    run.learn(engine)


def load_before_training(run: Run) -> None:
    """Save and load before the first step."""
    engine = run.start(network())
    engine.save_checkpoint(run.directory)
    engine.load_checkpoint(run.directory)
    run.learn(engine)


def load_from_nowhere(run: Run) -> None:
    """Load from an empty directory. DeepSpeed warns, returns None, and continues."""
    engine = run.start(network())
    run.keep("found", engine.load_checkpoint(run.directory)[0] is not None)
    run.learn(engine)


def save_within_accumulation(run: Run) -> None:
    engine = run.start(network(), TWO)
    run.learn(engine, steps=3)
    engine.save_checkpoint(run.directory)
    run.learn(engine, steps=3)


def save_in(place: str | None, run: Run) -> None:
    """Save in a place that causes an error of DeepSpeed's own, before which nothing is written."""
    engine = run.start(network())
    run.learn(engine)
    try:
        engine.save_checkpoint(place)
    except Exception as error:
        run.keep(f"error: {type(error).__name__}: {error}", 0)
    run.learn(engine)


def save_frozen(run: Run) -> None:
    engine = run.start(Adapted())
    run.learn(engine)
    engine.save_checkpoint(run.directory, exclude_frozen_parameters=True)
    engine.load_checkpoint(run.directory, load_module_strict=False)
    run.learn(engine)


def save_with_unused(run: Run) -> None:
    engine = run.start(Branches(2))
    run.learn(engine)
    engine.save_checkpoint(run.directory)
    engine = run.start(Branches(2))
    engine.load_checkpoint(run.directory)
    run.learn(engine, take=(0, 1))


def save_weights(run: Run) -> None:
    """Call `save_16bit_model` between steps, as Trainer does."""
    engine = run.start(network(), {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}})
    run.learn(engine)
    engine.save_16bit_model(run.directory)
    dist.barrier()
    for name, value in torch.load(run.directory / "pytorch_model.bin").items():
        run.keep(f"saved {name}", value)
    run.learn(engine)


def universal(run: Run) -> None:
    """Load a checkpoint that `ds_to_universal` has converted."""
    from deepspeed.checkpoint.ds_to_universal import main

    engine = run.start(network())
    run.learn(engine)
    states = {"universal_checkpoint_info": {}, "iteration": 3}
    engine.save_checkpoint(run.directory, tag="saved", client_state=states)
    dist.barrier()
    if run.rank == 0:
        main(_conversion(run))
    dist.barrier()
    engine = run.start(network(), {"checkpoint": {"load_universal": True}})
    engine.load_checkpoint(run.directory, tag="universal")
    run.learn(engine)


def _conversion(run: Run) -> SimpleNamespace:
    return SimpleNamespace(
        input_folder=str(run.directory / "saved"),
        output_folder=str(run.directory / "universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )


def made_anew(run: Run) -> None:
    engine = run.start(network())
    run.learn(engine)
    run.end(run.engines.pop())
    engine = run.start(network())
    run.learn(engine)


def partition_cache_emptied(run: Run) -> None:
    engine = run.start(network())
    for _ in range(3):
        run.learn(engine, steps=1)
        engine.empty_partition_cache()


PROGRAMS = (
    Program("save_checkpoint, go on", save_and_continue),
    Program("load_checkpoint into the same engine", load_and_go_on),
    Program("load_checkpoint into a new engine", load_in_a_new_engine),
    Program("load_checkpoint, module only", load_module_only),
    Program("load_checkpoint without optimizer states", load_without_states),
    Program("save and load before the first step", load_before_training),
    Program("load_checkpoint from an empty directory", load_from_nowhere),
    Program("save_checkpoint within accumulation", save_within_accumulation),
    Program("save_checkpoint(None)", partial(save_in, None)),
    Program('save_checkpoint("")', partial(save_in, "")),
    Program("checkpoint without frozen parameters", save_frozen),
    Program("checkpoint of a model with an unused branch", save_with_unused),
    Program("save_16bit_model", save_weights),
    Program(
        "universal checkpoint", universal, stages=(1, 2, 3), refused=dict.fromkeys((1, 2, 3), "universal checkpoint")
    ),
    Program("engine ended, another made", made_anew),
    Program("empty_partition_cache", partition_cache_emptied, stages=(3,)),
)
