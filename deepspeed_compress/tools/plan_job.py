"""The job of ``ds-compress plan cluster``: a model, a cluster, and a batch, from options or from what is at hand."""

import argparse
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import Cluster, read_cluster, read_network
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.measured import read_constants
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.search import Job
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.tools.plan_machine import find_machine, find_network
from deepspeed_compress.tools.plan_setup import written_batch
from deepspeed_compress.tools.plots import check_plotting

MOST_SEQUENCES, MOST_TOKENS = 10**9, 1e18
"""Largest batch and longest run."""
USUAL_LENGTH = 2048
"""Tokens of a sequence if the option is missing and the model takes as many."""


def read_job(options: argparse.Namespace) -> Job:
    """Return the job of the options. What is missing is found on this machine, in the configuration, or in the model.

    Raises:
        ConfigError: An option cannot be read, sequences are longer than the model allows, or something is not found.
    """
    model = replace(read_model(options.model), rank=options.lora_rank or 0, base_bits=options.base_bits or 0.0)
    seq = options.seq or min(USUAL_LENGTH, model.longest)
    if seq > model.longest:
        raise ConfigError(
            f"--seq: {seq} tokens are more than the {model.longest} positions of {options.model}; write fewer, "
            "or change the model"
        )
    cluster = _cluster(options)
    batch = _batch(options, seq, cluster)
    tokens = read_count(options.tokens) if options.tokens else 20.0 * model.trained_parameters
    software = replace(SOFTWARE[options.software], attention=options.attention)
    constants = read_constants(options.constants, cluster.gpu.name) if options.constants else Constants()
    return Job(cluster, model, software, seq, batch, tokens, constants)


def _cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster of --gpus and --network, of the emulated hosts, or the one that is at hand.

    Raises:
        ConfigError: Two of them are given, or nothing is found.
    """
    emulated = options.emulate
    if emulated is None:
        return _found_cluster(options) if options.gpus is None else _written_cluster(options)
    written = (options.gpus, options.network, options.gpus_per_node, options.hostfile)
    if any(written) or len(emulated.rates) > 1 or emulated.rates == ("none",):
        raise ConfigError(
            "--emulate: describes all hosts and one rate; write 2x2,1gbit, for example, and leave out --gpus, "
            "--gpus-per-node, --hostfile and --network"
        )
    return read_cluster(f"{emulated.ranks}xCPU", emulated.rates[0], emulated.per_host)


def _written_cluster(options: argparse.Namespace) -> Cluster:
    if options.hostfile is not None:
        raise ConfigError("--hostfile: says how many GPUs there are, as --gpus does; leave one of them out")
    if options.network is None:
        raise ConfigError("--network: is missing; write the rate of a node, such as 25gbit, or leave out --gpus, too")
    return read_cluster(options.gpus, options.network, options.gpus_per_node)


def _found_cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster at hand. The network of a single node is not needed.

    Raises:
        ConfigError: The GPUs do not fill whole nodes, or nothing is found.
    """
    found = find_machine(options.hostfile)
    per_node = options.gpus_per_node or found.per_node
    if found.count % per_node:
        raise ConfigError(
            f"--gpus-per-node: the {found.count} GPUs that were found do not fill nodes of {per_node}; write a divisor"
        )
    is_alone = found.count == per_node
    network: Callable[[], float] = partial(read_network, options.network, per_node) if options.network else find_network
    return Cluster(found.gpu, found.count, per_node, found.gpu.link_rate if is_alone else network())


def _batch(options: argparse.Namespace, seq: int, cluster: Cluster) -> int:
    """Return the sequences of a step, of --batch or of the configuration.

    Raises:
        ConfigError: Neither says it.
    """
    if options.batch:
        return read_batch(options.batch, seq)
    batch = None if options.config is None else written_batch(options.config, cluster.gpus)
    if batch is None:
        raise ConfigError(
            "--batch: is missing; write the sequences of a step, such as 256, or a --config with train_batch_size"
        )
    return batch


def read_batch(text: str, seq: int) -> int:
    """Return the sequences of a step, from a number such as "1024" or from tokens such as "4M-tokens".

    Units of tokens are powers of 1,024 here, as in the batches of published runs.

    Raises:
        ConfigError: The text is neither, or less than a sequence.
    """
    match = re.fullmatch(r"([0-9.]+)([km]?)-?tokens", text.strip().lower())
    try:
        sequences = float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]] / seq if match else int(text)
    except ValueError:
        sequences = 0
    if not 0.5 < sequences <= MOST_SEQUENCES:
        raise ConfigError(
            f"--batch: {text!r} is not a batch of 1 to {MOST_SEQUENCES:,} sequences; write 1024, or 4M-tokens"
        )
    return round(sequences)


def read_count(text: str) -> float:
    """Return a number such as 300B, with decimal units.

    Raises:
        ConfigError: The text is no such number.
    """
    match = re.fullmatch(r"([0-9.]+)([kmbt]?)", text.strip().lower())
    try:
        number = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < MOST_TOKENS:
        raise ConfigError(f"--tokens: {text!r} is not a number below {MOST_TOKENS:g}; write 300B, for example")
    return number


def check_options(options: argparse.Namespace, job: Job) -> None:
    """Check the combination of options.

    Raises:
        ConfigError: An option does not fit another one.
    """
    if options.nodes is not None and options.output is None:
        raise ConfigError(
            "--nodes: is for the hostfile next to ds_config.json; write --output DIR, too, or leave it out"
        )
    if options.config is not None and (options.all or options.measure is not None):
        raise ConfigError("--config: is for the table of choices; leave it out with --all and --measure")
    if options.choose is not None and options.output is None:
        raise ConfigError("--choose: is for the files of a row; write --output DIR, too, or leave it out")
    if options.output is not None and job.engine == "megatron":
        raise ConfigError("--output: Megatron reads no ds_config.json; leave it out, or write --software deepspeed")
    if options.output is not None and options.software == "deepspeed" and not options.model.exists():
        raise ConfigError(
            "--output: launch/train_gpt.py needs a config.json; write its path as --model, or --software hf"
        )
    if options.measure is not None and not options.model.exists():
        raise ConfigError("--measure: trains the model of a config.json; write its path as --model")
    if options.base_bits and not job.model.rank:
        raise ConfigError("--base-bits: only LoRA leaves the model frozen; write --lora-rank, too, or leave it out")
    if job.model.rank and (options.measure or (options.output and options.software != "hf")):
        raise ConfigError(
            "--lora-rank: --measure and launch/train_gpt.py train all parameters; leave out --measure, and write "
            "--software hf with --output"
        )
    if options.measure is not None and options.software != "deepspeed":
        raise ConfigError(f"--measure: takes steps of --software deepspeed, not {options.software}; leave one out")
    if options.measure is not None and not options.measure.parent.is_dir():
        raise ConfigError(f"--measure: {options.measure.parent} is not a directory; create it")
    if options.plot is not None and job.cluster.nodes == 1:
        raise ConfigError("--plot: draws steps over the rate of the network, which a single node has not; leave it out")
    if options.plot is not None:
        check_plotting("--plot", options.plot)
