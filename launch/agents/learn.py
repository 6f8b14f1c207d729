"""The training program: all ranks train the policy, and the first one runs Agent-Lightning's algorithm."""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import agentlightning
import deepspeed
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import deepspeed_compress
from deepspeed_compress.agents.learner import Checkpoints, Learner, LearnerSettings
from deepspeed_compress.integrations.agent_lightning import BatchFigures, DeepSpeedAlgorithm, Endpoint, RolloutPlan
from deepspeed_compress.launcher.workers import die_with
from deepspeed_compress.rollout import DirectoryStore, Published, Publisher
from launch.agents.agent import Adder
from launch.agents.sums import LARGEST, Sum


class Publication:
    """Publishes the weights of an engine after each batch.

    Attributes:
        last: report of the newest version.
    """

    def __init__(self, engine: Any, directory: Path) -> None:
        self._publisher = Publisher(engine, DirectoryStore(directory), dtype="bf16")
        self.last = self.publish()

    def publish(self) -> Published:
        self.last = cast(Published, self._publisher.publish())
        return self.last

    def next_version(self) -> int:
        """Publish the weights, and return their version. Collective."""
        return self.publish().version


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a policy; launch.train_agents starts this.")
    add = parser.add_argument
    add("--config", type=Path, required=True, metavar="FILE", help="ds_config.json")
    add("--model", type=Path, required=True, metavar="DIR", help="model and tokenizer of transformers")
    add("--weights", type=Path, required=True, metavar="DIR", help="directory for the versions of the weights")
    add("--checkpoints", type=Path, required=True, metavar="DIR", help="directory for checkpoints")
    add("--checkpoint-every", type=int, required=True, metavar="N", help="batches from one checkpoint to the next")
    add("--resume", action="store_true", help="continue from the newest checkpoint, or start if there is none")
    add("--figures", type=Path, required=True, metavar="FILE", help="file for the figures of each batch, JSON lines")
    add("--endpoint", required=True, metavar="URL", help="address of the policy's endpoint")
    add("--port", type=int, required=True, help="port of the store")
    add("--batches", type=int, required=True, help="number of batches of rollouts")
    add("--tasks", type=int, required=True, help="tasks in a batch")
    add("--episodes", type=int, required=True, help="rollouts of each task")
    add("--behind", type=int, required=True, help="largest number of versions by which rollouts may be behind")
    add("--uncorrected", action="store_true", help="do not weight samples by their ratio to the present policy")
    add("--agent", type=int, required=True, help="number of the agent, from 0")
    add("--agents", type=int, required=True, help="number of agents, which divide the sums among themselves")
    add("--seed", type=int, required=True)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    # torchrun starts ranks in sessions of their own, which would survive it if it is killed.
    die_with(os.getppid())
    deepspeed.init_distributed()
    model = AutoModelForCausalLM.from_pretrained(options.model)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    engine, *_ = deepspeed_compress.initialize(
        model=model, model_parameters=list(model.parameters()), config=str(options.config)
    )
    checkpoints = Checkpoints(engine, options.checkpoints, options.checkpoint_every, options.resume)
    publication = Publication(engine, options.weights)
    learner = Learner(
        engine, tokenizer.pad_token_id, LearnerSettings(corrected=not options.uncorrected, seed=options.seed)
    )
    algorithm = DeepSpeedAlgorithm(
        learner,
        publication.next_version,
        publication.last.version,
        Endpoint(options.endpoint, max_tokens=len(str(2 * LARGEST)) + 1),
        RolloutPlan(options.batches, options.tasks, options.episodes, options.behind, seed=options.seed),
        _reporter(options.figures, publication),
        checkpoints,
    )
    if algorithm.leads:
        _keep_figures(options.figures, checkpoints.batches)
        _lead(algorithm, options)
    else:
        algorithm.follow()
    engine.destroy()
    dist.barrier()
    dist.destroy_process_group()


def _lead(algorithm: DeepSpeedAlgorithm, options: argparse.Namespace) -> None:
    strategy = agentlightning.ClientServerExecutionStrategy(
        role="algorithm", server_host="127.0.0.1", server_port=options.port
    )
    trainer = agentlightning.Trainer(algorithm=algorithm, strategy=strategy)
    tasks = [asdict(Sum(one, other)) for one in range(LARGEST + 1) for other in range(LARGEST + 1)]
    trainer.fit(Adder(), train_dataset=cast(Any, tasks[options.agent :: options.agents]))


def _keep_figures(file: Path, batches: int) -> None:
    """Remove the figures of batches after `batches`, which a resumed run learns from again."""
    if file.exists():
        lines = file.read_text().splitlines(keepends=True)
        file.write_text("".join(lines[:batches]))


def _reporter(file: Path, publication: Publication) -> Callable[[BatchFigures], None]:
    def report(figures: BatchFigures) -> None:
        published = {"bytes": publication.last.change_bytes, "changed": publication.last.changed}
        with file.open("a") as lines:
            lines.write(json.dumps(asdict(figures) | published) + "\n")

    return report


if __name__ == "__main__":
    main()
