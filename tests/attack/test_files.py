"""Damaged files of every kind that the package reads are refused by name, or read correctly.

Mutations have fixed seeds. They run in a process of its own, so that crashes, hangs and memory growth are detected.
"""

import hashlib
import json
import random
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.memory_directory import find_host_saves
from deepspeed_compress.compression import state
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment
from deepspeed_compress.compression.state_description import Moment, Position
from deepspeed_compress.compression.transforms import Hadamard
from deepspeed_compress.config import parse_section, read_ds_config
from deepspeed_compress.errors import CompressError
from deepspeed_compress.tools.run_directory import read_directory
from tests.support.checkpoints import publish, save, write
from tests.support.forks import run_forks
from tests.support.mutations import damage, damaged_document, damaged_line

pytestmark = pytest.mark.sampled(3)

MEMORY = Path("/dev/shm")
"""Directory in memory, which is faster than a disk."""
MOST_MEMORY = 500 * 2**10
"""Maximum growth of memory in KiB."""
SECONDS = 120
ONE = Position(0, 1, 0, 1)
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """A kind of file. `prepare` writes it to a directory, `corrupt` damages it, and `read` reads it."""

    prepare: Callable[[Path], Path]
    corrupt: Callable[[Path, Mapping[Path, bytes], random.Random], None]
    read: Callable[[Path], object]
    rounds: int = 2000


def corrupt_by(damaged: Callable[..., bytes], *sign: Callable[[Any], Any]) -> Callable[..., None]:
    """Return a function that damages a file by one of `mutations`."""

    def corrupt(file: Path, originals: Mapping[Path, bytes], rng: random.Random) -> None:
        file.write_bytes(damaged(originals[file], rng, *sign))

    return corrupt


# State files: tensors, and the JSON that describes them.


def write_state(directory: Path) -> Path:
    stores: dict[str, Residuals] = {}
    for name, dtype in (("gradients", "fp32"), ("means", "bf16"), ("node", "int8")):
        store = stores[name] = Residuals(dtype, transactional=True)
        for begin in (0, 40):
            segments = (Segment("p", begin, 24, 0, 0), Segment("q", begin, 16, 24, 0))
            store.write(segments, torch.arange(40.0), Hadamard(8, 1))
        store.commit()
    file = state.state_file(directory, 0)
    state.write(state.contents(stores, ONE, Moment(1, 5, 2.0), {"a": {}}, {"policy": {}}), file)
    return file


def resign(file: Path, plain: Any) -> Any:
    """Set the digest to the right value, like `state._digest`."""
    if isinstance(plain, dict):
        fields = json.dumps({**plain, "sha256": ""}, sort_keys=True)
        tensors = hashlib.sha256(file.read_bytes()).hexdigest()
        plain["sha256"] = hashlib.sha256(f"{tensors}{fields}".encode()).hexdigest()
    return plain


def corrupt_state(file: Path, originals: Mapping[Path, bytes], rng: random.Random) -> None:
    text = file.with_suffix(".json")
    if rng.random() < 0.2:
        file.write_bytes(damage(originals[file], rng))
    elif rng.random() < 0.3:
        tensors = load_file(file)
        name = rng.choice(sorted(tensors))
        tensors[name] = rng.choice(
            (tensors[name][: rng.randrange(40)], tensors[name].float(), tensors[name].view(1, -1), torch.zeros(999))
        ).contiguous()
        save_file(tensors, file)
    plain = originals[text]
    text.write_bytes(damaged_document(plain, rng, lambda found: resign(file, found)))
    if file.read_bytes() != originals[file] and rng.random() < 0.7:
        text.write_text(json.dumps(resign(file, json.loads(plain))))


def read_state(file: Path) -> None:
    stores = {
        name: Residuals(dtype, True) for name, dtype in (("gradients", "fp32"), ("means", "fp32"), ("node", "int8"))
    }
    state.restore(stores, state.sources(file.parent, 0, ONE), ONE, 1.0, CPU)
    for store in stores.values():
        store.square_norms()
        for _, values in store.items():
            assert values.dtype == torch.float32


# Lists of files, `latest`, and the file that assigns a directory to an island.


def write_checkpoint(directory: Path) -> Path:
    publish(write(save(directory, 4)))
    return files.list_file(directory / "global_step4", 1)


def sign_list(found: Any) -> Any:
    if isinstance(found, dict):
        found.pop("sha256", None)
        found["sha256"] = files._sha256_of(found)
    return found


def read_list(file: Path) -> None:
    directory = file.parents[1]
    for checkpoint in CheckpointDirectory(directory).checkpoints():
        assert checkpoint.complete or checkpoint.step is None or checkpoint.problem == ""
    list(files.find_problems(file.parent))
    find_host_saves(directory)
    CheckpointDirectory(directory).tags_to_try()
    files.read_list(file)


def write_latest(directory: Path) -> Path:
    write_checkpoint(directory)
    return directory / files.LATEST


def read_latest(file: Path) -> None:
    for tag in CheckpointDirectory(file.parent).tags_to_try():
        list(files.find_problems(file.parent / tag))
    CheckpointDirectory(file.parent).protected()


# Configurations.

CONFIG = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
    "zero_optimization": {"stage": 1},
    "deepspeed_compress": {
        "gradients": {"method": "blockwise", "bits": 4, "overrides": [{"parameters": "norm", "method": "none"}]},
        "weights": {"bits": 4},
        "schedule": {"warmup_steps": 10},
        "checkpointing": {"every": "10 min", "directory": "x", "keep": 2},
    },
}


def write_config(directory: Path) -> Path:
    file = directory / "ds_config.json"
    file.write_text(json.dumps(CONFIG))
    return file


def read_config(file: Path) -> None:
    parse_section(read_ds_config(file))


# Statistics of a run.


def write_lines(directory: Path) -> Path:
    run = {"id": "a", "started": "2026-01-01", "since": 0}
    lines = [{"step": step, "run": run, "bytes_sent": 10, "time_ms": 1.5} for step in range(1, 6)]
    (directory / "compression.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return directory / "compression.jsonl"


def read_run(file: Path) -> None:
    read_directory(file.parent)


KINDS = {
    "state": Kind(write_state, corrupt_state, read_state),
    "list": Kind(write_checkpoint, corrupt_by(damaged_document, sign_list), read_list),
    "latest": Kind(write_latest, corrupt_by(damage), read_latest),
    "configuration": Kind(write_config, corrupt_by(damaged_document), read_config, rounds=500),
    "statistics": Kind(write_lines, corrupt_by(damaged_line), read_run),
}


def attack(rank: int, name: str, directory: Path) -> tuple[list[str], int, int]:
    """Damage and read files in many rounds.

    Return all errors that do not name the file, the number of refusals, and the growth of memory in KiB.
    """
    kind, found = KINDS[name], list[str]()
    file = kind.prepare(directory)
    originals = {one: one.read_bytes() for one in directory.rglob("*") if one.is_file()}
    before, refused = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    for number in range(kind.rounds):
        for one, content in originals.items():
            one.write_bytes(content)
        kind.corrupt(file, originals, random.Random(f"{name} {number}"))
        try:
            kind.read(file)
        except CompressError as error:
            refused += 1
            if not any(word in str(error) for word in (str(directory), file.name, "/deepspeed_compress")):
                found.append(f"round {number} does not name the file: {error!r:.300}")
        except Exception as error:
            found.append(f"round {number}: {error!r:.300}")
    return found, refused, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before


@pytest.mark.parametrize("name", KINDS)
def test_damaged_files_are_refused_by_name_or_read(name: str, tmp_path: Path) -> None:
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else tmp_path) as directory:
        [(found, refused, used)] = run_forks(1, attack, name, Path(directory), timeout=SECONDS)
    assert found == [], f"{len(found)} of {KINDS[name].rounds}"
    assert used < MOST_MEMORY
    assert name == "island" or refused > KINDS[name].rounds // 10
