"""Every command and program in README and docs is run here, or a comment above it says why not.

`<!-- needs a cluster -->`, `<!-- needs a GPU -->`, `<!-- needs root -->` and `<!-- takes minutes -->` (or several of
them, by commas) stand for what cannot be run by the suite, `<!-- an excerpt -->` for what is no whole program, and
`<!-- run by FILE -->` for what another test runs. What is not run is looked at: programs are Python, files and modules
exist, and `ds-compress` knows the options.
"""

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

from deepspeed_compress import cli

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", ROOT / "configs/README.md", *sorted((ROOT / "docs").glob("*.md")))
FENCE = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
REASONS = ("an excerpt", "needs a cluster", "needs a GPU", "needs root", "takes minutes")
RUN_BY = "run by "
FILES = {
    "ds_config.json": json.dumps(
        {
            "train_batch_size": 8,
            "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
            "deepspeed_compress": {"schedule": {"warmup_steps": 100}},
        }
    ),
    "train.yaml": "deepspeed: of_trainer.json\n",
    "of_trainer.json": json.dumps(
        {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 2},
        }
    ),
    "zero2.yaml": "train_batch_size: 8\nzero_optimization:\n  stage: 2\n",
    "default_config.yaml": "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\nnum_processes: 8\n",
}
RUNS = {"int4": "healthy-default", "none": "dense"}
"""Recorded runs of other tests that stand in for the runs of the examples, by directory."""
PROGRAM = """
import os, types, warnings
import torch
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
import deepspeed, deepspeed_compress
meet = "file://" + os.path.abspath("rendezvous")
torch.distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
deepspeed.init_distributed()
Trainer = lambda *_: types.SimpleNamespace(train=lambda: None)
perplexity, batch = 1.0, torch.ones(1, 4)

class Model(torch.nn.Linear):
    def forward(self, x):
        return types.SimpleNamespace(loss=super().forward(x).sum())
"""
"""Definitions that programs in the docs assume."""
MAKE = {
    "": "model = Model(4, 4)\n",
    "attach(": 'engine, *_ = deepspeed.initialize(model=Model(4, 4), config="ds_config.json")\n',
    "engine.": 'engine, *_ = deepspeed_compress.initialize(model=Model(4, 4), config="ds_config.json")\n',
}
"""Code to insert before a program, by a text in the program."""


@dataclass(frozen=True)
class Example:
    """Code block of `page`. `reasons` say why the tests do not run it."""

    page: Path
    line: int
    language: str
    text: str
    reasons: tuple[str, ...]

    @property
    def id(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def examples(*languages: str) -> Iterator[Example]:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(text):
            if found[2] in languages:
                reasons = tuple((found[1] or "").split(", ")) if found[1] else ()
                yield Example(page, text[: found.start(2)].count("\n") + 1, found[2], found[3], reasons)


EXAMPLES = list(examples("bash", "python"))
RUN = [example for example in EXAMPLES if not example.reasons]
NOT_RUN = [example for example in EXAMPLES if example.reasons]


def named(found: list[Example]) -> list[object]:
    return [pytest.param(example, id=example.id) for example in found]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the files that examples assume: configurations, runs, files of other programs."""
    directory = tmp_path_factory.mktemp("docs")
    for name in ("configs", "launch", "deepspeed_compress"):
        (directory / name).symlink_to(ROOT / name)
    for name, recorded in RUNS.items():
        shutil.copytree(ROOT / "tests/tools/doctor/runs" / recorded, directory / "runs" / name)
    for name, text in FILES.items():
        (directory / name).write_text(text)
    return directory


def run(command: list[str], place: Path) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, cwd=place, env=variables)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("example", named([one for one in RUN if one.language == "bash"]))
def test_commands_run(example: Example, place: Path) -> None:
    done = run(["bash", "-euo", "pipefail", "-c", example.text], place)
    assert done.returncode == 0, f"{example.id}\n{done.stdout}{done.stderr}"


def test_programs_run(place: Path) -> None:
    """All programs run in one process, because loading DeepSpeed takes seconds."""
    program = PROGRAM
    for example in RUN:
        if example.language == "python":
            made = "".join(text for word, text in MAKE.items() if word in example.text)
            program += f"# {example.id}\n{made}{example.text}\n"
    done = run([sys.executable, "-c", program], place)
    assert done.returncode == 0, f"{program}\n{done.stderr}"


def test_no_example_is_overlooked() -> None:
    """An indented block would be overlooked."""
    found = sum(len(re.findall(r"^ *```(?:bash|python)", page.read_text(), re.MULTILINE)) for page in PAGES)
    assert len(EXAMPLES) == found


@pytest.mark.parametrize("example", named(NOT_RUN))
def test_examples_that_do_not_run_give_a_reason(example: Example) -> None:
    for reason in example.reasons:
        file = reason.removeprefix(RUN_BY)
        assert reason in REASONS or (file != reason and (ROOT / file).is_file()), f"{example.id}: {reason}"
    if example.language == "python":
        ast.parse(example.text)


def commands(example: Example) -> Iterator[list[str]]:
    """Yield the words of each command, without here-documents, comments and variables."""
    text = re.sub(r"<<'(\w+)'\n.*?^\1$", "", example.text.replace("\\\n", " "), flags=re.DOTALL | re.MULTILINE)
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        if words:
            yield words


@pytest.mark.parametrize("example", named([one for one in NOT_RUN if one.language == "bash"]))
def test_examples_that_do_not_run_name_existing_files(example: Example) -> None:
    for words in commands(example):
        modules = [word for option, word in pairwise(words) if option in ("-m", "--module")]
        ours = [name for name in modules if name.split(".")[0] in ("deepspeed_compress", "launch", "tests")]
        assert [name for name in ours if importlib.util.find_spec(name) is None] == []
        files = [word for word in words if re.match(r"(configs|launch|tests|docs)/[\w/.-]+\.\w+$", word)]
        assert [file for file in files if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("example", named([one for one in NOT_RUN if one.language == "bash"]))
def test_examples_that_do_not_run_use_existing_options(example: Example, capsys: pytest.CaptureFixture[str]) -> None:
    for words in commands(example):
        if words[0] == "ds-compress":
            # The word after `run` may be a program.
            last = 2 if words[1] == "run" else 3
            names = list(takewhile(lambda word: re.fullmatch(r"[a-z]+", word), words[1:last]))
            with pytest.raises(SystemExit):
                cli.main([*names, "--help"])
            known = set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
            given = [word for word in words if word.startswith("--")]
            # The arguments for a launcher and a script start with an option that is not the command's own.
            own = list(takewhile(known.__contains__, given)) if names[0] in ("run", "tune") else given
            assert set(own) <= known
            assert own or names[0] != "tune"


def test_the_first_mention_of_the_corpus_on_a_page_makes_it() -> None:
    """A reader may begin with any page, in a new checkout."""
    mentions = {page.name: page.read_text().partition("data/shakespeare") for page in PAGES}
    makes = "python -m deepspeed_compress.training.data "
    assert [name for name, (before, mention, _) in mentions.items() if mention and not before.endswith(makes)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 450


def test_the_change_that_the_readme_shows_is_a_configuration() -> None:
    [diff] = [shown.text.splitlines() for shown in examples("diff") if shown.page.name == "README.md"]
    before = json.loads("".join(line[1:] for line in diff if not line.startswith("+")))
    after = json.loads("".join(line[1:] for line in diff))
    added = [line for line in diff if line.startswith("+")]
    assert len(added) == 3
    assert after.keys() - before.keys() == {"deepspeed_compress"}
