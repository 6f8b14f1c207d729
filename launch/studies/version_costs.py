"""Time and memory that a version costs the trainer that publishes it, and a receiver in a process of its own.

The trainer holds bf16 weights, fp32 master weights and AdamW's moments, as DeepSpeed does. Its batches are random
tokens. Steps while the moments adapt to a new learning rate are not reported.
"""

import ctypes
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import astuple, dataclass
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.rollout.checkpoint_export import write_delta
from deepspeed_compress.rollout.module_weights import make_holder

TOKENS = 256
"""Tokens of a step."""
SETTLE = 2
"""First steps at a learning rate, which are published but not reported."""


COLUMNS = (
    "learning rate",
    "publisher",
    "changed values",
    "MB",
    "step s",
    "trainer waits s",
    "of a step",
    "published s",
    "received s",
    "publisher MB",
    "receiver MB",
    "xor MB",
    "xor s",
)


@dataclass(frozen=True)
class Cost:
    """Cost of one version.

    Attributes:
        step: seconds of the optimizer step before it.
        pause: seconds for which training waited.
        published: seconds from the call until the version was complete.
        received: seconds of the receiver's update.
        publisher: most memory of the trainer in addition to what it has without a publisher, in MB.
        receiver: most memory of the receiver in addition to its weights, in MB.
        changed: share of the values that changed.
        size: MB of the version.
    """

    step: float
    pause: float
    published: float
    received: float
    publisher: float
    receiver: float
    changed: float
    size: float


def rows(config: Path, rates: Sequence[float], versions: int) -> Iterator[list[str]]:
    """Yield the cells of each learning rate, and those of a publisher that is not asynchronous and of full copies."""
    trainer = Trainer(config)
    trainer.step(rates[0])
    with TemporaryDirectory() as directory, closing(OtherReceiver(directory)) as receiver:
        job = _Job(trainer, directory, receiver, asynchronous=True)
        full = job.publish(0.0)
        for rate in rates:
            for _ in range(SETTLE):
                job.step(rate)
            xored = xor(trainer, rate, directory)
            job.publish(0.0)
            yield cells(f"{rate:g}", "asynchronous", [job.step(rate) for _ in range(versions)], xored)
        yield cells("", "the first version, a full copy", [full])
        del job
        job = _Job(trainer, directory, receiver, asynchronous=False)
        job.publish(0.0)
        yield cells(f"{rates[-1]:g}", "not asynchronous", [job.step(rates[-1]) for _ in range(versions)])


def cells(rate: str, kind: str, costs: Sequence[Cost], other: tuple[float, float] | None = None) -> list[str]:
    """Return the cells of a row: medians of `costs`, and the MB and seconds of the compressed xor of the weights."""
    median = Cost(*(statistics.median(values) for values in zip(*map(astuple, costs), strict=True)))
    share = f"{median.pause / median.step:.1%}" if median.step else ""
    seconds = (f"{one:.2f}" for one in (median.step, median.pause))
    later = (f"{one:.2f}" for one in (median.published, median.received))
    memory = (f"{one:.0f}" for one in (median.publisher, median.receiver))
    xored = ("", "") if other is None else (f"{other[0]:.1f}", f"{other[1]:.2f}")
    return [rate, kind, f"{median.changed:.2%}", f"{median.size:.1f}", *seconds, share, *later, *memory, *xored]


def xor(trainer: "Trainer", rate: float, directory: str) -> tuple[float, float]:
    """Return the MB and the seconds of a step as a compressed xor of the weights, as SGLang's readers take it."""
    old = {name: values.clone() for name, values in trainer.weights().items()}
    trainer.step(rate)
    with TemporaryDirectory(dir=directory) as place:
        begin = time.perf_counter()
        write_delta(Path(place), 1, old, trainer.weights())
        seconds = time.perf_counter() - begin
        return sum(file.stat().st_size for file in Path(place).iterdir()) / 1e6, seconds


class _Job:
    """A trainer with a publisher, and a receiver that takes each of its versions."""

    def __init__(self, trainer: "Trainer", directory: str, receiver: "OtherReceiver", asynchronous: bool) -> None:
        self._trainer, self._receiver, self._before = trainer, receiver, resident()
        self._publisher = Publisher(
            trainer.model, DirectoryStore(directory), full_every=10**6, asynchronous=asynchronous
        )

    def step(self, rate: float) -> Cost:
        """Take a step, and publish it."""
        return self.publish(self._trainer.step(rate))

    def publish(self, step: float) -> Cost:
        """Publish the weights after a step that has taken `step` seconds."""
        # Memory that training has given back would count.
        resident()
        with peak() as most:
            begin = time.perf_counter()
            found = self._publisher.publish()
            pause = time.perf_counter() - begin
            published = self._publisher.wait() or found
        assert published is not None
        received, memory = self._receiver.update()
        size = (published.change_bytes if published.changed < 1 else published.full_bytes) / 1e6
        times = (step, pause, published.seconds, received)
        return Cost(*times, (most[0] - self._before) / 1e6, memory, published.changed, size)


class Trainer:
    """Training in bf16 with fp32 master weights.

    Attributes:
        model: the model, with random weights.
    """

    def __init__(self, config: Path) -> None:
        self.model = build_model(config, read_model_config(config), seed=0).to(torch.bfloat16)
        self._masters = [parameter.detach().float() for parameter in self.model.parameters()]
        # One optimizer per parameter: gradients in fp32 exist for one of them at a time.
        self._optimizers = [torch.optim.AdamW([master], fused=True) for master in self._masters]
        self._random = torch.Generator().manual_seed(0)

    def step(self, lr: float) -> float:
        """Take a step, and return its seconds."""
        begin = time.perf_counter()
        tokens = torch.randint(self.model.config.vocab_size, (1, TOKENS), generator=self._random)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        for parameter, master, optimizer in zip(self.model.parameters(), self._masters, self._optimizers, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
            optimizer.param_groups[0]["lr"] = lr
            optimizer.step()
            master.grad = None
            parameter.data.copy_(master)
        return time.perf_counter() - begin

    def weights(self) -> dict[str, Tensor]:
        """Return the weights, in the memory of the model."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


class OtherReceiver:
    """Receiver in a process of its own, which updates when it is told to."""

    def __init__(self, directory: str) -> None:
        command = [sys.executable, "-m", "launch.studies.version_costs", directory]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def update(self) -> tuple[float, float]:
        """Return the seconds of an update, and the most memory in addition to the weights, in MB."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print("update", file=self._process.stdin, flush=True)
        seconds, memory = json.loads(self._process.stdout.readline())
        return seconds, memory

    def close(self) -> None:
        self._process.communicate()


def receive(directory: str) -> None:
    """Update a module for each line of the standard input, and print what each update has cost."""
    orders = iter(sys.stdin)
    # With the first one, there is a version.
    first = next(orders)
    store = DirectoryStore(directory)
    module = make_holder(store)
    for parameter in module.parameters():
        # Pages of zeros would become resident only now and then.
        parameter.data.fill_(1.0)
    receiver, before = Receiver(module, store), resident()
    for _ in chain([first], orders):
        with peak() as most:
            begin = time.perf_counter()
            receiver.update()
            seconds = time.perf_counter() - begin
        print(json.dumps([seconds, (most[0] - before) / 1e6]), flush=True)


@contextmanager
def peak() -> Iterator[list[int]]:
    """Yield a list that gets the largest resident memory of this process in the block, in bytes."""
    found: list[int] = []
    # See proc_pid_clear_refs(5): the peak begins at the present size.
    Path("/proc/self/clear_refs").write_text("5")
    yield found
    found.append(_status("VmHWM"))


def resident() -> int:
    """Return the resident memory of this process in bytes, without what is free."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return _status("VmRSS")


def _status(field: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    receive(sys.argv[1])
