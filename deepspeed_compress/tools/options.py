"""Command-line options of commands without an options module, with light imports so that `--help` is fast."""

import argparse
from pathlib import Path

from deepspeed_compress.tools.arguments import (
    Subcommands,
    duration,
    integer_from,
    port,
    positive_integer,
    positive_number,
    rate,
    share,
)
from deepspeed_compress.tools.bench.options import emulation

LAUNCHERS = ("deepspeed", "torchrun", "accelerate", "none")


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    parser.add_argument("--world-size", type=int, metavar="N", help="number of ranks, to check the parallelism")


def add_checkpoint_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = Subcommands(parser, "WHAT")
    what = "list tags, steps and sizes, and show which checkpoints are complete"
    listing = subjects.add("list", "tools.checkpoint:list_all", what, ["checkpoint list checkpoints"])
    what = "compare every file with its digest; the exit code is 1 if one differs"
    examples = ["checkpoint verify checkpoints", "checkpoint verify checkpoints --tag global_step400"]
    verify = subjects.add("verify", "tools.checkpoint:verify", what, examples)
    what = "write a universal checkpoint, which loads with other tensor and pipeline sizes"
    examples = ["checkpoint convert checkpoints --tag global_step400 --tensor 2"]
    convert = subjects.add("convert", "tools.checkpoint:convert", what, examples)
    what = "remove all complete checkpoints except the newest ones and the one that `latest` names"
    examples = ["checkpoint prune checkpoints --keep 3 --dry-run", "checkpoint prune checkpoints --keep 3"]
    prune = subjects.add("prune", "tools.checkpoint:prune", what, examples)
    for subparser in (listing, verify, convert, prune):
        what = "directory that was passed to save_checkpoint"
        subparser.add_argument("directory", type=Path, metavar="DIR", help=what)
    verify.add_argument("--tag", help="tag of one checkpoint (default: all)")
    convert.add_argument("--tag", help="tag of the checkpoint (default: the one that `latest` names)")
    convert.add_argument("--output", metavar="TAG", help="tag of the universal checkpoint (default: TAG_universal)")
    what = "tensor-parallel size of the run that will load it; needed only for GPT-2 (default: as it was saved)"
    convert.add_argument("--tensor", type=positive_integer, metavar="N", help=what)
    convert.add_argument("--workers", type=positive_integer, default=1, metavar="N", help="processes (default: 1)")
    what = "number of checkpoints to keep"
    prune.add_argument("--keep", type=positive_integer, required=True, metavar="N", help=what)
    prune.add_argument("--dry-run", action="store_true", help="only print what would be removed")


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add RUN_DIR and the options of `doctor` to `parser`."""
    what = "output directory of a run, or the directory of its compression.jsonl (monitor.path)"
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=what)
    parser.add_argument("--baseline", type=Path, metavar="RUN_DIR", help="an uncompressed run to compare with")
    config = "configuration of the run, if it has left no RUN_DIR/ds_config.json"
    parser.add_argument("--config", type=Path, metavar="FILE", help=config)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def add_islands_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = Subcommands(parser, "WHAT")
    examples = [
        "islands serve --port 29400 --state islands.json",
        "islands serve --host 10.0.0.1 --port 29400 --state islands.json --parameter-server",
    ]
    what = "run the coordinator until it is interrupted"
    serve = subjects.add("serve", "tools.services:serve_islands", what, examples)
    _add_listening_arguments(serve, "islands")
    what = "file for the state, from which a restarted coordinator continues"
    serve.add_argument("--state", type=Path, required=True, metavar="FILE", help=what)
    what = "run the parameter server of asynchronous islands instead; it needs the memory of two to four models"
    serve.add_argument("--parameter-server", action="store_true", help=what)
    what = "print the islands that are connected and those that are missing"
    examples = ["islands status localhost:29400", "islands status 10.0.0.1:29400 --json"]
    status = subjects.add("status", "tools.services:status", what, examples)
    what = "continue without islands that have died"
    examples = ["islands forget localhost:29400 2", "islands forget 10.0.0.1:29400 2 5"]
    forget = subjects.add("forget", "tools.services:forget", what, examples)
    for subparser in (status, forget):
        subparser.add_argument("rendezvous", metavar="HOST:PORT", help="address of the coordinator")
        subparser.add_argument("--json", action="store_true", help="print JSON, for programs")
    what, number = "numbers of missing islands, as status prints them", integer_from(0, "islands are numbered from 0")
    forget.add_argument("numbers", type=number, nargs="+", metavar="N", help=what)
    for subparser in (serve, status, forget):
        _add_tls_arguments(subparser)


def _add_listening_arguments(parser: argparse.ArgumentParser, clients: str) -> None:
    parser.add_argument("--port", type=port, required=True, metavar="N", help="port to listen on; 0 takes a free one")
    what = f"address to listen on; 0.0.0.0 for all (default: %(default)s, for {clients} on this host only)"
    parser.add_argument("--host", default="127.0.0.1", metavar="HOST", help=what)


def _add_tls_arguments(parser: argparse.ArgumentParser) -> None:
    what = "PEM file with the certificate and key of this side; connections then use TLS (docs/security.md)"
    parser.add_argument("--tls-certificate", metavar="FILE", help=what)
    what = "PEM file of the authority that signed both sides' certificates; required with --tls-certificate"
    parser.add_argument("--tls-authority", metavar="FILE", help=what)


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = Subcommands(parser, "WHAT")
    what = "show which settings apply at which step"
    examples = ["plan schedule ds_config.json", "plan schedule ds_config.json --steps 10000"]
    schedule = subjects.add("schedule", "tools.plan:run_schedule", what, examples)
    schedule.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration, such as ds_config.json")
    schedule.add_argument("--steps", type=positive_integer, metavar="N", help="total optimizer steps of the training")
    what = "estimate the cost of exchanges between islands, and how often to exchange"
    examples = ["plan islands ds_config.json --model 124M --hosts 4 --bandwidth 100mbit --step 0.5"]
    islands = subjects.add("islands", "tools.plan:run_islands", what, examples)
    islands.add_argument("config", metavar="CONFIG", help="DeepSpeed configuration with islands")
    what = "number of parameters that are exchanged, such as 124M"
    islands.add_argument("--model", required=True, metavar="N", help=what)
    what = "rate of an island's link, such as 100mbit"
    islands.add_argument("--bandwidth", type=rate, required=True, metavar="RATE", help=what)
    several = integer_from(2, "a single island exchanges nothing")
    islands.add_argument("--hosts", type=several, required=True, metavar="N", help="number of islands, from 2 up")
    what = "duration of an optimizer step without exchanges (default: 1)"
    islands.add_argument("--step", type=positive_number, default=1.0, metavar="SECONDS", help=what)
    _add_cluster_arguments(subjects)


def _add_cluster_arguments(subjects: Subcommands) -> None:
    what = "predict which layout and which compression trains a model first on a cluster"
    examples = [
        "plan cluster --model Qwen2.5-7B --config ds_config.json",
        "plan cluster --model 7B --gpus 64xH100 --network 100gbit/node --batch 4M-tokens --seq 4096",
        "plan cluster --model config.json --gpus 16xA100 --network 10gbit --batch 256 --seq 2048 --explain 1",
        "plan cluster --model config.json --gpus 16xA100 --network 10gbit --batch 256 --seq 2048 --config now.json",
        "plan cluster --model config.json --gpus 8xA100 --network 100gbit --batch 256 --choose 2 --output plan",
        "plan cluster --model config.json --gpus 16xA100 --network 10gbit --batch 64 --software hf --lora-rank 16",
        "plan cluster --model config.json --emulate 2x2,1gbit --batch 16 --seq 64 --measure measured.json",
    ]
    cluster = subjects.add("cluster", "tools.plan_cluster:run", what, examples)
    what = "config.json of the model, a directory with one, or a usual size: 0.5B, 1B, 3B, 7B, 8B, 13B, 14B, 32B, 70B"
    cluster.add_argument("--model", type=Path, required=True, metavar="FILE|DIR|SIZE", help=what)
    what = "such as 64xH100, 8x8xH100 or 8xA100+8xL4 (default: those of a launcher, hostfile, Slurm, or this machine)"
    cluster.add_argument("--gpus", metavar="NxTYPE", help=what)
    what = "hostfile of DeepSpeed with the nodes to count (default: /job/hostfile, if it exists)"
    cluster.add_argument("--hostfile", type=Path, metavar="FILE", help=what)
    what = "rate of a node (100gbit/node, 8x200gbit) or of a GPU (200gbit/gpu); without --gpus, that of this machine"
    cluster.add_argument("--network", metavar="RATE", help=what)
    what = "GPUs in a node (default: the usual number of that type)"
    cluster.add_argument("--gpus-per-node", type=positive_integer, metavar="N", help=what)
    what = "batch of a step: sequences (1024), or tokens (4M-tokens; M is 1,048,576; default: as in --config)"
    cluster.add_argument("--batch", metavar="BATCH", help=what)
    what = "tokens of a sequence (default: 2048, or what the model takes)"
    cluster.add_argument("--seq", type=positive_integer, metavar="N", help=what)
    what = "mean tokens of a document, if documents are padded to --seq now: shows what packing them would gain"
    cluster.add_argument("--mean-length", type=positive_integer, metavar="N", help=what)
    what = "tokens of the whole run, such as 300B (default: 20 for each trained parameter)"
    cluster.add_argument("--tokens", metavar="N", help=what)
    what = "train adapters of this rank on all matrices of the layers, and freeze the model (LoRA)"
    cluster.add_argument("--lora-rank", type=positive_integer, metavar="R", help=what)
    what = "bits of a frozen element with its scales, such as 4.5 for nf4 (QLoRA; default: as the GPUs compute)"
    cluster.add_argument("--base-bits", type=positive_number, metavar="BITS", help=what)
    what = "program that trains: launch/train_gpt.py or your own loop, Hugging Face Trainer, or Megatron-core"
    cluster.add_argument("--software", choices=("deepspeed", "hf", "megatron"), default="deepspeed", help=what)
    _add_measurement_arguments(cluster.add_argument_group("measurement"))
    what = "ds_config.json of what runs now (default: ZeRO without compression, with the fastest stage that fits)"
    cluster.add_argument("--config", type=Path, metavar="FILE", help=what)
    what = "show the terms of a layout: its number in the table, or its name"
    cluster.add_argument("--explain", metavar="N|LAYOUT", help=what)
    what = "row, or name, whose files --output writes (default: the fastest that trains as now)"
    cluster.add_argument("--choose", metavar="N|LAYOUT", help=what)
    what = "write ds_config.json and launch.sh of a layout to DIR"
    cluster.add_argument("--output", type=Path, metavar="DIR", help=what)


def _add_measurement_arguments(group: argparse._ArgumentGroup) -> None:
    what = "write what ranks of a launcher or of --emulate measure, with steps of a few layouts however long they take"
    group.add_argument("--measure", type=Path, metavar="FILE.json", help=what)
    what = "predict with the constants that --measure wrote"
    group.add_argument("--constants", type=Path, metavar="FILE.json", help=what)
    what = "cores of this machine as GPUs of emulated hosts, such as 2x2,1gbit; in place of --gpus and --network"
    group.add_argument("--emulate", type=emulation, metavar="HOSTSxRANKS,RATE", help=what)
    what = "time limit of each measurement on emulated hosts (default: 1800)"
    group.add_argument("--timeout", type=positive_number, default=1800.0, metavar="SECONDS", help=what)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    what = "output directory of launch/train_gpt.py or Trainer, or the monitor.path of a program; it may still run"
    baseline = "run to compare with, such as an uncompressed one"
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help=what)
    parser.add_argument("--baseline", type=Path, metavar="RUN_DIR", help=baseline)
    output = "directory for report.html (default: RUN_DIR)"
    parser.add_argument("--output", type=Path, metavar="DIR", help=output)


def add_rollout_arguments(parser: argparse.ArgumentParser) -> None:
    subjects = Subcommands(parser, "WHAT")
    examples = [
        "rollout serve --directory weights --port 29500",
        "rollout serve --directory weights --port 29500 --host 10.0.0.1 --secret-file secret",
    ]
    what = "serve a directory of weights until it is interrupted"
    serve = subjects.add("serve", "tools.services:serve_rollout", what, examples)
    what = "directory of the weights; it is created if it does not exist"
    serve.add_argument("--directory", type=Path, required=True, metavar="DIR", help=what)
    _add_listening_arguments(serve, "clients")
    what = "file with the secret of server and clients (default: as for all services, see docs/security.md)"
    serve.add_argument("--secret-file", type=Path, metavar="FILE", help=what)
    _add_tls_arguments(serve)
    examples = [
        "rollout export --store weights --directory versions --model base",
        "rollout export --store weights --directory adapters",
    ]
    what = "write versions as SGLang's /pull_weights reads them, or as adapters of PEFT, until it is interrupted"
    export = subjects.add("export", "tools.services:export_rollout", what, examples)
    export.add_argument("--store", required=True, help="directory of the weights, or the address of their server")
    export.add_argument("--directory", type=Path, required=True, metavar="DIR", help="directory for the versions")
    what = "directory of the checkpoint that the engines were started with; leave it out for adapters"
    export.add_argument("--model", type=Path, metavar="DIR", help=what)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    what = "launcher that starts the processes (default: deepspeed); with none, the script runs in this process"
    parser.add_argument("--launcher", choices=LAUNCHERS, default="deepspeed", help=what)
    _add_agent_arguments(parser.add_argument_group("restarts of lost ranks and hosts, in place of a launcher"))
    what = "start even if the section of a DeepSpeed configuration seems misspelled, so that nothing is compressed"
    parser.add_argument("--allow-uncompressed", action="store_true", help=what)
    section = "file with the section, for programs that use DistributedDataParallel or fully_shard without DeepSpeed"
    parser.add_argument("--section", type=Path, metavar="FILE", help=section)
    _add_tls_arguments(parser)
    what = "options of the launcher, SCRIPT and its arguments; or the command of a PROGRAM that starts its own ranks"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=what)


def _add_agent_arguments(group: argparse._ArgumentGroup) -> None:
    what = "start this host's ranks, and restart all ranks up to N times if a rank or a host is lost (docs/faults.md)"
    group.add_argument("--restarts", type=integer_from(0), metavar="N", help=what)
    what = "number of ranks on each host; required with --restarts"
    group.add_argument("--ranks", type=positive_integer, metavar="N", help=what)
    what = "number of hosts that train (default: 1)"
    group.add_argument("--hosts", type=positive_integer, default=1, metavar="N", help=what)
    what = "number of spare hosts, with --rendezvous (default: 0)"
    group.add_argument("--spares", type=integer_from(0), default=0, metavar="N", help=what)
    what = "address of one of the hosts, where the agents of all hosts meet; run the same command on each host"
    group.add_argument("--rendezvous", metavar="HOST:PORT", help=what)
    what = "time without a step of any rank, after which all restart (default: %(default)s); with a longer one, set "
    what += "DEEPSPEED_TIMEOUT (minutes), too"
    group.add_argument("--hang", default="10 min", metavar="TIME", help=what)
    what = "time that ranks have to end before they are killed (default: %(default)s)"
    group.add_argument("--grace", default="30 s", metavar="TIME", help=what)
    what = "time to wait for hosts (default: %(default)s)"
    group.add_argument("--wait", default="10 min", metavar="TIME", help=what)


def add_schema_arguments(parser: argparse.ArgumentParser) -> None:
    what = "print the schema of a whole ds_config.json, in which DeepSpeed's keys are known too"
    parser.add_argument("--file", action="store_true", help=what)
    what = "print tables of all keys with their types, defaults and meanings, in Markdown"
    parser.add_argument("--markdown", action="store_true", help=what)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write to FILE instead of standard output")


def add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `tune`, and the arguments that it passes on, to `parser`."""
    what = "DeepSpeed configuration that the script reads; it is not changed"
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help=what)
    what = "largest allowed loss above that of uncompressed training, as a fraction of it (default: 0.5%%)"
    parser.add_argument("--target-loss-gap", type=share, default=0.005, metavar="SHARE", help=what)
    what = "time limit such as 90s, 30min or 2h, after which the best candidate so far is chosen (default: no limit)"
    parser.add_argument("--time-budget", type=duration, metavar="TIME", help=what)
    what = "directory for all results; trials that have finished there are not repeated (default: tuning_results)"
    parser.add_argument("--output", type=Path, default=Path("tuning_results"), metavar="DIR", help=what)
    what = "figure to minimize: the step time on this network, or the bytes sent, for another network"
    parser.add_argument("--metric", choices=("step_time", "bytes"), default="step_time", help=what)
    what = "your own candidates: a list of objects with keys of the section and a name"
    parser.add_argument("--space", type=Path, metavar="FILE.json", help=what)
    what = "optimizer steps of a trial in the first rung; each further rung has three times as many (default: 30)"
    parser.add_argument("--steps", type=integer_from(10), default=30, metavar="N", help=what)
    parser.add_argument("--rungs", type=integer_from(1), default=3, metavar="N", help="number of rungs (default: 3)")
    what = "launcher that starts the processes (default: deepspeed); with none, the script runs in one process"
    parser.add_argument("--launcher", choices=LAUNCHERS, default="deepspeed", help=what)
    what = "options of the launcher, then SCRIPT and its arguments, one of which is the file of --config"
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help=what)
