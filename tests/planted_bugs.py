"""Plant known bugs one at a time, and check that the default tests find them.

    python tests/planted_bugs.py                       all bugs
    python tests/planted_bugs.py "swapped owner"       the named bugs

A bug replaces one expression in a function of the package, wherever that is defined. It is planted in a temporary copy
of the working tree, never in the tree itself. The tests that should find it run first, up to the first failure, and
then all default tests. Without a bug, the tests that should find one must pass. The output names the test that found
each bug. The exit status is 1 if a bug was not found.
"""

import argparse
import ast
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = frozenset(
    {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "build", "data", "dist", "runs"}
)
"""Directories of the working tree that tests do not read."""

PARALLEL = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")


class PlantError(Exception):
    """Function or expression of a bug that does not occur exactly once."""


@dataclass(frozen=True)
class Bug:
    """Change of an expression in a function.

    Attributes:
        function: end of its dotted name, such as "Residuals.commit", or the path of a C++ file.
        old: expression that occurs once in the function, or text that occurs once in the C++ file.
        new: what replaces it.
        tests: files of tests that should find the bug, relative to tests/.
    """

    function: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, package: Path) -> tuple[Path, str]:
        """Return the file of `package` that has the function, and its text with the bug."""
        if self.function.endswith(".h"):
            text = (package / self.function).read_text(encoding="utf-8")
            self._check(text.count(self.old), self.old)
            return package / self.function, text.replace(self.old, self.new)
        places = [(file, path) for file, path, name in functions(package) if name.endswith(f".{self.function}")]
        self._check(len(places), "the function")
        [(file, name)] = places
        tree = ast.parse(file.read_text(encoding="utf-8"))
        replacement = _Replacement(self.old, self.new)
        replacement.visit(dict(definitions(tree))[name])
        self._check(replacement.count, self.old)
        return file, ast.unparse(tree)

    def _check(self, count: int, sought: str) -> None:
        if count != 1:
            raise PlantError(f"{self.function}: {sought} occurs {count} times, not once")


class _Replacement(ast.NodeTransformer):
    """Replaces the expression `old` by `new`, and counts how often."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = ast.dump(ast.parse(old, mode="eval").body), ast.parse(new, mode="eval").body
        self.count = 0

    def visit(self, node: ast.AST) -> ast.AST:
        if ast.dump(node) == self._old:
            self.count += 1
            return self._new
        visited: ast.AST = self.generic_visit(node)
        return visited


@cache
def functions(package: Path) -> Sequence[tuple[Path, str, str]]:
    """Return the file of each function, and its dotted names in the file and in the package, which begin with a dot."""
    return [
        (file, path, ".".join(["", *file.relative_to(package).with_suffix("").parts]) + path)
        for file in sorted(package.rglob("*.py"))
        for path, _ in definitions(ast.parse(file.read_text(encoding="utf-8")))
    ]


def parsed(table: str) -> Iterator[tuple[str, Bug]]:
    """Yield the name and the bug of each entry of a table."""
    for entry in re.split(r"\n(?=\S)", table.strip()):
        name, *change, tests = (line.strip() for line in entry.splitlines())
        function, _, expressions = " ".join(change).partition(": ")
        old, _, new = expressions.partition(" => ")
        yield name, Bug(function, old, new, tuple(tests.split()))


def definitions(node: ast.AST, path: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the functions in `node`, with their dotted names, which begin with a dot."""
    for child in ast.iter_child_nodes(node):
        inner = f"{path}.{child.name}" if isinstance(child, ast.FunctionDef | ast.ClassDef) else path
        if isinstance(child, ast.FunctionDef):
            yield inner, child
        yield from definitions(child, inner)


TABLE = """
wrong sign of error feedback
    ErrorFeedback.encode: codec.add_coefficients([out], total, -1.0) => codec.add_coefficients([out], total, 1.0)
    compression/test_feedback.py
coefficients are taken for elements
    Residuals.add_to: held.basis == basis.of(segments) => held.basis == basis.of(segments) or basis == ELEMENTS
    compression/test_bases.py
what moves to another layout stays coefficients
    Residuals._elements: held.basis.inverse => (lambda values, segments: values)
    compression/test_bases.py
a mean is transformed once more before it is sent
    Packer.pack_owned: in_basis => False
    collectives/test_reducers.py
what was sent stays in the memory of one pass
    TopK.compress_with_feedback: residual.after.index_copy_(0, selection.positions(columns), left) => None
    compression/test_bases.py
a skipped step changes residuals
    Residuals.rollback: self._slots.values() => self.commit() or self._slots.values()
    compression/test_feedback.py backends/deepspeed/test_overflow.py
an applied step leaves residuals as they were
    Residuals.commit: (slot.running, slot.applied) => (slot.applied, slot.running.clone())
    compression/test_feedback.py
a large gradient is freed while it is reduced
    _Buckets._reduce: self._keep(tensor) => None
    backends/deepspeed/test_streams.py
a host reads a message
    RandomK._positions: seed => seed.new_tensor(int(seed))
    compression/test_host_waits.py
residuals keep the old loss scale
    Residuals.scale: factor => 1.0
    compression/test_feedback.py backends/deepspeed/test_overflow.py
off by one where bits are packed
    reference_bits._overlaps: ((value + 1) * width - 1) // 8 + 1 => (value + 1) * width // 8
    compression/test_kernels.py compression/test_cpu_kernels.py
off by one where codes are unpacked in C++
    compression/kernels/packing.h: n - done, BITS, codes => n - done - 1, BITS, codes
    compression/test_cpu_kernels.py
the scale of a sum is forgotten
    reference.dequantize_rows_add: scales * scale => scales
    compression/test_kernels.py compression/test_contract.py
infinity is sent as a finite number
    arguments.fitted: torch.where(scales.isfinite(), rounded, scales.to(torch.float32)) => rounded
    compression/test_contract.py compression/test_quantizers.py
a NaN that is not drawn is not sent
    RandomK.compress: torch.linalg.vector_norm(x, math.inf) => 1.0
    compression/test_contract.py compression/test_sparsifiers.py
ranks draw positions that differ
    base.message_key: shared >> 32 << 32 => random_key(*message, sender) >> 32 << 32
    compression/test_sparsifiers.py
momentum of sent elements stays
    MomentumCorrection.encode: velocity.masked_fill_(sent != 0, 0.0) => velocity
    compression/test_feedback.py
momentum is not saved
    state.contents: store.payloads() => store.payloads() if name != "velocity" else ()
    checkpointing/deepspeed/test_checkpoint.py
the state of a rank that is no more is lost
    state._takes: saved.index % position.size => saved.index
    checkpointing/deepspeed/test_checkpoint.py
what DDP drops of unused parameters is lost
    Unused._remember: kept.add_(surplus, alpha=self._group.size()) => kept
    backends/contract/test_contract.py
parts of FSDP2 in the wrong order
    fsdp2.gradients._segments: owner * share => (ranks - 1 - owner) * share
    backends/test_fsdp2_layout.py
copies of a model add up
    fsdp2.gradients._Reduction._scale: 1.0 / self._ranks.size => 1.0 / shards
    backends/contract/test_contract.py
FSDP2 evaluates with rounded weights
    fsdp2.weights._Gather.forget: self.unit.module.reshard() => None
    backends/test_fsdp2.py
weights divided again by FSDP2 are rounded twice
    Gathers.rounds_over: group.group_name == self._shard.group_name => True
    backends/test_fsdp2.py
gradients that are cleared in vain leave a trace
    TorchSteps.forget: self.reduced and not self._asked => self._asked
    backends/contract/test_contract.py
Megatron's shares are cut without padding
    buckets.flat_sizes: flat.numel() - end => 0
    backends/contract/test_contract.py
Megatron's messages are numbered as they leave
    megatron.gradients.Gradients._sent: number => None
    backends/contract/test_contract.py
copies on tensor-parallel ranks are compressed
    Share._copied: self._tensor_size > 1 => self._tensor_size < 0
    backends/test_megatron_layouts.py
differences to weights that nobody else has
    megatron.weights.Weights._put_back: flat.own.copy_(own) => own.copy_(flat.own)
    backends/contract/test_contract.py
swapped owner
    buckets.even_partition: Segment(name, begin, length, offset, owner)
        => Segment(name, begin, length, offset, world_size - 1 - owner)
    collectives/test_buckets.py
weights arrive one round short
    DifferenceGather.gather: self._layouts => self._layouts[: max(1, len(self._layouts) - 1)]
    collectives/test_gather.py
bytes are counted twice
    Meter.count: getattr(self, kind) + size => getattr(self, kind) + 2 * size
    collectives/test_reducers.py
warm-up takes a step more
    SettingsSchedule.at: step < schedule.warmup_steps => step <= schedule.warmup_steps
    policy/test_policy.py
what is spread arrives a step late
    SpreadSum.deliver: step + 1 => step
    collectives/test_reducers.py
means wait while PowerSGD is in force
    ResidualState.hand_over_means: gradients.add([(piece, values / scale)], values.device) => None
    backends/deepspeed/test_switching.py
factors are not in a resumed run
    state_files._restore: found[0][1].storage => {}
    backends/deepspeed/test_switching.py
buckets of PowerSGD are a plan for others
    EarlyReductions.reduce: isinstance(self._session.gradients.reducer, PayloadReducer) => True
    backends/deepspeed/test_switching.py
coarse weights cost no steps
    CandidateSelector._weights_penalty: weights_penalty(self.weights[choice.weights], step) => 1.0
    policy/test_candidates.py
early reductions are not checked
    EarlyReductions._is_right: [torch.full((), right, device=source.device), *equal] => [torch.full((), True)]
    backends/deepspeed/test_early.py
a void round of islands leaves its residuals
    ElasticExchange._take_part: store.rollback() => store.commit()
    local_sgd/test_elastic.py
a round of islands is committed before all have voted
    Rounds.decide: all(running.votes.values()) => any(running.votes.values())
    local_sgd/coordinator/test_coordinator.py
a restarted coordinator waits for no island
    KnownIslands.__init__: set(saved.members) => set()
    local_sgd/coordinator/test_coordinator.py
an island that diverged sends its residuals
    exchange.Peers.start: reducer.without_feedback() => reducer
    local_sgd/deepspeed/test_islands.py local_sgd/test_elastic.py
ranks that share layers each exchange a copy
    SharedLayers.hold_copies: self.tensor > 1 => self.tensor > 2
    local_sgd/deepspeed/test_islands_tensor.py
stages each exchange a copy of tied weights
    SharedLayers.hold_copies: self.stages > 1 => self.stages > 2
    local_sgd/deepspeed/test_elastic_pipeline.py
islands that share layers reduce over the job
    division._divided_groups: unit.data => groups._DATA_PARALLEL_GROUP
    local_sgd/deepspeed/test_islands_tensor.py
a later engine gets the ranks of an island
    division._divided_groups: replaced(groups, **division) => vars(groups).update(division) or replaced(groups)
    backends/deepspeed/test_other_engines.py
an island is judged by the losses of all
    session.Session.__init__: Losses(device, engine.deciding) => Losses(device)
    local_sgd/deepspeed/test_islands_guard.py
an exchange of islands counts as waiting for gradients
    session.Session._adapt: self._exchange_ms => 0.0
    local_sgd/deepspeed/test_islands_adaptive.py
every tensor-parallel rank adds the bias
    deepspeed.activations.tensor.RowHooks.__init__: {"mp_group": None, "bias": None} => {"mp_group": None}
    backends/deepspeed/activations/test_hooks.py
a recomputed layer joins an earlier sum
    _Reading.is_for: reader not in self.readers => True
    backends/deepspeed/activations/test_hooks.py
an evaluation is compressed
    deepspeed.activations.tensor.RowHooks.takes: self._training.is_training => True
    backends/deepspeed/activations/test_hooks.py
an evaluation exchanges compressed heads
    sequence._Passes.begin_forward: torch.is_grad_enabled() => self.own
    backends/deepspeed/activations/test_sequence.py
masks between stages are compressed
    pipeline._FirstMessage.is_this: True => False
    backends/deepspeed/activations/test_pipeline.py
gradients of tokens go the way of the tokens
    Route.reversed: Route(self.group, self.received, self.sent) => Route(self.group, self.sent, self.received)
    backends/activations/test_tokens.py
tokens of an evaluation are compressed
    _ExpertHooks.replaced: self._training.is_training => True
    backends/deepspeed/activations/test_experts.py
islands read data in one order
    IslandSampler.__iter__: SEEDS * self._island.number => 0
    local_sgd/deepspeed/test_elastic.py
"""
"""Name of each bug; then its function, and the expression and its replacement; then the tests that should find it."""
BUGS: Mapping[str, Bug] = dict(parsed(TABLE))


def copy_tree(target: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__")
    for source in (path for path in ROOT.iterdir() if path.name not in LEFT_OUT):
        if source.is_dir():
            shutil.copytree(source, target / source.name, ignore=ignored)
        else:
            shutil.copy2(source, target)


def first_failure(tree: Path, arguments: Sequence[str]) -> str:
    """Return the id of the first failing test in `tree`, or "" if all pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow", *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"pytest ended with {done.returncode}"


def found_by(tree: Path, bug: Bug) -> str:
    """Return the test that finds `bug`, or "" if none does."""
    file, planted = bug.planted(tree / "deepspeed_compress")
    sound = file.read_text(encoding="utf-8")
    file.write_text(planted, encoding="utf-8")
    try:
        known = [f"tests/{test}" for test in bug.tests]
        return first_failure(tree, known) or first_failure(tree, PARALLEL)
    finally:
        file.write_text(sound, encoding="utf-8")


def judge(names: Sequence[str]) -> dict[str, str]:
    """Return the test that finds each bug, or "", by bug."""
    outcomes = {}
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory)
        copy_tree(tree)
        known = sorted({f"tests/{test}" for name in names for test in BUGS[name].tests})
        if failed := first_failure(tree, [*PARALLEL, *known]):
            raise SystemExit(f"without any bug {failed} fails")
        for name in names:
            outcomes[name] = found_by(tree, BUGS[name])
            print(f"{name:48} {outcomes[name] or 'NOT FOUND'}", flush=True)
    return outcomes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a bug; all by default")
    options = parser.parse_args()
    if unknown := set(options.names) - BUGS.keys():
        parser.error(f"no such bug: {', '.join(sorted(unknown))}; bugs: {', '.join(BUGS)}")
    outcomes = judge(options.names or list(BUGS))
    print(f"{sum(map(bool, outcomes.values()))} of {len(outcomes)} bugs found")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
