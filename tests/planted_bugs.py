"""Plant known bugs one at a time, and check that the tests of CI find them.

    python tests/planted_bugs.py                       all bugs
    python tests/planted_bugs.py "swapped owner"       the named bugs

A bug replaces one expression in a function of the package, wherever that is defined. It is planted in a temporary copy
of the working tree, never in the tree itself. The tests that should find it run first, up to the first failure, and
then all tests of CI. Without a bug, the tests that should find one must pass. The output names the test that found
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
        first, *change = (line.strip() for line in entry.splitlines())
        name, _, tests = first.partition(": ")
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
wrong sign of error feedback: compression/test_feedback.py
    ErrorFeedback.encode: codec.add_coefficients([out], total, -1.0) => codec.add_coefficients([out], total, 1.0)
coefficients are taken for elements: compression/test_bases.py
    Residuals.add_to: held.basis == basis.of(segments) => held.basis == basis.of(segments) or basis == ELEMENTS
what moves to another layout stays coefficients: compression/test_bases.py
    Residuals._elements: held.basis.inverse => (lambda values, segments: values)
a mean is transformed once more before it is sent: collectives/test_reducers.py
    Packer.pack_owned: in_basis => False
what was sent stays in the memory of one pass: compression/test_bases.py
    TopK.compress_with_feedback: residual.after.index_copy_(0, selection.positions(columns), left) => None
a skipped step changes residuals: compression/test_feedback.py backends/deepspeed/test_overflow.py
    Residuals.rollback: self._slots.values() => self.commit() or self._slots.values()
an applied step leaves residuals as they were: compression/test_feedback.py
    Residuals.commit: (slot.running, slot.applied) => (slot.applied, slot.running.clone())
a large gradient is freed while it is reduced: backends/deepspeed/test_streams.py
    zero_12._Buckets._reduce: self._keep(tensor) => None
a host reads a message: compression/test_host_waits.py
    RandomK._positions: seed => seed.new_tensor(int(seed))
residuals keep the old loss scale: compression/test_feedback.py backends/contract/test_contract.py
    Residuals.scale: factor => 1.0
off by one where bits are packed: compression/test_kernels.py compression/test_cpu_kernels.py
    reference_bits._overlaps: ((value + 1) * width - 1) // 8 + 1 => (value + 1) * width // 8
off by one where codes are unpacked in C++: compression/test_cpu_kernels.py
    compression/kernels/packing.h: n - done, BITS, codes => n - done - 1, BITS, codes
the scale of a sum is forgotten: compression/test_kernels.py compression/test_contract.py
    reference.dequantize_rows_add: scales * scale => scales
infinity is sent as a finite number: compression/test_contract.py compression/test_quantizers.py
    arguments.fitted: torch.where(scales.isfinite(), rounded, scales.to(torch.float32)) => rounded
a NaN that is not drawn is not sent: compression/test_contract.py compression/test_sparsifiers.py
    RandomK.compress: torch.linalg.vector_norm(x, math.inf) => 1.0
ranks draw positions that differ: compression/test_sparsifiers.py
    base.message_key: shared >> 32 << 32 => random_key(*message, sender) >> 32 << 32
momentum of sent elements stays: compression/test_feedback.py
    MomentumCorrection.encode: velocity.masked_fill_(sent != 0, 0.0) => velocity
momentum is not saved: checkpointing/deepspeed/test_checkpoint.py
    state.contents: store.payloads() => store.payloads() if name != "velocity" else ()
the state of a rank that is no more is lost: checkpointing/deepspeed/test_checkpoint.py
    state._takes: saved.index % position.size => saved.index
what DDP drops of unused parameters is lost: backends/contract/test_contract.py
    Unused._undo: kept.add_(surplus, alpha=self._group.size()) => kept
parts of FSDP2 in the wrong order: backends/test_fsdp2_layout.py
    fsdp2.gradients._segments: owner * share => (ranks - 1 - owner) * share
copies of a model add up: backends/contract/test_contract.py
    fsdp2.gradients._Reduction._scale: 1.0 / self._ranks.size => 1.0 / shards
FSDP2 evaluates with rounded weights: backends/test_fsdp2.py
    fsdp2.weights._Gather.forget: self.unit.module.reshard() => None
weights divided again by FSDP2 are rounded twice: backends/test_fsdp2.py
    Gathers.rounds_over: group.group_name == self.shard.group_name => True
gradients that are cleared in vain leave a trace: backends/contract/test_contract.py
    TorchSteps.forget: self.reduced and not self._asked => self._asked
Megatron's shares are cut without padding: backends/contract/test_contract.py
    buckets.flat_sizes: flat.numel() - end => 0
Megatron's messages are numbered as they leave: backends/contract/test_contract.py
    megatron.gradients.Gradients._sent: number => None
copies on tensor-parallel ranks are compressed: backends/test_megatron_layouts.py
    Share._copied: self._tensor_size > 1 => self._tensor_size < 0
differences to weights that nobody else has: backends/contract/test_contract.py
    megatron.weights.Weights._put_back: flat.own.copy_(own) => own.copy_(flat.own)
swapped owner: collectives/test_buckets.py
    buckets.even_partition: Segment(name, begin, length, offset, owner)
        => Segment(name, begin, length, offset, world_size - 1 - owner)
weights arrive one round short: collectives/test_gather.py
    DifferenceGather.gather: self._layouts => self._layouts[: max(1, len(self._layouts) - 1)]
bytes are counted twice: collectives/test_reducers.py
    Meter.count: getattr(self, kind) + size => getattr(self, kind) + 2 * size
warm-up takes a step more: policy/test_policy.py
    SettingsSchedule.at: step < schedule.warmup_steps => step <= schedule.warmup_steps
what is spread arrives a step late: collectives/test_reducers.py
    SpreadSum.deliver: step + 1 => step
means wait while PowerSGD is in force: backends/deepspeed/test_switching.py
    ResidualState.hand_over_means: gradients.add([(piece, values / scale)], values.device) => None
factors are not in a resumed run: backends/deepspeed/test_switching.py
    state_files._restore: found[0][1].storage => {}
buckets of PowerSGD are a plan for others: backends/deepspeed/test_switching.py
    EarlyReductions.reduce: isinstance(self._session.gradients.reducer, PayloadReducer) => True
coarse weights cost no steps: policy/test_candidates.py
    CandidateSelector._weights_penalty: weights_penalty(self.weights[choice.weights], step) => 1.0
early reductions are not checked: backends/deepspeed/test_early.py
    EarlyReductions._is_right: [torch.full((), right, device=source.device), *equal] => [torch.full((), True)]
a void round of islands leaves its residuals: local_sgd/test_elastic.py
    ElasticExchange._take_part: store.rollback() => store.commit()
a round of islands is committed before all have voted: local_sgd/coordinator/test_coordinator.py
    Rounds.decide: all(votes) => any(votes)
a restarted coordinator waits for no island: local_sgd/coordinator/test_coordinator.py
    KnownIslands.__init__: set(saved.members) => set()
an island that diverged sends its residuals: local_sgd/deepspeed/test_islands.py local_sgd/test_elastic.py
    exchange.Peers.start: reducer.without_feedback() => reducer
ranks that share layers each exchange a copy: local_sgd/deepspeed/test_islands_tensor.py
    SharedLayers.hold_copies: self.tensor > 1 => self.tensor > 2
stages each exchange a copy of tied weights: local_sgd/deepspeed/test_elastic_pipeline.py
    SharedLayers.hold_copies: self.stages > 1 => self.stages > 2
islands that share layers reduce over the job: local_sgd/deepspeed/test_islands_tensor.py
    division._divided_groups: unit.data => groups._DATA_PARALLEL_GROUP
a later engine gets the ranks of an island: backends/deepspeed/test_other_engines.py
    division._divided_groups: replaced(groups, **division) => vars(groups).update(division) or replaced(groups)
an island is judged by the losses of all: local_sgd/deepspeed/test_islands_guard.py
    session.Session.__init__: Losses(device, engine.deciding) => Losses(device)
an exchange of islands counts as waiting for gradients: local_sgd/deepspeed/test_islands_adaptive.py
    session.Session._adapt: self._exchange_ms => 0.0
every tensor-parallel rank adds the bias: backends/deepspeed/activations/test_hooks.py
    deepspeed.activations.tensor.RowHooks.__init__: {"mp_group": None, "bias": None} => {"mp_group": None}
a recomputed layer joins an earlier sum: backends/deepspeed/activations/test_hooks.py
    _Reading.is_for: reader not in self.readers => True
an evaluation is compressed: backends/deepspeed/activations/test_hooks.py
    deepspeed.activations.tensor.RowHooks.takes: self._training.is_training => True
an evaluation exchanges compressed heads: backends/deepspeed/activations/test_sequence.py
    sequence._Passes.begin_forward: torch.is_grad_enabled() => self.own
masks between stages are compressed: backends/deepspeed/activations/test_pipeline.py
    pipeline._FirstMessage.is_this: True => False
gradients of tokens go the way of the tokens: backends/activations/test_tokens.py
    Route.reversed: Route(self.group, self.received, self.sent) => Route(self.group, self.sent, self.received)
tokens of an evaluation are compressed: backends/deepspeed/activations/test_experts.py
    _ExpertHooks.replaced: self._training.is_training => True
islands read data in one order: local_sgd/deepspeed/test_elastic.py
    IslandSampler.__iter__: SEEDS * self._island.number => 0
"""
"""Name of each bug, and the tests that should find it; then its function, and the expression and its replacement."""
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
