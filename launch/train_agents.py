"""Train two agents that share a trunk. Each agent is an island with its own ranks.

    torchrun --nproc_per_node 4 -m launch.train_agents --output-dir runs/agents

Needs Gymnasium: pip install "deepspeed-compress[agents]". See docs/agents.md.
"""

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist
from torch.distributed import ProcessGroup

from launch.agents.agent import AGENTS, Agent, Rules

CONFIG = Path(__file__).parent / "agents" / "ds_config.json"
KINDS = ("bytes_sent", "bytes_islands", "bytes_uncompressed", "bytes_weights")


def main(argv: Sequence[str] | None = None) -> None:
    """Train once for each seed."""
    options = parse_options(argv)
    deepspeed.init_distributed()
    if dist.get_world_size() % AGENTS:
        raise SystemExit(f"{dist.get_world_size()} processes are not divisible by {AGENTS} agents; start 2 or 4")
    group, _ = dist.new_subgroups(dist.get_world_size() // AGENTS)  # type: ignore[no-untyped-call]
    for seed in options.seeds:
        train(options, group, seed)
    dist.barrier()
    dist.destroy_process_group()


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train two agents that share a trunk.")
    add = parser.add_argument
    add("--config", type=Path, default=CONFIG, metavar="FILE", help="ds_config.json; default: the one in launch/agents")
    add(
        "--output-dir", type=Path, required=True, metavar="DIR", help="directory for seed_N.json with returns and bytes"
    )
    add(
        "--exchange-every",
        type=int,
        metavar="N",
        help="updates between exchanges; 0 for none; default: the value in the configuration",
    )
    add(
        "--renew-every",
        type=int,
        metavar="N",
        help="updates after which actors get new weights; default: at each exchange",
    )
    add(
        "--correction",
        choices=("vtrace", "none"),
        default="vtrace",
        help="correction for actions of older weights; default: vtrace",
    )
    add("--updates", type=int, default=120, metavar="N", help="updates of each agent; default: 120")
    add("--score-every", type=int, default=10, metavar="N", help="updates between evaluations; default: 10")
    add("--seeds", type=int, nargs="+", default=[0], metavar="N", help="seeds of the runs; default: 0")
    return parser.parse_args(argv)


def train(options: argparse.Namespace, group: ProcessGroup, seed: int) -> None:
    """Train one run. Rank 0 writes its results."""
    config = read_config(options, group.size())
    rules = Rules(renewals(options, config), options.correction == "vtrace")
    agent, returns = Agent(config, rules, group, seed), []
    for update in range(1, options.updates + 1):
        agent.update()
        if update % options.score_every == 0:
            returns.append({"update": update, "returns": scores(agent), "noise": agent.noise})
    if dist.get_rank() == 0:
        write(options.output_dir / f"seed_{seed}.json", {"curve": returns, "bytes": traffic(agent)})
    agent.engine.destroy()


def read_config(options: argparse.Namespace, ranks: int) -> dict[str, Any]:
    """Return the configuration for agents of `ranks` ranks, with the changes of `options`."""
    config: dict[str, Any] = json.loads(options.config.read_text(encoding="utf-8"))
    islands = config["deepspeed_compress"]["islands"]
    islands["size"] = ranks
    if options.exchange_every is not None:
        islands["sync_every"] = options.exchange_every or options.updates + 1
    return config


def renewals(options: argparse.Namespace, config: Mapping[str, Any]) -> int:
    """Return after how many updates actors get new weights: by default, when agents exchange."""
    if options.renew_every is not None:
        return int(options.renew_every)
    return 10 if options.exchange_every == 0 else int(config["deepspeed_compress"]["islands"]["sync_every"])


def scores(agent: Agent) -> list[float]:
    """Return the return of every agent, on all ranks."""
    found: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(found, agent.score())
    return found[:: dist.get_world_size() // AGENTS]


def traffic(agent: Agent) -> dict[str, float]:
    """Return the mean number of bytes of each kind that a rank sends per update."""
    return {kind: statistics.fmean(getattr(one, kind) for one in agent.traffic) for kind in KINDS}


def write(file: Path, found: Any) -> None:
    """Write `found` as JSON, after creating the directory."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
