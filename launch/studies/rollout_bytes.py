"""Measure the bytes of weight updates for rollout workers, by learning rate.

    python -m launch.studies.rollout_bytes --data data/shakespeare --output-dir runs/rollout

A model is first trained at a high learning rate. From there, AdamW continues at each of `--lr`, and every step is
published in bf16 (`--dtype`). Steps while Adam's moments adapt to the new learning rate are left out. A receiver
applies each version, and its weights are compared bit by bit. With `--bits`, changes are lossy, and the distance of the
receiver's weights is reported as a share of the distance that the last step has moved them. Speeds are those of one
thread, by processor time, for one version, next to a copy of the same weights.

    python -m launch.studies.rollout_bytes --costs --model launch/studies/configs/models/qwen2_500m.json --lr 1e-6 1e-5

measures what a version of a larger model costs the trainer and a receiver: time and memory (see `version_costs`).
"""

import argparse
import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from deepspeed_compress.compression.compressors.base import DTYPES
from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.rollout.changes import apply, encode, encode_lossy
from deepspeed_compress.rollout.versions import Dtype
from deepspeed_compress.training.data.tokens import open_cache
from launch.studies import version_costs
from launch.studies.harness import add_text_options, cache_dir, markdown, new_parser, prepare_data, tracked

SEQUENCES, TOKENS = 4, 128
SETTLE = 5
"""First steps at a learning rate that are not reported."""
REPEATS = 5
"""Repetitions of a timed call, of which the fastest one counts."""
COLUMNS = ("learning rate", "changed values", "bytes per version", "whole", "ratio", "error", "encode", "apply", "copy")


@dataclass(frozen=True)
class Setting:
    """Settings of the publisher."""

    dtype: Dtype
    bits: Literal[4, 8] | None


@dataclass(frozen=True)
class Result:
    """Means over the versions of a learning rate, the error of the last one, and speeds in MB of weights per second."""

    changed: float
    version_bytes: float
    whole_bytes: int
    error: float
    encode: float
    apply: float
    copy: float


def main() -> None:
    """Train, and print a row for each learning rate."""
    options = parse_options()
    if options.costs:
        found = version_costs.rows(options.model, options.lr, options.versions)
        print(markdown(version_costs.COLUMNS, found), end="")
        return
    torch.set_num_threads(1)
    batches = read_batches(options)
    model = build_model(options.model, read_model_config(options.model), seed=0)
    for _ in train(model, batches, options.warm_up_lr, options.warm_up):
        pass
    setting = Setting(options.dtype, options.bits)
    results = {lr: measure(copy.deepcopy(model), batches, lr, options.versions, setting) for lr in tracked(options.lr)}
    print(markdown(COLUMNS, (cells(lr, result) for lr, result in results.items())), end="")


def parse_options() -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_text_options(parser, required=False)
    add = parser.add_argument
    add("--warm-up", type=int, default=150, metavar="N", help="steps before anything is published; default: 150")
    add("--warm-up-lr", type=float, default=1e-3, metavar="LR", help="their learning rate; default: 1e-3")
    add("--costs", action="store_true", help="measure time and memory with random weights and tokens; needs no text")
    add("--versions", type=int, default=20, metavar="N", help="versions per learning rate; default: 20")
    add("--dtype", choices=get_args(Dtype), default="bf16", help="type of the published weights; default: bf16")
    add("--bits", type=int, choices=[4, 8], help="bits per value of lossy changes; default: exact changes")
    add("--lr", type=float, nargs="+", default=[1e-7, 1e-6, 1e-5, 1e-4], help="default: 1e-7 1e-6 1e-5 1e-4")
    options = parser.parse_args()
    if not options.costs and None in (options.data, options.output_dir):
        parser.error("--data and --output-dir are needed without --costs")
    return options


def read_batches(options: argparse.Namespace) -> Iterator[Tensor]:
    """Yield random batches of the text."""
    tokens = torch.from_numpy(open_cache(cache_dir(options), prepare_data(options)).tokens.astype("int64"))
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(tokens) - TOKENS, (SEQUENCES,), generator=generator).tolist()
        yield torch.stack([tokens[start : start + TOKENS] for start in starts])


def train(model: nn.Module, batches: Iterator[Tensor], lr: float, steps: int) -> Iterator[int]:
    """Take AdamW steps, and yield the number of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        tokens = next(batches)
        model(input_ids=tokens, labels=tokens).loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step


def measure(model: nn.Module, batches: Iterator[Tensor], lr: float, versions: int, setting: Setting) -> Result:
    """Publish each step, and receive all versions at the end."""
    shares, sizes, dtype = [], [], DTYPES[setting.dtype]
    with TemporaryDirectory() as directory:
        store = DirectoryStore(directory)
        publisher = Publisher(model, store, setting.dtype, full_every=10**6, bits=setting.bits)
        publisher.publish()
        receiver = Receiver(received := copy.deepcopy(model).to(dtype), store)
        receiver.update()
        old, new = weights(model, dtype), weights(model, dtype)
        for step in train(model, batches, lr, SETTLE + versions):
            published = publisher.publish()
            assert published is not None
            old, new = new, weights(model, dtype)
            if step >= SETTLE:
                shares.append(published.changed)
                sizes.append(published.change_bytes)
        receiver.update()
    error = distance(weights(received, dtype), new) / distance(old, new)
    assert setting.bits is not None or not error, "the receiver's weights differ from the published ones"
    whole = sum(one.nbytes for one in new)
    return Result(statistics.fmean(shares), statistics.fmean(sizes), whole, error, *speeds(old, new, setting.bits))


def weights(model: nn.Module, dtype: torch.dtype) -> list[Tensor]:
    """Return copies of all parameters as flat tensors."""
    return [parameter.detach().to(dtype, copy=True).view(-1) for parameter in model.parameters()]


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """Return the L2 distance of two versions; 0 only if they are equal."""
    pairs = zip(some, others, strict=True)
    return math.sqrt(sum((one.double() - other.double()).square().sum().item() for one, other in pairs))


def changes(old: Sequence[Tensor], new: Sequence[Tensor], bits: int | None) -> list[bytes]:
    """Return the payloads of a version."""
    pairs = zip(old, new, strict=True)
    if bits is None:
        return [encode(before, after) for before, after in pairs]
    return [encode_lossy(before, after.clone(), bits) for before, after in pairs]


def speeds(old: Sequence[Tensor], new: Sequence[Tensor], bits: int | None) -> tuple[float, float, float]:
    """Return the speeds of encoding, applying and copying one version."""
    payloads = changes(old, new, bits)
    held = [one.clone() for one in old]
    seconds = (
        fastest(lambda: changes(old, new, bits)),
        fastest(lambda: apply_all(payloads, held)),
        fastest(lambda: [one.copy_(before) for one, before in zip(held, old, strict=True)]),
    )
    encoding, applying, copying = (sum(one.nbytes for one in new) / 1e6 / one for one in seconds)
    return encoding, applying, copying


def apply_all(payloads: Sequence[bytes], held: Sequence[Tensor]) -> None:
    """Apply a change to each of `held`."""
    for payload, one in zip(payloads, held, strict=True):
        apply(payload, one)


def fastest(call: Callable[[], object]) -> float:
    """Return the processor time of the fastest call, in seconds. Other programs change it less than wall time."""
    times = []
    for _ in range(REPEATS):
        begin = time.process_time()
        call()
        times.append(time.process_time() - begin)
    return min(times)


def cells(lr: float, found: Result) -> list[str]:
    """Return the cells of a row."""
    ratio = found.whole_bytes / found.version_bytes
    sizes = (f"{found.version_bytes / 1e3:.0f} KB", f"{found.whole_bytes / 1e3:.0f} KB", f"{ratio:.3g}")
    return [
        f"{lr:g}",
        f"{found.changed:.2%}",
        *sizes,
        f"{found.error:.1%}",
        *(f"{one:.0f}" for one in (found.encode, found.apply, found.copy)),
    ]


if __name__ == "__main__":
    main()
