"""Where configurations are found, and how they are read."""

import base64
import io
import itertools
import os
from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.lint import files
from deepspeed_compress.lint.files import Source, sources

CONFIG = '{"zero_optimization": {"stage": 2}}'


def read(*arguments: str | Path, exclude: tuple[str, ...] = (), stdin: bytes = b"") -> list[Source]:
    return list(sources(map(str, arguments), exclude, io.BytesIO(stdin)))


def names(*arguments: str | Path, exclude: tuple[str, ...] = ()) -> list[str]:
    return [os.path.basename(source.path) for source in read(*arguments, exclude=exclude)]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in {
        "ds_config.json": "{}",
        "my-deepspeed.hjson": "a: 1",
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
    (tmp_path / "dangling_ds_config.json").symlink_to(tmp_path / "nothing")
    return tmp_path


def test_a_directory_gives_what_are_configurations(tree: Path) -> None:
    assert names(tree) == ["ds_config.json", "my-deepspeed.hjson", "settings.json", "er.json", "ours.json"]
    assert names(tree, exclude=("deep/*", "settings.json")) == ["ds_config.json", "my-deepspeed.hjson"]


def test_a_file_that_is_named_is_read_whatever_it_is(tree: Path) -> None:
    assert names(tree / "notes.txt", tree / "package.json", tree / "package.json", tree) == [
        "notes.txt",
        "package.json",
        *names(tree),
    ]


def test_standard_input() -> None:
    [source] = read("-", stdin=b'{"a": 1}')
    assert (source.path, source.document.data, source.document.fixable) == ("-", {"a": 1}, True)


@pytest.mark.parametrize("encode", [base64.b64encode, base64.urlsafe_b64encode])
def test_base64(tmp_path: Path, encode: object) -> None:
    assert callable(encode)
    text = encode('{"a": "ÿÿÿ>>>???"}'.encode()).decode()
    file = tmp_path / "x.b64"
    file.write_text(f"{text}\n")
    for source in (*read(text), *read(file), *read("-", stdin=text.encode())):
        assert source.document.data == {"a": "ÿÿÿ>>>???"}
        assert not source.document.fixable


@pytest.mark.parametrize("argument", ["nothing.json", "abcdefgh", "a" * 300, "", "x\0y"])
def test_what_is_nothing(argument: str) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        read(argument)


def problem(source: Source) -> str:
    [hit] = source.document.problems
    assert not source.document.fixable
    assert not source.document.readable
    return hit.what


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = tmp_path / "bad.json"
    bad.write_bytes(b'{"a": "\xff"}')
    assert problem(*read(bad)) == "not UTF-8 text (byte 7)"
    monkeypatch.setattr(files, "MAX_BYTES", 4)
    assert problem(*read(bad)).startswith("larger than")
    monkeypatch.setattr(files, "open", _denied, raising=False)
    assert problem(*read(bad)) == "cannot be read (Permission denied)"


def _denied(*_: object) -> object:
    raise PermissionError(13, "Permission denied")


def test_line_ends_stay(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(b'{"a":\r\n1}\r')
    assert read(file)[0].document.text == '{"a":\r\n1}\r'


ACCELERATE = """compute_environment: LOCAL_MACHINE
deepspeed_config:
  gradient_accumulation_steps: 4
  gradient_clipping: auto
  offload_optimizer_device: nvme
  offload_optimizer_nvme_path: /nvme
  offload_param_nvme_path: none
  zero3_init_flag: true
  zero_stage: 3
  aio: {block_size: 1}
distributed_type: DEEPSPEED
mixed_precision: bf16
num_processes: 8
"""


def test_accelerate_with_settings(tmp_path: Path) -> None:
    file = tmp_path / "default_config.yaml"
    file.write_text(ACCELERATE)
    [source] = read(tmp_path)
    assert source.hints == {"framework": "accelerate", "world_size": 8}
    assert source.document.data == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
        "zero_optimization": {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}, "stage": 3},
        "bf16": {"enabled": True},
    }
    assert list(source.document.data)[-2:] == ["train_batch_size", "train_micro_batch_size_per_gpu"]
    node = source.document.node("zero_optimization", "stage")
    assert node is not None
    assert source.document.position(node.span.start) == (9, 15)
    assert not source.document.fixable


@pytest.mark.parametrize("section", ["", " {}", "\n  zero_stage: 2"])
def test_accelerate_has_defaults(tmp_path: Path, section: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(f"deepspeed_config:{section}\ndistributed_type: DEEPSPEED\n")
    [source] = read(file)
    assert source.document.data == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_clipping": "auto",
        "zero_optimization": {"stage": 2},
    }


@pytest.mark.parametrize("folder", [".", "elsewhere"])
def test_accelerate_with_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str) -> None:
    """The name is looked up where the command runs, then beside the file, then above; it is then read once only."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / folder)
    (tmp_path / "a.yaml").write_text("deepspeed_config:\n  deepspeed_config_file: z/other.json\n")
    (tmp_path / "z").mkdir()
    (tmp_path / "z" / "other.json").write_text(CONFIG)
    launch, source = read(tmp_path)
    assert (launch.document.data, launch.document.readable) == ({}, False)
    assert source.document.data == {"zero_optimization": {"stage": 2}}
    assert source.hints == {"framework": "accelerate"}
    assert source.document.fixable


DOUBLING = [f"  {b}: &{b} [*{a}, *{a}]\n" for a, b in itertools.pairwise("abcdefghijklmnop")]
"""Each line has twice as many values as the one before it."""


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("deepspeed_config: [\n", "not YAML: expected the node content"),
        ("deepspeed_config: \x00\n", "not YAML: special characters are not allowed"),
        ("deepspeed_config: {a: !!int x}\n", "not YAML: invalid literal"),
        ("deepspeed_config:\n---\n", "not YAML: but found another document"),
        ("deepspeed_config: " + "[" * 5000, "not YAML: "),
        ("deepspeed_config: " + "[" * 50 + "]" * 50, "not YAML: more than"),
        ("deepspeed_config:\n" + "# \n" * 30000, "larger than 64 KiB"),
        ("deepspeed_config:\n  a: &a [1]\n" + "".join(DOUBLING), "not YAML: more than"),
    ],
)
def test_yaml_that_cannot_be_used(tmp_path: Path, text: str, what: str) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(text)
    assert problem(*read(file)).startswith(what)


UNUSED = "deepspeed_config: {}\ndistributed_type: MULTI_GPU\n"


@pytest.mark.parametrize("text", ["", "a: 1", "x:\n  deepspeed_config: 1", "[", "distributed_type: MULTI_GPU", UNUSED])
def test_other_yaml_is_passed_over(tmp_path: Path, text: str) -> None:
    file = tmp_path / "a.yml"
    file.write_text(text)
    assert read(tmp_path) == []
