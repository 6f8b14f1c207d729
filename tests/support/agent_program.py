"""Training program that does not know this package. It records its starts, its steps and its result.

python agent_program.py --deepspeed FILE DIRECTORY STEPS

Environment variables: PAUSE, seconds after each step; STAGES, number of pipeline stages.
After step N, the program waits as long as DIRECTORY/hold_N exists.
"""

import argparse
import hashlib
import json
import os
import time
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import nn

BATCH = 12
parser = argparse.ArgumentParser()
parser.add_argument("--deepspeed")
parser.add_argument("directory", type=Path)
parser.add_argument("steps", type=int)
options = parser.parse_args()
RANK = int(os.environ["RANK"])
PAUSE = float(os.environ.get("PAUSE", "0"))
STAGES = int(os.environ.get("STAGES", "1"))


def record(**what: object) -> None:
    line = json.dumps({"rank": RANK, "time": time.time(), **what}) + "\n"
    descriptor = os.open(options.directory / f"rank_{RANK}.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, line.encode())
    os.close(descriptor)


# See proc_pid_stat(5), field 22.
ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
resumed = os.environ.get("DS_COMPRESS_RESUME", "")
record(pid=os.getpid(), ticks=ticks, start=resumed, ppid=os.getppid(), env=dict(os.environ))
torch.set_num_threads(1)
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [nn.Linear(12, 31), nn.ReLU(), nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 1)]
model = PipelineModule(layers, num_stages=STAGES, loss_fn=nn.MSELoss()) if STAGES > 1 else nn.Sequential(*layers)
engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=options.deepspeed)
size, index = BATCH // engine.dp_world_size, dist.get_rank(engine.seq_data_parallel_group)
record(first=engine.global_steps, world=engine.dp_world_size)


def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Make one step, and return the loss."""
    if STAGES > 1:
        parts = engine.gradient_accumulation_steps()
        return engine.train_batch(zip(x.chunk(parts), y.chunk(parts), strict=True))
    loss = (engine(x) - y).square().mean()
    engine.backward(loss)
    engine.step()
    return loss


loss = torch.zeros(())
for step in range(engine.global_steps, options.steps):
    x = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(step))
    y = x[:, :3].sum(dim=1, keepdim=True)
    mine = slice(index * size, (index + 1) * size)
    loss = train(x[mine], y[mine])
    record(step=step + 1, loss=float(loss.detach()))
    time.sleep(PAUSE)
    while (options.directory / f"hold_{step + 1}").exists():
        time.sleep(0.01)
values = []
for parameter in engine.module.parameters():
    with deepspeed.zero.GatheredParameters([parameter] if hasattr(parameter, "ds_id") else []):
        values.append(parameter.detach().float().flatten().clone())
digest = hashlib.sha256(torch.cat(values).numpy().tobytes()).hexdigest()
(options.directory / f"result_{RANK}.json").write_text(json.dumps({"digest": digest, "loss": float(loss.detach())}))
engine.destroy()
