"""Finding and reading of configurations."""

import io
import os
import socket
from pathlib import Path

import pytest

from deepspeed_compress.diagnostics import at
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint import files
from deepspeed_compress.tools.lint.files import Source, sources
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.runner import Selection, lint_document

CONFIG = '{"zero_optimization": {"stage": 2}}'


def read(*arguments: str | Path, exclude: tuple[str, ...] = ()) -> list[Source]:
    return list(sources(map(str, arguments), exclude))


def names(*arguments: str | Path, exclude: tuple[str, ...] = ()) -> list[str]:
    return [os.path.basename(source.path) for source in read(*arguments, exclude=exclude)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "ds_config.json": "{}",
        "deepspeed_config.hjson": "fp16: {}, a: 1",
        "deepspeed_results.json": '{"train_batch_size": 8, "loss": 1, "steps": 2}',
        "stage2.yaml": "zero_optimization: {}\n",
        "settings.json": CONFIG,
        "deep/er.json": "{train_micro_batch_size_per_gpu: 1}",
        "deep/ours.json": '{"deepspeed_compress": {}}',
        "deep/nested.json": '{"a": {"zero_optimization": {}}}',
        "deep/mentions.json": '{"a": "zero_optimization"}',
        "trainer_state.json": '{"train_batch_size": 8}',
        "package.json": "{}",
        "notes.txt": CONFIG,
        ".hidden/ds_config.json": "{}",
        "venv/ds_config.json": "{}",
        "list.json": "[1]",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "linked_ds_config.json").symlink_to(tmp_path / "notes.txt")
    (tmp_path / "dangling_ds_config.json").symlink_to(tmp_path / "nothing")
    return tmp_path


def test_configurations_in_a_directory(tree: Path) -> None:
    here = ["deepspeed_config.hjson", "ds_config.json", "settings.json", "stage2.yaml"]
    assert names(tree) == [*here, "er.json", "ours.json"]
    assert names(tree, exclude=("deep/*", "settings.json")) == [name for name in here if name != "settings.json"]


@pytest.mark.parametrize("pattern", ["deep", "deep/", "d*p", "deep/*", "tree/deep"])
def test_files_in_an_excluded_directory_are_excluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    """Directories above the current one are not compared: the project may be in one of that name."""
    monkeypatch.chdir(tmp_path)
    for name in ("tree/deep/er/ds_config.json", "tree/ds_config.json"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("{}")
    assert [source.path for source in read("tree", exclude=(pattern,))] == ["tree/ds_config.json"]
    monkeypatch.chdir("tree/deep")
    assert names(".", exclude=(pattern,)) == names(tmp_path / "tree" / "deep", exclude=("none",)) == ["ds_config.json"]


def test_a_named_file_is_always_read(tree: Path) -> None:
    assert names(tree / "notes.txt", tree / "package.json", tree / "package.json", tree) == [
        "notes.txt",
        "package.json",
        *names(tree),
    ]


def test_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b'{"a": 1}')))
    [source] = read("-")
    assert (source.path, source.document.data, source.document.fixable) == ("-", {"a": 1}, True)


@pytest.mark.timeout(120)
def test_endless_files_are_not_opened(tmp_path: Path) -> None:
    fifo = tmp_path / "ds_config.json"
    os.mkfifo(fifo)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for path, kind in ((fifo, "a FIFO"), (tmp_path / "socket", "a socket"), (Path("/dev/zero"), "a device")):
        with pytest.raises(ConfigError, match=f"{path}: {kind} \\(allowed: a regular file\\)"):
            read(path)
    assert read(tmp_path) == []


@pytest.mark.parametrize("argument", ["nothing.json", "abcdefgh", "a" * 300, "", "x\0y"])
def test_arguments_that_refer_to_nothing(argument: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read(argument)


def problem(source: Source) -> str:
    [problem] = source.document.problems
    assert not source.document.fixable
    assert not source.document.readable
    return problem.message


def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(b'{"a": "\xff"}')
    assert problem(*read(bad)) == "not UTF-8 text (byte 7)"
    monkeypatch.setattr(files, "MAX_BYTES", 4)
    assert problem(*read(bad)).startswith("larger than")
    monkeypatch.setattr(files, "open", _denied, raising=False)
    assert problem(*read(bad)) == "cannot be read (Permission denied)"


def _denied(*_: object) -> object:
    raise PermissionError(13, "Permission denied")


@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_accelerate_with_a_file_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """The name is looked up in the working directory, next to the file, and above. The file is read only once."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / folder)
    (tmp_path / "a.yaml").write_text("deepspeed_config:\n  deepspeed_config_file: z/other.json\n")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "other.json").write_text(CONFIG)
    launch, source = read(tmp_path)
    assert (launch.path, launch.document.fixable) == (str(tmp_path / "a.yaml"), False)
    assert source.document.data == {"zero_optimization": {"stage": 2}}
    assert (source.framework, source.world_size) == ("accelerate", None)
    assert source.document.fixable


@pytest.mark.parametrize("linked", [False, True])
def test_a_file_elsewhere_that_accelerate_names_is_read_but_not_corrected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """A configuration that came from somebody else must not make --fix change other files of the user."""
    project, other = tmp_path / "project", tmp_path / "other.json"
    project.mkdir()
    monkeypatch.chdir(project)
    other.write_text(CONFIG)
    name = "link.json" if linked else str(other)
    if linked:
        Path(name).symlink_to(other)
    Path("a.yaml").write_text(f"deepspeed_config:\n  deepspeed_config_file: {name}\n")
    _, source = read(Path("a.yaml"))
    assert source.document.data == {"zero_optimization": {"stage": 2}}
    assert not source.document.fixable


@pytest.mark.parametrize("text", ["deepspeed: ds.json", "model: x\ndeepspeed: ds.json  # zero 3\n"])
def test_a_framework_file_names_a_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(text)
    Path("ds.json").write_text('{"train_batch_size": 8}')
    [source] = read("train.yaml")
    assert (source.path, source.framework, source.document.fixable) == ("ds.json", "hf", True)


def test_a_file_of_trl_names_one_of_accelerate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text("accelerate_config: launch.yaml\n")
    Path("launch.yaml").write_text("num_processes: 4\ndeepspeed_config: {deepspeed_config_file: ds.json}\n")
    Path("ds.json").write_text(CONFIG)
    assert [(one.path, one.framework, one.world_size) for one in read("train.yaml")] == [
        ("launch.yaml", "accelerate", 4),
        ("ds.json", "accelerate", 4),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "deepspeed: zero3",
        "deepspeed: [",
        "deepspeed: {image: x}",
        "deepspeed: train.yaml",
        "accelerate_config: train.yaml",
        "accelerate_config: other.yaml",
    ],
)
def test_a_framework_file_that_names_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.yaml").write_text(text)
    Path("other.yaml").write_text("accelerate_config: train.yaml")
    assert read("train.yaml") == []


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("deepspeed_config: [\n", "not YAML: expected the node content"),
        ("deepspeed_config: \x00\n", "not YAML: special characters are not allowed"),
        ("deepspeed_config: {a: !!int x}\n", "not YAML: invalid literal"),
        ("deepspeed_config: {a: !!int }\n", "not YAML: invalid literal"),
        ("deepspeed_config: {a: !!timestamp x}\n", "not YAML: invalid literal"),
        ("deepspeed_config: {{ a }}\n", "not YAML: a key that is no text"),
        ("zero_optimization: [\n", "not YAML: expected the node content"),
        ("deepspeed_config:\n---\n", "not YAML: but found another document"),
        ("deepspeed_config: " + "[" * 5000, "not YAML: "),
        ("deepspeed_config:\n" + "# \n" * 30000, "larger than 64 KiB"),
        ("deepspeed_config:\n  a: &a [1]\n  b: [*a, *a]\n", "an alias of a mapping or a list"),
    ],
)
def test_unusable_yaml(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert problem(*read(file)).startswith(what)


DEEPSPEED = """# of a program that reads YAML and gives DeepSpeed what is in it
train_batch_size: 8
optimizer:
  type: AdamW
  params: {lr: 1.0e-4}
zero_optimization:
  stage: 2
"""


@pytest.mark.parametrize("name", ["ds_config.yaml", "any.yml"])
def test_yaml_of_deepspeed(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    file.write_text(DEEPSPEED)
    [source] = read(tmp_path)
    assert source.document.data == {
        "train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {"stage": 2},
    }
    node = source.document.node("zero_optimization", "stage")
    assert node is not None
    assert source.document.locate(at(span=node.span)).start == (7, 10)
    assert (source.framework, source.world_size, source.document.fixable) == (None, None, False)


UNUSED = "deepspeed_config: {}\ndistributed_type: MULTI_GPU\n"


@pytest.mark.parametrize("text", ["", "a: 1", "x:\n  deepspeed_config: 1", "[", "distributed_type: MULTI_GPU", UNUSED])
def test_other_yaml_is_skipped(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yml"
    file.write_text(text)
    assert read(tmp_path) == []


@pytest.mark.parametrize("kind", ["MULTI_GPU", "NO", "FSDP", "MULTI_CPU", "MEGATRON_LM"])
@pytest.mark.parametrize("section", ["{zero_stage: 2}", "{deepspeed_config_file: ds.json}"])
def test_a_section_that_accelerate_does_not_use_is_reported(tmp_path: Path, kind: str, section: str) -> None:
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stag": 2}}')
    (tmp_path / "a.yaml").write_text(f"deepspeed_config: {section}\ndistributed_type: {kind}\n")
    [source] = read(tmp_path / "a.yaml")
    found = lint_document(source.document, Context(framework="accelerate"), Selection())
    assert [(one.code, one.place.start[0]) for one in found] == [("DSC733", 2)]
