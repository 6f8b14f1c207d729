"""The files of configs/: each is valid, has no setting without effect, is in the catalog, and trains."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress import cli
from deepspeed_compress.config import check_world, parse_section
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.section import find_notices, find_problems
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.models import Layout, check_layout, read_model_config
from deepspeed_compress.models.sources import build_skeleton
from deepspeed_compress.training.main import main
from tests.support.coordinators import coordinator
from tests.support.forks import run_forks
from tests.support.model_configs import DROPPING_GPT2, LLAMA

CONFIGS = Path(__file__).parents[1] / "configs"
FILES = sorted(file.name for file in CONFIGS.glob("*.json"))
MODELS = sorted(file.name for file in (CONFIGS / "models").glob("*.json"))
CATALOGUE = (CONFIGS / "README.md").read_text(encoding="utf-8")
TOYS = {"gpt2": DROPPING_GPT2, "llama": LLAMA}


def read(name: str) -> dict[str, Any]:
    """Return the configuration `name`, parsed as strict JSON."""
    values: dict[str, Any] = json.loads((CONFIGS / name).read_text(encoding="utf-8"))
    return values


def rows(column: str) -> dict[str, list[str]]:
    """Return the rows of the table with this first column, by file. A row may name several files."""
    table = re.search(rf"^\| {column} \|.*\n\|[-|]+\n((?:\|.*\n)+)", CATALOGUE, re.MULTILINE)
    assert table is not None
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table[1].splitlines()]
    return {name: row for row in cells for name in re.findall(r"`([\w/]+\.json)`", row[0])}


def ranks(name: str) -> int:
    return int(rows("file")[name][2])


@pytest.mark.parametrize("name", FILES)
def test_nothing_in_it_is_wrong_or_without_effect(name: str) -> None:
    ds_config = read(name)
    assert find_problems(ds_config) == []
    section = parse_section(ds_config)
    assert find_notices(section) == []
    # A warning that there is nothing to exchange is an error here.
    islands = section.islands
    groups = 1 if islands is None or islands.elastic is not None else ranks(name) // (islands.size or 1)
    assert check_world(section, ranks(name), ds_config) * groups == 2


@pytest.mark.parametrize("name", FILES)
def test_the_linter_finds_nothing(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["lint", str(CONFIGS / name), "--world-size", str(ranks(name))])
    assert code == 0, capsys.readouterr().out


def test_the_catalogue_has_a_row_for_every_file() -> None:
    different = sorted(set(rows("file")) ^ set(FILES))
    assert sorted(rows("file")) == FILES, f"each file of configs/ needs a row in configs/README.md: {different} differ"
    assert sorted(rows("model")) == [f"models/{name}" for name in MODELS]


def test_links_of_the_catalogue_resolve() -> None:
    targets = re.findall(r"\]\(([^)#]+)", CATALOGUE)
    assert targets
    assert [target for target in targets if not (CONFIGS / target).is_file()] == []


@pytest.mark.parametrize("name", MODELS)
def test_the_catalogue_knows_the_models(name: str) -> None:
    config = read_model_config(CONFIGS / "models" / name)
    _, size, heads, layers, divisible = rows("model")[f"models/{name}"]
    assert size == f"{build_skeleton(config).num_parameters() / 1e6:.1f}M"
    key_value = getattr(config, "num_key_value_heads", config.num_attention_heads)
    assert heads == f"{config.num_attention_heads}, {key_value}"
    assert int(layers) == config.num_hidden_layers
    if divisible == "yes":
        check_layout(config, Layout(tensor=2, pipeline=2))
    else:
        assert config.num_attention_heads % 2


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a text and toy models. The first run adds the common tokenizer."""
    directory = tmp_path_factory.mktemp("configs")
    (directory / "text.txt").write_text("the king said nothing, for who would answer him?\n" * 400)
    for name, model in TOYS.items():
        (directory / f"{name}.json").write_text(json.dumps(model))
    return directory


def train(rank: int, argv: list[str]) -> int:
    # Settings without effect must not be found during training either.
    warnings.simplefilter("error", CompressWarning)
    return main(argv)


def run(name: str, model: str, files: Path, output: Path) -> dict[str, Any]:
    """Return summary.json of a run of two steps more than the dense start."""
    steps = parse_section(read(name)).schedule.warmup_steps + 2
    with coordinator() as address:
        return _run(name, model, files, output, steps, address)


def at(address: str, name: str, output: Path) -> Path:
    """Return the path of the configuration, with `address` as the coordinator of elastic islands.

    With compressed weights, small ones do not persist, since a toy has no others.
    """
    found = read(name)
    section = found["deepspeed_compress"]
    elastic, sends_weights = section.get("islands", {}).get("elastic"), "weights" in section
    if elastic is None and not sends_weights:
        return CONFIGS / name
    if elastic is not None:
        elastic["rendezvous"] = address
    if sends_weights:
        found["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    file = output.with_suffix(".json")
    file.write_text(json.dumps(found))
    return file


def _run(name: str, model: str, files: Path, output: Path, steps: int, address: str) -> dict[str, Any]:
    options = {
        "deepspeed_config": at(address, name, output),
        "data": files / "text.txt",
        "tokenizer": files / "tokenizer",
        "model": files / f"{model}.json",
        "output-dir": output,
    }
    argv = [part for key, value in options.items() for part in (f"--{key}", str(value))]
    argv += f"--steps {steps} --seq-len 16 --held-out 0.2 --eval-batches 1 --eval-every 0".split()
    assert run_forks(ranks(name), train, argv) == [0] * ranks(name)
    summary: dict[str, Any] = json.loads((output / "summary.json").read_text())
    return summary


def divided(name: str) -> bool:
    return "tensor" in read(name)["deepspeed_compress"].get("parallelism", {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "model"),
    [(name, "gpt2") for name in FILES] + [(name, "llama") for name in FILES if divided(name)],
)
def test_it_trains(name: str, model: str, files: Path, tmp_path: Path) -> None:
    summary = run(name, model, files, tmp_path)
    # A new model has a loss of about ln 300.
    assert 0 < summary["eval_loss"] < 6
    section = parse_section(read(name))
    parallelism = section.parallelism or Parallelism()
    assert (summary["tensor"], summary["pipeline"]) == (parallelism.tensor, parallelism.pipeline)
    lines = [json.loads(line) for line in (tmp_path / "compression.jsonl").read_text().splitlines()]
    sent, uncompressed = lines[-1]["bytes_sent"], lines[-1]["bytes_uncompressed"]
    # The first steps of `auto` are uncompressed.
    compressed = section.gradients.method != "none" and section.auto is None
    assert uncompressed > 2 * sent if compressed else uncompressed == sent


@pytest.mark.slow
def test_the_optimizer_computes_the_same_in_host_memory(files: Path, tmp_path: Path) -> None:
    names = ("zero2_int4.json", "zero2_offload_int4.json")
    losses = [run(name, "gpt2", files, tmp_path / name)["eval_loss"] for name in names]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
