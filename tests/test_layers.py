"""Who may import whom: the table of the design, held by walking the imports of every module."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import deepspeed_compress

PACKAGE = "deepspeed_compress"
ROOT = Path(deepspeed_compress.__file__).parent
MODULES = sorted(ROOT.rglob("*.py"))


@dataclass(frozen=True)
class Allowed:
    """What the modules of a part may import: other parts or modules of the package, and third-party packages.

    `lazily`: what they may import inside functions besides.
    """

    ours: frozenset[str] = frozenset()
    others: frozenset[str] = frozenset()
    lazily: frozenset[str] = frozenset()


def allow(ours: str = "", others: str = "", lazily: str = "") -> Allowed:
    return Allowed(*(frozenset(names.split()) for names in (ours, others, lazily)))


TABLE = {
    "__init__": allow("errors leaving version", lazily="engine"),
    "leaving": allow("errors"),
    "builds": allow("errors"),
    "version": allow(),
    "errors": allow(),
    "config": allow("errors", "pydantic pydantic_core hjson"),
    "lint": allow("config errors version", "yaml", lazily="pydantic"),
    "lint.generate_keys": allow(lazily="deepspeed pydantic torch"),
    "kernels": allow("errors", "torch triton"),
    "compressors": allow("kernels", "torch"),
    "buckets": allow("", "torch"),
    "transforms": allow("buckets kernels", "torch"),
    "codec": allow("compressors.base buckets transforms", "torch"),
    "residuals": allow("compressors buckets", "torch"),
    "feedback": allow("buckets codec kernels residuals", "torch"),
    "methods": allow("codec compressors transforms", "torch"),
    "reducers": allow("compressors.base compressors.cast buckets codec kernels", "torch"),
    "state": allow("errors residuals", "torch safetensors"),
    "monitor": allow("config errors", "torch"),
    "policy": allow("config errors monitor", "numpy"),
    "plan": allow("config errors methods policy", lazily="matplotlib rich"),
    "idle": allow("errors"),
    "build": allow("buckets codec compressors config feedback idle methods monitor reducers residuals", "torch"),
    "engine": allow(
        "build buckets builds config errors feedback kernels monitor naming policy reducers residuals state",
        "torch deepspeed packaging",
    ),
    "naming": allow(),
    "models": allow("errors naming", "torch deepspeed transformers safetensors"),
    "data": allow("errors", "numpy tokenizers"),
    "run_directory": allow("errors"),
    "train": allow(
        "builds config data errors models run_directory",
        "torch deepspeed numpy rich tokenizers transformers",
        lazily="__init__",
    ),
    "bench": allow(
        "__init__ config errors kernels models monitor policy reducers train version",
        "torch deepspeed rich",
        lazily="matplotlib",
    ),
    "bench.options": allow("bench.links"),
    "integrations": allow("config engine errors monitor", "accelerate deepspeed torch transformers"),
    "doctor": allow("config errors run_directory", "pydantic rich"),
    "report": allow("config errors run_directory", lazily="matplotlib rich"),
    "tune": allow("config errors run_directory train.records", "rich", lazily="integrations matplotlib"),
    "tune.options": allow(),
    "tune.rank": allow("config errors integrations monitor tune.files", "torch deepspeed"),
    "cli": allow("errors version", lazily="builds config integrations report lint plan rich bench tune doctor"),
}
"""Parts that a later version adds have their row already."""


@dataclass(frozen=True)
class Import:
    """`target`: "part.module" of the package, or the name of another distribution; `nested` in a function or not."""

    target: str
    ours: bool
    nested: bool


def part_of(module: Path) -> str:
    """The part that a module is in; a module that may import more than its part has a row of its own."""
    parts = module.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts) if ".".join(parts) in TABLE else parts[0]


def our_target(name: str) -> str:
    """What `name`, a dotted path that may end in an attribute, is within the package: its deepest module."""
    parts = name.split(".")[1:]
    while parts and not (ROOT.joinpath(*parts).with_suffix(".py").exists() or ROOT.joinpath(*parts).is_dir()):
        parts.pop()
    return ".".join(parts) or "__init__"


def names_of(node: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that a node imports: statements, relative ones too, and import_module("a literal")."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        above = package.rsplit(".", node.level - 1)[0] + "." if node.level else ""
        yield from (
            f"{above}{node.module}.{alias.name}" if node.module else f"{above}{alias.name}" for alias in node.names
        )
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
        yield from (arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant))


def imports_of(source: str, package: str) -> set[Import]:
    """Everything that `source`, a module in `package`, imports anywhere, the standard library left out."""
    tree = ast.parse(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    nested = {id(node) for function in functions for node in ast.walk(function)}
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


def imports_in(module: Path) -> set[Import]:
    package = ".".join([PACKAGE, *module.relative_to(ROOT).parent.parts])
    return imports_of(module.read_text(encoding="utf-8"), package)


@pytest.mark.parametrize("module", MODULES, ids=lambda module: str(module.relative_to(ROOT)))
def test_a_module_imports_what_its_part_may(module: Path) -> None:
    assert violations(part_of(module), imports_in(module)) == []


@pytest.mark.parametrize("part", sorted({part_of(module) for module in MODULES}))
def test_a_row_allows_what_its_part_uses(part: str) -> None:
    used = {one.target for module in MODULES if part_of(module) == part for one in imports_in(module)}
    allowed = TABLE[part].ours | TABLE[part].others
    assert {name for name in allowed if not any(within(target, frozenset({name})) for target in used)} == set()


def test_the_walk_sees_the_package() -> None:
    assert {part_of(module) for module in MODULES} >= {"config", "compressors", "reducers", "engine", "build"}
    assert imports_of((ROOT / "feedback.py").read_text(encoding="utf-8"), PACKAGE) == {
        Import("buckets", True, False),
        Import("codec", True, False),
        Import("kernels.forms", True, False),
        Import("residuals", True, False),
        Import("torch", False, False),
    }


@pytest.mark.parametrize(
    ("part", "source", "target"),
    [
        ("reducers", "from deepspeed_compress.residuals import Residuals", "residuals"),
        ("reducers", "from deepspeed_compress import residuals", "residuals"),
        ("reducers", "from deepspeed_compress import monitor", "monitor"),
        ("reducers", "import deepspeed_compress.config.models", "config.models"),
        ("reducers", "from deepspeed_compress.compressors import Blockwise", "compressors"),
        ("feedback", "from deepspeed_compress.compressors.topk import TopK", "compressors.topk"),
        ("codec", "from deepspeed_compress.compressors.cast import Cast", "compressors.cast"),
        ("residuals", "from deepspeed_compress.feedback import WithFeedback", "feedback"),
        ("methods", "from deepspeed_compress.config import CompressConfig", "config"),
        ("state", "import deepspeed", "deepspeed"),
        ("engine", "from deepspeed_compress.methods import METHODS", "methods"),
        ("reducers", "from ..residuals import Residuals", "residuals"),
        ("reducers", "from .. import residuals", "residuals"),
        ("config", "def f():\n    import torch.nn", "torch"),
        ("config", "if TYPE_CHECKING:\n    from torch import Tensor", "torch"),
        ("config", "importlib.import_module('torch')", "torch"),
        ("kernels", "from deepspeed_compress import Tensor", "__init__"),
        ("cli", "from deepspeed_compress.config import json_schema", "config"),
        ("cli", "def f():\n    import torch", "torch"),
        ("lint", "def f():\n    import deepspeed", "deepspeed"),
    ],
)
def test_a_forbidden_import_is_found(part: str, source: str, target: str) -> None:
    assert violations(part, imports_of(source, f"{PACKAGE}.{part}")) == [target]


@pytest.mark.parametrize(
    ("part", "source"),
    [
        ("reducers", "from .plan import Plan"),
        ("reducers", "from deepspeed_compress.compressors.base import Compressor"),
        ("reducers", "from torch.distributed import ProcessGroup"),
        ("cli", "def f():\n    from deepspeed_compress.config import json_schema"),
        ("engine", "from deepspeed.accelerator import get_accelerator"),
        ("config", "import json"),
    ],
)
def test_an_allowed_import_passes(part: str, source: str) -> None:
    assert violations(part, imports_of(source, f"{PACKAGE}.{part}")) == []
