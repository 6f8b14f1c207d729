"""Allowed imports between modules, checked against the imports of every module."""

import ast
import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import deepspeed_compress

PACKAGE = "deepspeed_compress"
ROOT = Path(deepspeed_compress.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))
OURS = f"from {PACKAGE}"
TYPE_CHECKING = "TYPE_CHECKING"


@dataclass(frozen=True)
class Allowed:
    """Allowed imports of a part: other parts or modules of the package, and third-party packages.

    `lazily` holds additional imports inside functions.
    """

    ours: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    lazily: frozenset[str] = frozenset()


def allow(ours: str = "", others: str = "", lazily: str = "") -> Allowed:
    return Allowed(*(frozenset(names.split()) for names in (ours, others, lazily)))


TABLE = {
    "__init__": allow("errors", lazily="backends.deepspeed.attach backends.deepspeed.initialize integrations"),
    "errors": allow(),
    "choice_names": allow(),
    "diagnostics": allow(),
    "safe_files": allow("errors"),
    "config": allow("choice_names diagnostics errors safe_files", "pydantic pydantic_core hjson", lazily="compression"),
    "compression": allow(),
    "compression.kernels": allow("errors safe_files", "torch triton"),
    "compression.compressors": allow("compression.kernels", "torch"),
    "compression.segments": allow("", "torch"),
    "compression.transforms": allow("compression.kernels compression.segments", "torch"),
    "compression.codec": allow(
        "compression.compressors.base compression.kernels compression.segments compression.transforms", "torch"
    ),
    "compression.residuals": allow(
        "compression.codec compression.compressors compression.kernels compression.segments compression.transforms",
        "torch",
    ),
    "compression.feedback": allow(
        "compression.codec compression.kernels compression.residuals compression.segments", "torch"
    ),
    "compression.residual_stores": allow("compression.residuals", ""),
    "compression.state_description": allow("errors safe_files compression.residuals", "pydantic"),
    "compression.state": allow(
        "errors safe_files compression.residual_stores compression.residuals compression.segments "
        "compression.state_description compression.transforms",
        "torch safetensors",
    ),
    "collectives": allow(
        "monitor compression.codec compression.compressors.base compression.feedback "
        "compression.kernels compression.residuals compression.segments",
        "torch",
    ),
    "collectives.objects": allow("", "torch"),
    "collectives.pace": allow("collectives.objects config", "torch"),
    "collectives.parameters": allow("collectives config errors", "torch"),
    "collectives.reduction": allow("collectives compression config", "torch"),
    "collectives.weight_reduction": allow("collectives compression config errors", "torch"),
    "transport": allow("errors"),
    "transport.connection": allow("transport.channel transport.errors", "pydantic_core"),
    "transport.messages": allow("transport", "pydantic"),
    "launcher": allow(),
    "launcher.host": allow("launcher transport"),
    "launcher.host_resources": allow("safe_files launcher.heartbeat"),
    "launcher.messages": allow("transport.messages", "pydantic"),
    "launcher.placement": allow("config"),
    "launcher.heartbeat": allow("safe_files"),
    "launcher.workers": allow(),
    "checkpointing": allow("errors launcher.heartbeat safe_files", "torch"),
    "checkpointing.memory_copies": allow("checkpointing errors safe_files transport", "pydantic"),
    "checkpointing.completeness": allow("errors safe_files", "pydantic"),
    "checkpointing.directory": allow("checkpointing.completeness errors safe_files"),
    "monitor": allow("config errors safe_files", "torch"),
    "policy": allow("choice_names config errors monitor"),
    "model_families": allow("errors safe_files"),
    "planner": allow("choice_names errors model_families"),
    "session": allow("collectives compression config errors monitor policy", "torch"),
    "backends.activations": allow("collectives compression config monitor", "torch"),
    "backends.activations.hooks": allow("errors", "torch"),
    "backends.deepspeed": allow(
        "backends.activations backends.announce backends.groups backends.limits launcher.heartbeat collectives "
        "compression config errors model_families monitor session",
        "torch deepspeed",
    ),
    "backends.deepspeed.seams": allow("errors", "packaging"),
    "backends.deepspeed.versions": allow("", "deepspeed packaging"),
    "backends.deepspeed.attach": allow(
        "backends.deepspeed checkpointing.deepspeed local_sgd.deepspeed collectives config errors session",
        "torch deepspeed",
    ),
    "backends.deepspeed.initialize": allow(
        "backends.deepspeed checkpointing.deepspeed local_sgd.deepspeed config errors", "deepspeed"
    ),
    "backends.deepspeed.rollout": allow("config errors monitor session.patches", "torch", lazily="rollout"),
    "backends.deepspeed.restarts": allow("checkpointing collectives.objects launcher.heartbeat errors session"),
    "backends.deepspeed.steps": allow(
        "backends.deepspeed checkpointing.deepspeed.checkpoint session", "torch deepspeed", lazily="rollout"
    ),
    "checkpointing.deepspeed": allow(
        "backends.deepspeed checkpointing collectives.objects collectives.reorder compression.state safe_files "
        "compression.state_description config errors launcher.heartbeat session transport.client",
        "torch deepspeed",
    ),
    "checkpointing.deepspeed.exclusive": allow("checkpointing session.state_files errors safe_files", "torch"),
    "local_sgd": allow("collectives compression config errors monitor", "torch"),
    "local_sgd.anchors": allow("local_sgd transport", "torch"),
    "local_sgd.moments": allow("", "torch"),
    "local_sgd.elastic_exchange": allow("local_sgd config errors transport.client", "torch"),
    "local_sgd.coordinator": allow("errors safe_files transport", "pydantic"),
    "local_sgd.parameter_server": allow(
        "local_sgd collectives compression config errors monitor safe_files transport", "pydantic torch safetensors"
    ),
    "local_sgd.deepspeed": allow(
        "backends.deepspeed checkpointing.completeness checkpointing.deepspeed checkpointing.directory collectives "
        "compression config errors local_sgd monitor safe_files session",
        "torch deepspeed",
    ),
    "backends": allow(
        "choice_names collectives compression config diagnostics errors model_families monitor session",
        "torch packaging",
    ),
    "backends.megatron": allow(
        "backends.activations backends.announce backends.groups backends.limits backends.sessions backends.steps "
        "collectives compression config errors model_families monitor session",
        "torch megatron packaging",
    ),
    "agents": allow("collectives.objects errors", "torch"),
    "agents.serving": allow("", "starlette uvicorn"),
    "agents.vllm_endpoint": allow("agents config.problems errors rollout", "fastapi httpx starlette"),
    "rollout": allow(
        "collectives.buckets collectives.objects collectives.parameters compression.compressors.base errors "
        "model_families safe_files",
        "numpy pydantic torch",
    ),
    "rollout.adapters": allow("errors rollout.parts", "pydantic torch", lazily="deepspeed peft transformers"),
    "rollout.adapter_export": allow("errors rollout safe_files", "safetensors"),
    "rollout.checkpoint_names": allow("errors", "torch", lazily="torch transformers"),
    "rollout.checkpoint_export": allow(
        "errors rollout safe_files", "numpy safetensors torch zstandard", lazily="transformers xxhash"
    ),
    "rollout.vllm": allow("errors", lazily="vllm"),
    "rollout.vllm_adapters": allow("rollout", lazily="vllm"),
    "rollout.vllm_trainer": allow("errors rollout", "torch vllm"),
    "rollout.vllm_worker": allow("errors rollout", "numpy torch vllm"),
    "rollout.served_store": allow("rollout.store errors transport"),
    "rollout.changes": allow(
        "compression.compressors.quantizers compression.kernels.reference_bits errors", "numpy torch zstandard"
    ),
    "models": allow("errors model_families", "torch deepspeed transformers safetensors", lazily="megatron"),
    "training": allow(
        "config backends.deepspeed.units errors models "
        "launcher.heartbeat tools.arguments safe_files tools.run_directory",
        "torch deepspeed numpy transformers",
        lazily="__init__",
    ),
    "training.data": allow("errors safe_files", "numpy tokenizers transformers"),
    "integrations": allow(),
    "integrations.install": allow(
        "integrations.patching integrations.plain",
        lazily="backends.deepspeed.initialize deepspeed integrations session",
    ),
    "integrations.run": allow(
        "config errors integrations.install integrations.launch launcher.heartbeat launcher.workers",
        lazily="collectives.exchange",
    ),
    "integrations.inherited": allow("integrations.install"),
    "integrations.launch": allow("config errors", "yaml", lazily="accelerate deepspeed torch"),
    "integrations.patching": allow("errors session.patches"),
    "integrations.frameworks": allow(
        "checkpointing.completeness config errors integrations.patching", lazily="accelerate session"
    ),
    "integrations.hf": allow(
        "config errors integrations.install integrations.patching integrations.trainer_callback launcher.heartbeat",
        "transformers",
    ),
    "integrations.trainer_callback": allow(
        "checkpointing.completeness checkpointing.directory collectives.objects config errors "
        "local_sgd.deepspeed.elastic monitor session",
        "accelerate deepspeed torch transformers",
    ),
    "integrations.trl": allow(
        "errors rollout.checkpoint_names rollout.vllm rollout.vllm_adapters session.patches", "trl"
    ),
    "integrations.agent_lightning": allow("agents collectives.objects errors", "agentlightning httpx torch"),
    "integrations.plain": allow(
        "errors integrations.patching session.patches",
        lazily="accelerate backends integrations.followed torch transformers",
    ),
    "integrations.followed": allow("errors session.patches", "torch", lazily="backends"),
    "tools": allow(),
    "tools.arguments": allow("tools.bench.links", lazily="config"),
    "tools.checkpoint": allow(
        "checkpointing.completeness checkpointing.directory config errors safe_files tools.outputs tools.tables",
        lazily="checkpointing.deepspeed.resharding deepspeed rich torch",
    ),
    "tools.options": allow("tools.arguments tools.bench.options"),
    "tools.outputs": allow("diagnostics"),
    "tools.plots": allow("errors", lazily="matplotlib"),
    "tools.tables": allow("", "rich"),
    "tools.run": allow("config errors integrations.install integrations.launch launcher transport"),
    "tools.schema": allow("config tools.lint"),
    "tools.services": allow(
        "errors local_sgd.coordinator tools.tables transport",
        lazily="local_sgd.parameter_server rollout",
    ),
    "tools.lint": allow(
        "config diagnostics errors model_families safe_files tools.arguments tools.outputs",
        "yaml",
        lazily="hjson jinja2 pydantic",
    ),
    "tools.plan": allow("config errors policy tools.plan_job tools.tables"),
    "tools.plan_cluster": allow(
        "errors planner safe_files tools.bench.jobs tools.bench.options tools.bench.workload tools.plan_tables "
        "tools.plan_job",
        "rich",
    ),
    "tools.plan_job": allow("config errors planner", lazily="torch"),
    "tools.plan_tables": allow("choice_names config.numbers planner tools.tables"),
    "tools.run_directory": allow("config errors monitor safe_files tools.outputs", "pydantic"),
    "tools.time_to_loss": allow(
        "config.numbers errors monitor tools.plots tools.run_directory tools.tables", lazily="matplotlib"
    ),
    "tools.bench": allow(
        "__init__ compression.kernels config errors models monitor safe_files tools.tables training",
        "torch deepspeed rich",
        lazily="peft transformers",
    ),
    "tools.bench.rank": allow(
        "backends.activations.crossover collectives.exchange policy.measurement tools.bench", "deepspeed torch"
    ),
    "tools.bench.options": allow("tools.arguments"),
    "tools.doctor": allow(
        "choice_names config diagnostics errors monitor tools.outputs tools.run_directory",
        "pydantic rich",
    ),
    "tools.report": allow("config errors tools.outputs tools.run_directory tools.tables", "jinja2"),
    "tools.tune": allow(
        "config errors tools.bench.hosts safe_files tools.run_directory tools.tables",
        "rich",
        lazily="integrations",
    ),
    "tools.tune.rank": allow("errors integrations", lazily="tools.tune.recorder"),
    "tools.tune.recorder": allow("config errors integrations monitor safe_files tools.tune.trials", "torch deepspeed"),
    "cli": allow("__init__ errors tools.arguments", lazily="tools.outputs"),
}
"""Allowed imports by part. Rows of a room hold for its modules that have no row of their own."""


@dataclass(frozen=True)
class Import:
    """Import of a module.

    `target` is "part.module" of the package, or the name of another distribution. `nested` imports are in a function or
    for type checkers only, so importing the module does not load the target.
    """

    target: str
    ours: bool
    nested: bool


def part_of(module: Path) -> str:
    """Return the longest row of the table that names `module` or a room around it."""
    parts = module.relative_to(ROOT).with_suffix("").parts
    paths = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    return next((path for path in paths if path in TABLE), parts[0])


def our_target(name: str) -> str:
    """Return the deepest module of the package in `name`, a dotted path that may end in an attribute."""
    parts = name.split(".")[1:]
    while parts and not (ROOT.joinpath(*parts).with_suffix(".py").exists() or ROOT.joinpath(*parts).is_dir()):
        parts.pop()
    return ".".join(parts) or "__init__"


def names_of(node: ast.AST, package: str) -> Iterator[str]:
    """Yield the dotted names that a node imports, also relatively or by import_module("a literal")."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
        yield from (
            f"{above}{node.module}.{alias.name}" if node.module else f"{above}{alias.name}" for alias in node.names
        )
    elif isinstance(node, ast.Call):
        names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
        # Unparsing takes most of the time, and few calls begin with a literal.
        yield from names if names and ast.unparse(node.func).endswith(("import_module", "__import__")) else ()


def imports_of(source: str, package: str) -> set[Import]:
    """Return all imports of `source`, a module in `package`, except those of the standard library."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    checked = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == TYPE_CHECKING]
    nested = {id(node) for part in [*functions, *checked] for node in ast.walk(part)}
    found = {(name, id(node) in nested) for node in ast.walk(tree) for name in names_of(node, package)}
    tops = {(name, name.split(".")[0], inside) for name, inside in found}
    return {
        Import(our_target(name) if top == PACKAGE else top, top == PACKAGE, inside)
        for name, top, inside in tops
        if top not in sys.stdlib_module_names
    }


def within(target: str, names: frozenset[str]) -> bool:
    return any(f"{target}.".startswith(f"{name}.") for name in names)


def violations(part: str, imports: set[Import]) -> list[str]:
    allowed = TABLE[part]

    def fine(one: Import) -> bool:
        always = allowed.ours | {part} if one.ours else allowed.others
        return within(one.target, always) or (one.nested and within(one.target, allowed.lazily))

    return sorted(one.target for one in imports if not fine(one))


@functools.cache
def imports_in(module: Path) -> set[Import]:
    package = ".".join([PACKAGE, *module.relative_to(ROOT).parent.parts])
    return imports_of(module.read_text(encoding="utf-8"), package)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_a_module_imports_only_allowed_parts(module: Path) -> None:
    part = part_of(module)
    missing = violations(part, imports_in(module))
    assert missing == [], (
        f"{module.relative_to(ROOT)} imports {missing}, which TABLE[{part!r}] does not allow. If the part may know it, "
        f"add it to that row of TABLE in tests/test_layers.py (lazily=... if only functions import it), or give the "
        f"module a row of its own; else import something that the row has"
    )


@pytest.mark.parametrize("part", sorted({part_of(module) for module in MODULES}))
def test_a_row_allows_only_imports_in_use(part: str) -> None:
    used = {one.target for module in MODULES if part_of(module) == part for one in imports_in(module)}
    allowed = TABLE[part].ours | TABLE[part].others
    unused = {name for name in allowed if not any(within(target, frozenset({name})) for target in used)}
    assert unused == set(), (
        f"nothing in {part!r} imports {sorted(unused)} when it is loaded: take it out of TABLE[{part!r}] in "
        "tests/test_layers.py, or put it under lazily=... if functions import it"
    )


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports inside functions are left out, because light modules use them to reach heavy ones."""
    graph = {
        ".".join(module.relative_to(ROOT).with_suffix("").parts): {
            one.target for one in imports_in(module) if one.ours and not one.nested
        }
        for module in MODULES
    }
    # prepare() raises CycleError with the circle.
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    ("part", "source", "target"),
    [
        ("collectives", f"{OURS}.compression import state", "compression.state"),
        ("collectives", "import deepspeed_compress.config.models", "config.models"),
        ("collectives", f"{OURS}.compression.compressors import Blockwise", "compression.compressors"),
        ("collectives", "from ..compression.state import save", "compression.state"),
        ("collectives", "from ..compression import state", "compression.state"),
        ("collectives", "if TYPE_CHECKING:\n    import pydantic", "pydantic"),
        ("config", "def f():\n    import torch.nn", "torch"),
        ("config", "if TYPE_CHECKING:\n    from torch import Tensor", "torch"),
        ("config", "importlib.import_module('torch')", "torch"),
    ],
)
def test_a_forbidden_import_is_found(part: str, source: str, target: str) -> None:
    assert violations(part, imports_of(source, f"{PACKAGE}.{part}")) == [target]
