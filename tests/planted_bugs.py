"""Plant known bugs one at a time, and check that the default tests find them.

    python tests/planted_bugs.py                       all bugs
    python tests/planted_bugs.py "swapped owner"       the named bugs
    python tests/planted_bugs.py --list                names of all bugs

A bug is a change of a text that occurs exactly once in a file of the package. It is planted in a temporary copy of the
working tree, never in the tree itself. The tests that should find it run first, up to the first failure, and then all
default tests. Without a bug, the tests that should find one must pass. The output names the test that found each bug.
The exit status is 1 if a bug was not found.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
LEFT_OUT = frozenset(
    {".git", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".venv", "build", "data", "dist", "runs"}
)
"""Directories of the working tree that tests do not read."""

PARALLEL = ("-n", "auto", "--maxprocesses", "8", "--dist", "worksteal")


class PlantError(Exception):
    """Text of a bug that does not occur exactly once in its file."""


@dataclass(frozen=True)
class Bug:
    """Change of `old` to `new` in `file` of the package, and the tests that should find it, relative to tests/."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    def planted(self, package: Path) -> str:
        """Return the text of the file in `package` with the bug."""
        text = (package / self.file).read_text(encoding="utf-8")
        if (found := text.count(self.old)) != 1:
            raise PlantError(f"{self.file} has {found} times, not once: {self.old}")
        return text.replace(self.old, self.new)


BUGS: Mapping[str, Bug] = {
    "wrong sign of error feedback": Bug(
        "compression/feedback.py",
        "        total = x.clone()\n        self.residuals.add_to(total, segments, self.decay, basis)",
        "        total = x.clone()\n        self.residuals.add_to(total, segments, -self.decay, basis)",
        ("compression/test_feedback.py",),
    ),
    "coefficients are taken for elements": Bug(
        "compression/residuals.py",
        "        if held.basis == basis.of(segments):\n",
        "        if held.basis == basis.of(segments) or basis == ELEMENTS:\n",
        ("compression/test_bases.py",),
    ),
    "what moves to another layout stays coefficients": Bug(
        "compression/residuals.py",
        "held.basis.inverse(self._decoded(payload, sum(segment.numel for segment in segments)), segments)",
        "self._decoded(payload, sum(segment.numel for segment in segments))",
        ("compression/test_bases.py",),
    ),
    "a mean is transformed once more before it is sent": Bug(
        "collectives/packing.py",
        "x = x if in_basis else",
        "x =",
        ("collectives/test_reducers.py",),
    ),
    "what was sent stays in the memory of one pass": Bug(
        "compression/compressors/topk.py",
        "        residual.after.index_copy_(0, selection.positions(columns), left)\n",
        "",
        ("compression/test_bases.py",),
    ),
    "a skipped step changes residuals": Bug(
        "compression/residuals.py",
        '        """Discard the values of the running step, because it was skipped."""\n',
        '        """Discard the values of the running step, because it was skipped."""\n        self.commit()\n',
        ("compression/test_feedback.py", "backends/deepspeed/test_overflow.py"),
    ),
    "an applied step leaves residuals as they were": Bug(
        "compression/residuals.py",
        "                slot.applied, slot.running = slot.running, slot.applied\n",
        "                slot.running = slot.running.clone()\n",
        ("compression/test_feedback.py",),
    ),
    "a large gradient is freed while it is reduced": Bug(
        "backends/deepspeed/gradients/zero_12.py",
        "        self._keep(tensor)\n",
        "",
        ("backends/deepspeed/test_streams.py",),
    ),
    "a host reads a message": Bug(
        "compression/compressors/randomk.py",
        "& 0xFFFFFFFF\n",
        "& 0xFFFFFFFF\n        seed = seed.new_tensor(int(seed))\n",
        ("compression/test_host_waits.py",),
    ),
    "residuals keep the old loss scale": Bug(
        "compression/residuals.py",
        "numel_of(layout)).mul_(factor)))",
        "numel_of(layout)).mul_(1.0)))",
        ("compression/test_feedback.py", "backends/deepspeed/test_overflow.py"),
    ),
    "off by one where bits are packed": Bug(
        "compression/kernels/reference_bits.py",
        "((value + 1) * width - 1) // 8 + 1)",
        "(value + 1) * width // 8)",
        ("compression/test_kernels.py", "compression/test_cpu_kernels.py"),
    ),
    "off by one where codes are unpacked in C++": Bug(
        "compression/kernels/packing.h",
        "    unpack_any(packed + whole, n - done, BITS, codes + done);",
        "    unpack_any(packed + whole, n - done - 1, BITS, codes + done);",
        ("compression/test_cpu_kernels.py",),
    ),
    "the scale of a sum is forgotten": Bug(
        "compression/kernels/reference.py",
        "(scales * scale).unsqueeze(1)",
        "scales.unsqueeze(1)",
        ("compression/test_kernels.py", "compression/test_contract.py"),
    ),
    "infinity is sent as a finite number": Bug(
        "compression/kernels/forms.py",
        "    return torch.where(scales.isfinite(), rounded, scales.to(torch.float32))",
        "    return rounded",
        ("compression/test_contract.py", "compression/test_quantizers.py"),
    ),
    "a NaN that is not drawn is not sent": Bug(
        "compression/compressors/randomk.py",
        "        values[0] += 0.0 * torch.linalg.vector_norm(x, math.inf)\n",
        "",
        ("compression/test_contract.py", "compression/test_sparsifiers.py"),
    ),
    "ranks draw positions that differ": Bug(
        "compression/compressors/base.py",
        "    return shared >> 32 << 32 |",
        "    return random_key(*message, sender) >> 32 << 32 |",
        ("compression/test_sparsifiers.py",),
    ),
    "momentum of sent elements stays": Bug(
        "compression/feedback.py",
        "velocity.masked_fill_(sent != 0, 0.0)",
        "velocity",
        ("compression/test_feedback.py",),
    ),
    "momentum is not saved": Bug(
        "compression/state.py",
        "    held = {name: list(store.payloads()) for name, store in stores.items()}",
        '    held = {name: list(store.payloads() if name != "velocity" else ()) for name, store in stores.items()}',
        ("checkpointing/deepspeed/test_checkpoint.py",),
    ),
    "the state of a rank that is no more is lost": Bug(
        "compression/state.py",
        "saved.index % position.size == position.index",
        "saved.index == position.index",
        ("checkpointing/deepspeed/test_checkpoint.py",),
    ),
    "what DDP drops of unused parameters is lost": Bug(
        "backends/ddp/batches.py",
        "kept.add_(surplus, alpha=self._group.size())",
        "kept",
        ("backends/test_ddp.py",),
    ),
    "parts of FSDP2 in the wrong order": Bug(
        "backends/fsdp2/gradients.py",
        "begin = owner * share",
        "begin = (ranks - 1 - owner) * share",
        ("backends/test_fsdp2_layout.py",),
    ),
    "copies of a model add up": Bug(
        "backends/fsdp2/gradients.py",
        "else 1.0 / self._ranks.size",
        "else 1.0 / shards",
        ("backends/test_fsdp2.py",),
    ),
    "FSDP2 evaluates with rounded weights": Bug(
        "backends/fsdp2/weights.py",
        "            self.unit.module.reshard()\n",
        "",
        ("backends/test_fsdp2.py",),
    ),
    "weights divided again by FSDP2 are rounded twice": Bug(
        "backends/fsdp2/weights.py",
        "return self.rounds and group.group_name == self._shard.group_name",
        "return self.rounds",
        ("backends/test_fsdp2.py",),
    ),
    "gradients that are cleared in vain leave a trace": Bug(
        "backends/steps.py",
        "if self.reduced and not self._asked:",
        "if self._asked:",
        ("backends/test_ddp.py",),
    ),
    "Megatron's shares are cut without padding": Bug(
        "collectives/buckets.py",
        "(PADDING, flat.numel() - end)]",
        "(PADDING, 0)]",
        ("backends/test_megatron.py",),
    ),
    "Megatron's messages are numbered as they leave": Bug(
        "backends/megatron/gradients.py",
        "bucket.scale, number, everywhere)",
        "bucket.scale, None, everywhere)",
        ("backends/test_megatron.py",),
    ),
    "copies on tensor-parallel ranks are compressed": Bug(
        "backends/megatron/buckets.py",
        "return self._tensor_size > 1 and",
        "return self._tensor_size < 0 and",
        ("backends/test_megatron_layouts.py",),
    ),
    "differences to weights that nobody else has": Bug(
        "backends/megatron/weights.py",
        "flat.own.copy_(own)",
        "own.copy_(flat.own)",
        ("backends/test_megatron.py",),
    ),
    "swapped owner": Bug(
        "collectives/buckets.py",
        "Segment(name, begin, length, offset, owner)",
        "Segment(name, begin, length, offset, world_size - 1 - owner)",
        ("collectives/test_buckets.py",),
    ),
    "weights arrive one round short": Bug(
        "collectives/gather.py",
        "        for layout in self._layouts:\n",
        "        for layout in self._layouts[: max(1, len(self._layouts) - 1)]:\n",
        ("collectives/test_gather.py",),
    ),
    "bytes are counted twice": Bug(
        "monitor/meter.py",
        "getattr(self, kind) + size",
        "getattr(self, kind) + 2 * size",
        ("collectives/test_reducers.py",),
    ),
    "warm-up takes a step more": Bug(
        "policy/schedule.py",
        "        if step < schedule.warmup_steps:",
        "        if step <= schedule.warmup_steps:",
        ("policy/test_policy.py",),
    ),
    "what is spread arrives a step late": Bug(
        "compression/feedback.py",
        "self.every - (step + 1) % self.every",
        "self.every - step % self.every",
        ("collectives/test_reducers.py",),
    ),
    "means wait while PowerSGD is in force": Bug(
        "session/residual_state.py",
        "        gradients.add([(piece, values / scale)], values.device)",
        "        pass",
        ("backends/deepspeed/test_switching.py",),
    ),
    "factors are not in a resumed run": Bug(
        "session/state_files.py",
        "    session.residuals.expect(found[0][1].storage)",
        "    session.residuals.expect({})",
        ("backends/deepspeed/test_switching.py",),
    ),
    "buckets of PowerSGD are a plan for others": Bug(
        "backends/deepspeed/gradients/early.py",
        "        if not isinstance(self._session.gradients.reducer, PayloadReducer):\n            # Its",
        "        if False:\n            # Its",
        ("backends/deepspeed/test_switching.py",),
    ),
    "coarse weights cost no steps": Bug(
        "policy/selector.py",
        "return weights_penalty(self.weights[choice.weights], step) if len(self.weights) > 1 else 1.0",
        "return 1.0",
        ("policy/test_candidates.py",),
    ),
    "early reductions are not checked": Bug(
        "backends/deepspeed/gradients/early.py",
        "torch.full((), right, device=source.device), *equal]).all()",
        "torch.full((), right, device=source.device), *equal]).any()",
        ("backends/deepspeed/test_early.py",),
    ),
    "a void round of islands leaves its residuals": Bug(
        "local_sgd/elastic_exchange.py",
        "store.commit() if outcome.committed else store.rollback()",
        "store.commit()",
        ("local_sgd/test_elastic.py",),
    ),
    "a round of islands is committed before all have voted": Bug(
        "local_sgd/coordinator/rounds.py",
        "elif all(running.votes.values()):",
        "elif any(running.votes.values()):",
        ("local_sgd/coordinator/test_coordinator.py",),
    ),
    "a restarted coordinator waits for no island": Bug(
        "local_sgd/coordinator/membership.py",
        "self._missing = set(saved.members) if came_back else set()",
        "self._missing: set[int] = set()",
        ("local_sgd/coordinator/test_coordinator.py",),
    ),
    "an island that diverged sends its residuals": Bug(
        "local_sgd/exchange.py",
        "return (reducer if contributes else reducer.without_feedback()).start_all_reduce(",
        "return reducer.start_all_reduce(",
        ("local_sgd/deepspeed/test_islands.py", "local_sgd/test_elastic.py"),
    ),
    "ranks that share layers each exchange a copy": Bug(
        "local_sgd/deepspeed/replicated.py",
        "return self.tensor > 1 or self.stages > 1",
        "return self.tensor > 2 or self.stages > 1",
        ("local_sgd/deepspeed/test_islands_tensor.py",),
    ),
    "stages each exchange a copy of tied weights": Bug(
        "local_sgd/deepspeed/replicated.py",
        "return self.tensor > 1 or self.stages > 1",
        "return self.tensor > 1 or self.stages > 2",
        ("local_sgd/deepspeed/test_elastic_pipeline.py",),
    ),
    "islands that share layers reduce over the job": Bug(
        "backends/deepspeed/division.py",
        '        division["_DATA_PARALLEL_GROUP"] = unit.data',
        '        division["_DATA_PARALLEL_GROUP"] = groups._DATA_PARALLEL_GROUP',
        ("local_sgd/deepspeed/test_islands_tensor.py",),
    ),
    "a later engine gets the ranks of an island": Bug(
        "backends/deepspeed/division.py",
        "    return replaced(groups, **division)",
        "    vars(groups).update(division)\n    return replaced(groups)",
        ("backends/deepspeed/test_other_engines.py",),
    ),
    "an island is judged by the losses of all": Bug(
        "session/session.py",
        "Losses(device, engine.deciding)",
        "Losses(device)",
        ("local_sgd/deepspeed/test_islands_guard.py",),
    ),
    "an exchange of islands counts as waiting for gradients": Bug(
        "session/session.py",
        '["communicate"] - self._exchange_ms',
        '["communicate"]',
        ("local_sgd/deepspeed/test_islands_adaptive.py",),
    ),
    "every tensor-parallel rank adds the bias": Bug(
        "backends/deepspeed/activations/tensor.py",
        '{"mp_group": None, "bias": None}',
        '{"mp_group": None}',
        ("backends/deepspeed/activations/test_hooks.py",),
    ),
    "a recomputed layer joins an earlier sum": Bug(
        "backends/deepspeed/activations/tensor.py",
        "self.version == x._version and reader not in self.readers",
        "self.version == x._version",
        ("backends/deepspeed/activations/test_hooks.py",),
    ),
    "an evaluation is compressed": Bug(
        "backends/deepspeed/activations/tensor.py",
        "        return self._training.is_training and sums_itself(layer)",
        "        return sums_itself(layer)",
        ("backends/deepspeed/activations/test_hooks.py",),
    ),
    "an evaluation exchanges compressed heads": Bug(
        "backends/deepspeed/activations/sequence.py",
        "        elif torch.is_grad_enabled():",
        "        elif self.own:",
        ("backends/deepspeed/activations/test_sequence.py",),
    ),
    "masks between stages are compressed": Bug(
        "backends/deepspeed/activations/pipeline.py",
        "        self._passed = True",
        "        self._passed = False",
        ("backends/deepspeed/activations/test_pipeline.py",),
    ),
    "gradients of tokens go the way of the tokens": Bug(
        "backends/activations/tokens.py",
        "Route(self.group, self.received, self.sent)",
        "Route(self.group, self.sent, self.received)",
        ("backends/activations/test_tokens.py",),
    ),
    "tokens of an evaluation are compressed": Bug(
        "backends/deepspeed/activations/experts.py",
        "if self._training.is_training else self._theirs",
        "if self._training is not None else self._theirs",
        ("backends/deepspeed/activations/test_experts.py",),
    ),
    "islands read data in one order": Bug(
        "local_sgd/deepspeed/elastic.py",
        "self.seed = SEEDS * self._island.number",
        "self.seed = 0",
        ("local_sgd/deepspeed/test_elastic.py",),
    ),
}


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
    file = tree / "deepspeed_compress" / bug.file
    sound = file.read_text(encoding="utf-8")
    file.write_text(bug.planted(tree / "deepspeed_compress"), encoding="utf-8")
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
    parser.add_argument("--list", action="store_true", help="names of the bugs, and their files")
    options = parser.parse_args()
    if unknown := set(options.names) - BUGS.keys():
        parser.error(f"no such bug: {', '.join(sorted(unknown))}")
    if options.list:
        print("\n".join(f"{name:48} {bug.file}" for name, bug in BUGS.items()))
        return 0
    outcomes = judge(options.names or list(BUGS))
    print(f"{sum(map(bool, outcomes.values()))} of {len(outcomes)} bugs found")
    return 0 if all(outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
