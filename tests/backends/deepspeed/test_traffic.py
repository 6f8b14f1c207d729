"""Bytes of every kind of traffic, compared with the arguments of torch's communication operators during a step."""

import gc
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.module_inject.layers import TensorParallel_Layer
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_compress.backends.deepspeed.byte_counts import Sizes
from deepspeed_compress.backends.deepspeed.groups import reduction_group
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import Layout, build_parallel, read_model_config
from deepspeed_compress.monitor import KINDS
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, make_engine, run, start, statistics_lines
from tests.support.methods import NONE, OFFLOAD

pytestmark = pytest.mark.sampled(7)

NAMES = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, **NAMES}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    **NAMES,
}
QWEN3 = {**LLAMA, "model_type": "qwen3", "head_dim": 8, "tie_word_embeddings": True}
"""Model whose norms see the heads of a single rank, so that AutoTP sums their gradients."""
MICRO, LENGTH, ACCUMULATION = 2, 8, 2
STAGES = "stages"
"""Stand-in for a group's name: point-to-point messages in the world group, which only pipeline stages send."""
ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
MUON = {"type": "Muon", "params": {"lr": 1e-3}}
CONTROL = 8
"""Number of elements below that of any tensor of the models. Norms, losses, flags and compared tables are smaller."""


@dataclass(frozen=True)
class Case:
    """Layout (pipeline, tensor, data) and settings of a run.

    `direct` uses loss.backward() instead of engine.backward(loss).
    """

    layout: tuple[int, int, int]
    model: Mapping[str, Any]
    stage: int = 1
    section: Mapping[str, Any] | None = None
    recompute: bool = False
    direct: bool = False
    every: int = 1
    optimizer: Mapping[str, Any] = field(default_factory=lambda: ADAM)
    zero: Mapping[str, Any] = field(default_factory=dict)


class Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Recorder of all communication operators of torch: bytes sent by this rank, by (group, elements of the tensor)."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent: Counter[tuple[str, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            operator = func.name().partition("::")[2]
            groups = [arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type())]
            group = dist.ProcessGroup.unbox(groups[0])
            tensor = args[0] if isinstance(args[0], torch.Tensor) else args[0][0]
            tensor = tensor if isinstance(tensor, torch.Tensor) else tensor[0]
            # Leave out what ranks compare, which may use the same group as split layers: bytes, busy times, and under
            # ZeRO 3 the order of layers.
            if tensor.dtype in (torch.int64, torch.float64) and operator in ("allgather_", "allreduce_", "broadcast_"):
                return func(*args, **(kwargs or {}))
            alone = operator == "send" and group is dist.group.WORLD
            self.sent[STAGES if alone else group.group_name, tensor.numel()] += RING[operator](
                tensor.nbytes, group.size()
            )
        return func(*args, **(kwargs or {}))


RING: Mapping[str, Callable[[int, int], int]] = {
    "allreduce_": lambda size, ranks: 2 * (size * (ranks - 1) // ranks),
    "_allgather_base_": lambda size, ranks: size * (ranks - 1) // ranks,
    "allgather_": lambda size, ranks: size * (ranks - 1),
    "broadcast_": lambda size, ranks: size,
    "send": lambda size, ranks: size,
    "recv_": lambda size, ranks: 0,
}
"""Bytes that a rank sends by operator.

The size is that of the first argument: the whole for all_gather, a part for lists.
"""


def by_kind(wire: Wire, engine: Any) -> dict[str, int]:
    """Return the recorded bytes by kind of traffic. All other messages are smaller than any tensor of the model."""
    kinds = kinds_of_groups(engine)
    found = dict.fromkeys(("data", "pipeline", "tied", "tensor"), 0)
    for (group, numel), size in wire.sent.items():
        kind = kinds.get(group)
        assert kind or not size or numel <= CONTROL, (
            f"{size} bytes in tensors of {numel} elements to an unknown group {group}"
        )
        if kind and (numel > CONTROL or kind != "data"):
            found[kind] += size
    return found


def kinds_of_groups(engine: Any) -> dict[str, str]:
    layers = [layer for layer in engine.module.modules() if isinstance(layer, TensorParallel_Layer)]
    kinds = {layer.mp_group.group_name: "tensor" for layer in layers}
    if hasattr(engine, "grid"):
        kinds |= {group.group_name: "tied" for _, group in engine.module.get_tied_weights_and_groups()}
        kinds[STAGES] = "pipeline"
    # ZeRO 3 gathers over the group that its parameters are divided over.
    data = [engine.seq_data_parallel_group, reduction_group(engine)]
    if engine.compression.config.gradients.method != "none":
        data.append(engine.compression.gradients.reducer.link.downward)
    if not hasattr(engine, "grid"):
        kinds[STAGES] = "data"
    return {**kinds, **{group.group_name: "data" for group in data}}


def start_case(case: Case, file: Path, monitor: Path | None = None) -> Any:
    pipeline, tensor, _ = case.layout
    deepspeed.init_distributed("gloo")
    model = build_parallel(file, read_model_config(file), 0, Layout(tensor, pipeline, recompute=case.recompute))
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "steps_per_print": 10**6,
        "optimizer": dict(case.optimizer),
        "zero_optimization": {"stage": case.stage, **case.zero},
        SECTION: {
            "parallelism": {"pipeline": pipeline, "tensor": tensor},
            "monitor": {"path": str(monitor) if monitor else None, "every": case.every},
            **(case.section or {}),
        },
    }
    return make_engine(model, config)


def tokens() -> torch.Tensor:
    return torch.arange(MICRO * LENGTH).reshape(MICRO, LENGTH)


def train(engine: Any, direct: bool) -> None:
    if hasattr(engine, "grid"):
        engine.train_batch(iter([(tokens(), tokens())] * ACCUMULATION))
        return
    engine.train()
    for _ in range(ACCUMULATION):
        loss = engine(input_ids=tokens(), labels=tokens(), use_cache=False).loss
        if direct:
            loss.backward()
        else:
            engine.backward(loss)
        engine.step()


def evaluate(engine: Any) -> None:
    if hasattr(engine, "grid"):
        engine.eval_batch(iter([(tokens(), tokens())] * ACCUMULATION))
        return
    engine.eval()
    with torch.no_grad():
        engine(input_ids=tokens(), labels=tokens(), use_cache=False)


def surveyed(engine: Any) -> list[Sizes]:
    """Return a list that receives this rank's counts of each measured step."""
    counted: list[Sizes] = []
    reporter = engine.compression._reporter
    survey = reporter._byte_report

    def noted(sizes: Sizes) -> Any:
        counted.append(dict(sizes))
        return survey(sizes)

    reporter._byte_report = noted
    return counted


def watch(rank: int, case: Case, file: Path, monitor: Path) -> list[tuple[dict[str, int], Sizes]]:
    """Return recorded and counted bytes of three steps, with an evaluation before each step."""
    engine = start_case(case, file, monitor)
    counted, seen = surveyed(engine), []
    for _ in range(3):
        evaluate(engine)
        with Wire() as wire:
            train(engine, case.direct)
        seen.append(by_kind(wire, engine))
    engine.destroy()
    return list(zip(seen, counted, strict=True))


def written(directory: Path, model: Mapping[str, Any]) -> Path:
    """Return a file with the description of a model."""
    file = directory / "model.json"
    file.write_text(json.dumps(model))
    return file


def run_case(tmp_path: Path, case: Case) -> list[list[tuple[dict[str, int], Sizes]]]:
    file = written(tmp_path, case.model)
    pipeline, tensor, data = case.layout
    return run_forks(pipeline * tensor * data, watch, case, file, tmp_path, shared_memory=tensor > 1)


COMPRESSED = {"gradients": {"bits": 4, "block_size": 32, "min_numel": 64}}
ACTIVATIONS = {"activations": {"tensor": {"bits": 8}, "pipeline": {"bits": 4}}}
SUMS = {"activations": {"tensor": {}}}
CASES = {
    "pipeline": Case((2, 1, 2), GPT2, section=COMPRESSED),
    "four stages": Case((4, 1, 1), {**LLAMA, "num_hidden_layers": 4}, section=NONE),
    "tensor, ZeRO 2": Case((1, 2, 2), LLAMA, stage=2, section=COMPRESSED | {"weights": {"min_numel": 64}}, direct=True),
    "tensor, ZeRO 0": Case((1, 2, 1), QWEN3, stage=0, section=NONE),
    "all": Case((2, 2, 2), GPT2, section=COMPRESSED),
    "all, recomputed": Case((2, 2, 1), QWEN3, section=NONE, recompute=True),
    "all, compressed activations": Case((2, 2, 1), QWEN3, section=NONE | ACTIVATIONS, recompute=True),
    "all, compressed": Case((2, 2, 2), GPT2, section=COMPRESSED | ACTIVATIONS),
    "tensor, merged sums": Case((1, 2, 2), LLAMA, stage=2, section=COMPRESSED | SUMS),
    "weights alone": Case((1, 1, 2), GPT2, section=NONE | {"weights": {"min_numel": 64}}),
    "Muon, ZeRO 1": Case((1, 1, 2), GPT2, section=COMPRESSED | {"weights": {"min_numel": 64}}, optimizer=MUON),
    "Muon, ZeRO 2, offload": Case((1, 1, 2), GPT2, 2, COMPRESSED, optimizer=MUON, zero=OFFLOAD),
    "Muon, ZeRO 3": Case((1, 1, 2), GPT2, 3, COMPRESSED, optimizer=MUON, zero={"reduce_scatter": False}),
    "Muon, ZeRO 3, uncompressed": Case((1, 1, 2), GPT2, 3, NONE, optimizer=MUON, zero={"reduce_scatter": False}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_counted_bytes_of_every_kind_match_the_interface(tmp_path: Path, case: Case) -> None:
    results = run_case(tmp_path, case)
    for rank, steps in enumerate(results):
        for step, (seen, counted) in enumerate(steps):
            if case.stage == 3 and step == 0:
                # The first evaluation gathers weights, which are counted but were not watched.
                continue
            where = f"rank {rank}, step {step}"
            assert counted["bytes_sent"] + counted["bytes_weights"] == seen["data"], where
            for kind in ("pipeline", "tied", "tensor"):
                assert counted[f"bytes_{kind}"] == seen[kind], f"{where}: {kind}"
    for step, line in enumerate(statistics_lines(tmp_path)):
        tables = [steps[step][1] for steps in results]
        totals = [sum(table[kind] for kind in KINDS) for table in tables]
        # If layers are not divided, ranks are not asked.
        assert line["rank"] == (totals.index(max(totals)) if case.layout[:2] != (1, 1) else 0)
        assert {name: line[name] for name in tables[0]} == tables[line["rank"]]


def interleaved(rank: int, file: Path, monitor: Path) -> tuple[list[int], list[int]]:
    """Return the bytes of two engines on the same tensor-parallel ranks, one after the other and interleaved."""
    engines = [start_case(Case((1, 2, 1), LLAMA, section=NONE), file, monitor) for _ in range(2)]
    engines[1].module.model.layers = engines[1].module.model.layers[:1]
    for engine in engines:  # DeepSpeed makes additional checks in the first step.
        train(engine, direct=False)
    tables = [surveyed(engine) for engine in engines]
    for engine in engines:
        train(engine, direct=False)
    for _ in range(ACCUMULATION):
        losses = [engine(input_ids=tokens(), labels=tokens(), use_cache=False).loss for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in engines:
            engine.step()
    alone, mixed = zip(*([sizes["bytes_tensor"] for sizes in table] for table in tables), strict=True)
    return list(alone), list(mixed)


def test_two_engines_in_one_process_are_counted_separately(tmp_path: Path) -> None:
    file = written(tmp_path, LLAMA)
    for alone, mixed in run_forks(2, interleaved, file, tmp_path):
        assert mixed == alone
        assert alone[0] > alone[1] > 0


METHODS = {"all_reduce", "inference_all_reduce", "all_gather_into_tensor", "send", "isend", "_compress_listener"}


def own_methods() -> bool:
    """Return True if the backend is DeepSpeed's own."""
    return not vars(comm.cdb).keys() & METHODS


def undone(rank: int, file: Path) -> list[bool]:
    """Return whether the backend is DeepSpeed's own: before, with two engines, with one, and with none."""
    # Hooks in autograd keep DeepSpeed's ZeRO optimizers and parameters alive until their engine is destroyed.
    case = Case((2, 1, 1), GPT2, stage=0, section=NONE)
    deepspeed.init_distributed("gloo")
    found = [own_methods()]
    engine, destroyed = (start_case(case, file) for _ in range(2))
    found.append(own_methods())
    hooks = len(destroyed.module._forward_pre_hooks)
    destroyed.destroy()
    assert len(destroyed.module._forward_pre_hooks) == hooks - 1
    found.append(own_methods())
    del engine
    gc.collect()
    return [*found, own_methods()]


def test_the_backend_is_given_back(tmp_path: Path) -> None:
    """An engine leaves when it is destroyed or garbage-collected."""
    file = written(tmp_path, GPT2)
    assert run_forks(2, undone, file) == [[True, False, False, True]] * 2


def untouched(rank: int, file: Path) -> bool:
    start_case(Case((1, 1, 2), GPT2, section=COMPRESSED), file)
    return own_methods()


def test_nothing_is_touched_without_such_traffic(tmp_path: Path) -> None:
    file = written(tmp_path, GPT2)
    assert run_forks(2, untouched, file) == [True, True]


def seldom(rank: int, file: Path, monitor: Path) -> int:
    """Return the number of comparisons in four steps when every second one is measured."""
    engine = start_case(Case((2, 1, 1), GPT2, section=NONE, every=2), file, monitor)
    surveys = surveyed(engine)
    for _ in range(4):
        train(engine, direct=False)
    return len(surveys)


def test_ranks_compare_only_in_measured_steps(tmp_path: Path) -> None:
    file = written(tmp_path, GPT2)
    assert run_forks(2, seldom, file, tmp_path) == [2, 2]
    lines = statistics_lines(tmp_path)
    assert [line["step"] for line in lines] == [2, 4]
    assert lines[0]["bytes_pipeline"] == lines[1]["bytes_pipeline"] == ACCUMULATION * MICRO * LENGTH * 32 * 4


def compiled(rank: int, file: Path, monitor: Path) -> None:
    engine = start_case(Case((1, 2, 1), LLAMA, section=NONE), file, monitor)
    engine.compile(backend="eager")
    train(engine, direct=False)


@pytest.mark.slow
def test_the_bytes_of_a_compiled_graph_are_unknown(tmp_path: Path) -> None:
    file = written(tmp_path, LLAMA)
    run_forks(2, compiled, file, tmp_path, compiled=True)
    [line] = statistics_lines(tmp_path)
    assert line["bytes_tensor"] is None


class Gathers(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes that this rank sends in all-gathers of weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::_allgather_base_" and args[0].is_floating_point():
            group = dist.ProcessGroup.unbox(
                next(arg for arg in args if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()))
            )
            self.sent += RING["_allgather_base_"](args[0].nbytes, group.size())
        return func(*args, **(kwargs or {}))


def watch_second_copies(rank: int, job: Job) -> list[tuple[int, int]]:
    """Return, for each step of rank 0, the bytes of weights on the wire and in the statistics."""
    engine = start(job)
    counted: list[int] = []
    engine.compression.subscribe(lambda step: counted.append(step.bytes_weights))
    sent = []
    for batch in data(rank, job):
        with Gathers() as gathers:
            run(engine, [batch])
        sent.append(gathers.sent)
    return list(zip(sent, counted, strict=rank == 0))


@pytest.mark.parametrize("partition", [1, 2])
@pytest.mark.parametrize("extra", [{}, {"stage3_allgather_sequential": True}], ids=["coalesced", "sequential"])
def test_gathers_from_second_copies_are_counted(extra: dict[str, Any], partition: int) -> None:
    """With hpZ, two of four ranks have a copy of the weights after the first gather of a step."""
    section = {"gradients": {"bits": 4}, "monitor": {"every": 1}}
    job = Job(3, section, {"zero_hpz_partition_size": partition, **extra})
    seen = run_forks(4, watch_second_copies, job)[0]
    assert len(seen) == job.steps
    assert all(sent == counted > 0 for sent, counted in seen)
