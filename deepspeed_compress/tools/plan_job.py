"""The job of ``ds-compress plan cluster``: a model, a cluster, and a batch, from options or from what is at hand."""

import argparse
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION, CompressConfig, parse_section, read_ds_config
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import STAGE, TENSOR
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.choices import Setup
from deepspeed_compress.planner.cluster import Cluster, read_cluster, read_network
from deepspeed_compress.planner.gpus import Constants, Gpu, find_gpu
from deepspeed_compress.planner.layout import GRADIENT_BITS, WEIGHT_BITS, Offload
from deepspeed_compress.planner.measured import read_constants
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.search import Job
from deepspeed_compress.planner.software import SOFTWARE

MOST_SEQUENCES, MOST_COUNT = 10**9, 1e18
"""Largest batch, and largest number of tokens or parameters."""
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
        raise ConfigError(f"--seq: {seq} tokens are more than the {model.longest} positions of the model; write fewer")
    if options.mean_length and options.mean_length > seq:
        length = options.mean_length
        raise ConfigError(f"--mean-length: {length} tokens are more than the {seq} of --seq; write at most as many")
    cluster = _cluster(options)
    batch = _batch(options, seq, cluster)
    tokens = read_count(options.tokens) if options.tokens else 20.0 * model.trained_parameters
    constants = read_constants(options.constants, cluster.gpu.name) if options.constants else Constants()
    software, length = SOFTWARE[options.software], options.mean_length or 0
    return Job(cluster, model, software, seq, batch, tokens, constants, mean_length=length)


def _cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster of --gpus and --network, of the emulated hosts, or the one that is at hand.

    Raises:
        ConfigError: Two of them are given, or nothing is found.
    """
    emulated = options.emulate
    if emulated is not None:
        written = (options.gpus, options.network, options.gpus_per_node, options.hostfile)
        if any(written) or len(emulated.rates) > 1 or emulated.rates == ("none",):
            others = "--gpus, --gpus-per-node, --hostfile and --network"
            raise ConfigError(f"--emulate: describes all hosts and one rate; write 2x2,1gbit, and leave out {others}")
        return read_cluster(f"{emulated.ranks}xCPU", emulated.rates[0], emulated.per_host)
    if options.gpus is None:
        return _found_cluster(options)
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
    gpu, count, per_node = find_machine(options.hostfile)
    per_node = options.gpus_per_node or per_node
    if count % per_node:
        raise ConfigError(f"--gpus-per-node: the {count} GPUs here do not fill nodes of {per_node}; write a divisor")
    if count == per_node:
        return Cluster(gpu, count, per_node, gpu.link_rate)
    network = read_network(options.network, per_node) if options.network else find_network()
    return Cluster(gpu, count, per_node, network)


def _batch(options: argparse.Namespace, seq: int, cluster: Cluster) -> int:
    """Return the sequences of a step, of --batch or of the configuration.

    Raises:
        ConfigError: Neither says it.
    """
    if options.batch:
        return read_batch(options.batch, seq)
    ds_config = {} if options.config is None else read_ds_config(options.config)
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    whole, micro, accumulation = (ds_config.get(name) for name in names)
    if isinstance(whole, int):
        return whole
    if not isinstance(micro, int):
        raise ConfigError("--batch: is missing; write the sequences of a step, or a --config with train_batch_size")
    setup = read_setup(options.config, cluster.per_node)
    replicas = cluster.gpus // (setup.tensor * setup.pipeline)
    return micro * replicas * (accumulation if isinstance(accumulation, int) else 1)


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
        raise ConfigError(f"--batch: {text!r} is not 1 to {MOST_SEQUENCES:,} sequences; write 1024, or 4M-tokens")
    return round(sequences)


def read_count(text: str, option: str = "--tokens") -> float:
    """Return the number that an option gives, such as 300B, with decimal units.

    Raises:
        ConfigError: The text is no such number.
    """
    match = re.fullmatch(r"([0-9]+\.?[0-9]*|\.[0-9]+)([kmbt]?)", text.strip().lower())
    number = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else 0.0
    if not 0 < number < MOST_COUNT:
        raise ConfigError(f"{option}: {text!r} is not a number below {MOST_COUNT:g}; write 300B, for example")
    return number


_MIXED = "several kinds of GPUs are not measured; leave out --measure, --constants and the launcher"


def check_options(options: argparse.Namespace, job: Job) -> None:
    """Check the combination of options.

    Raises:
        ConfigError: An option does not fit another one.
    """
    measures, writes, is_path = options.measure is not None, options.output is not None, options.model.exists()
    adapts, software, plain = job.model.rank > 0, options.software, options.software == "deepspeed"
    mixed = len(job.cluster.kinds) > 1
    conflicts: tuple[tuple[object, str], ...] = (
        (options.choose and not writes, "--choose: is for the files of a row; write --output DIR, too"),
        (writes and software == "megatron", "--output: Megatron reads no ds_config.json; leave it out"),
        (writes and plain and not is_path, "--output: launch/train_gpt.py needs a config.json; write it as --model"),
        (mixed and (measures or options.constants or "RANK" in os.environ), f"--gpus: {_MIXED}"),
        (options.base_bits and not adapts, "--base-bits: only LoRA leaves the model frozen; write --lora-rank, too"),
        (adapts and writes and plain, "--output: launch/train_gpt.py trains all parameters; write --software hf"),
    )
    for is_wrong, message in conflicts:
        if is_wrong:
            raise ConfigError(message)


_OFFLOADS: Mapping[tuple[str, ...], Offload] = {
    ("none", "none"): "none",
    ("cpu", "none"): "optimizer",
    ("cpu", "cpu"): "all",
}
"""Content of the host's memory, by the devices of optimizer states and of weights."""


def read_setup(file: Path, per_node: int) -> Setup:
    """Return the layout that `file` describes, on nodes of `per_node` GPUs. Without the section, nothing is compressed.

    Raises:
        ConfigError: The file cannot be read, or has settings that are not predicted.
    """
    ds_config = read_ds_config(file)
    section = parse_section(ds_config) if SECTION in ds_config else None
    parallelism = Parallelism() if section is None else section.parallelism or Parallelism()
    tensor, micro = TENSOR.effective(ds_config, parallelism), ds_config.get("train_micro_batch_size_per_gpu")
    within = parallelism.shard_within
    return Setup(
        STAGE.effective(ds_config, parallelism),
        tensor,
        parallelism.pipeline,
        micro if isinstance(micro, int) else 0,
        per_node // tensor if within == "node" else within or 0,
        **({} if section is None else _bits(file, section)),
        offload=_offload(file, ds_config),
    )


def _offload(file: Path, ds_config: Mapping[str, Any]) -> Offload:
    """Return what a configuration moves to the memory of the host.

    Raises:
        ConfigError: It moves something to files, or only weights.
    """
    zero = ds_config.get("zero_optimization", {})
    devices = [(zero.get(key) or {}).get("device", "none") for key in ("offload_optimizer", "offload_param")]
    found = _OFFLOADS.get(tuple(devices))
    if found is None:
        moved = f'"offload_optimizer" to {devices[0]} with "offload_param" to {devices[1]}'
        raise ConfigError(f'--config {file}: {moved} is not predicted; write "cpu" for neither, the first, or both')
    return found


def _bits(file: Path, section: CompressConfig) -> Mapping[str, Any]:
    """Return the bits of gradients and weights.

    Raises:
        ConfigError: They are compressed in another way, or islands exchange them.
    """
    if section.islands is not None:
        raise ConfigError(f"--config {file}: islands are not predicted as what runs now; name a file without them")
    found = {}
    for kind, settings, allowed in (
        ("gradient", section.gradients, GRADIENT_BITS),
        ("weight", section.weights, WEIGHT_BITS),
    ):
        bits = 0 if settings.method == "none" else getattr(settings, "bits", None)
        if bits not in allowed or settings.method not in ("none", "blockwise"):
            raise ConfigError(
                f'--config {file}: {kind}s by "{settings.method}" are not predicted (allowed: "none", and "blockwise" '
                f"with {', '.join(map(str, allowed[1:]))} bits); name a file without it"
            )
        found[f"{kind}_bits"] = bits
    return found


HOSTFILE = Path("/job/hostfile")
"""Hostfile that the deepspeed launcher reads by default (`deepspeed.launcher.runner.DLTS_HOSTFILE`)."""
CARDS = Path("/sys/class")
"""Directory in which Linux describes network cards."""


def find_machine(hostfile: Path | None, environment: Mapping[str, str] = os.environ) -> tuple[Gpu, int, int]:
    """Find the GPUs of the launcher that started this process, of `hostfile`, of a Slurm job, or of this machine.

    Returns:
        Their type, their number in all, and that of a node.

    Raises:
        ConfigError: There are none, their type is not known, or nodes have different numbers of them.
    """
    name, local = _local_gpus(environment)
    if "RANK" in environment:
        count = int(environment["WORLD_SIZE"])
        per_node = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or count)
    elif hostfile is not None or HOSTFILE.is_file():
        count, per_node = _slots(hostfile or HOSTFILE)
    else:
        count, per_node = int(environment.get("SLURM_JOB_NUM_NODES", 1)) * local, local
    if name is None:
        raise ConfigError("--gpus: is missing, and there is no GPU here; write 16xA100, or --emulate 2,1gbit")
    return find_gpu(name), count, per_node


def _local_gpus(environment: Mapping[str, str]) -> tuple[str | None, int]:
    """Return the type of this machine's GPUs and their number. Ranks on a machine without GPUs compute on its CPU."""
    try:
        import torch
    except ImportError:
        return None, 0
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0), torch.cuda.device_count()
    return ("CPU" if "RANK" in environment else None), 0


def _slots(hostfile: Path) -> tuple[int, int]:
    """Return the number of slots in a hostfile of DeepSpeed, and that of each host."""
    try:
        slots = [int(found) for found in re.findall(r"^\s*[^#\s]+\s+slots=(\d+)", hostfile.read_text("utf-8"), re.M)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--hostfile {hostfile}: cannot be read: {error}; write the path of a hostfile") from error
    if len(set(slots)) != 1:
        problem = "has no line such as node1 slots=8" if not slots else "gives nodes different numbers of slots"
        raise ConfigError(f"--hostfile {hostfile}: {problem}; correct it, or write --gpus and --gpus-per-node")
    return sum(slots), slots[0]


def find_network(cards: Path = CARDS) -> float:
    """Return the bytes per second of this node: all of its InfiniBand ports, or its fastest Ethernet card without any.

    Raises:
        ConfigError: No card says its rate, as in many virtual machines.
    """
    ports = [_first_number(port) * 1e9 for port in cards.glob("infiniband/*/ports/*/rate")]
    ethernet = [_first_number(speed) * 1e6 for speed in cards.glob("net/*/speed")]
    rate = sum(ports) or max(ethernet, default=0.0)
    if rate <= 0:
        raise ConfigError("--network: is missing, and no card of this machine says its rate; write 25gbit, for example")
    return rate / 8


def _first_number(file: Path) -> float:
    """Return the number at the beginning of a file; 0 if it cannot be read, as that of a card without a cable."""
    try:
        found = re.match(r"[0-9.]+", file.read_text("utf-8"))
    except OSError:
        return 0.0
    return float(found[0]) if found else 0.0
