import json
import warnings
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deepspeed_compress.cli import main
from deepspeed_compress.config import SECTION, CompressConfig, ErrorFeedbackConfig, expand, parse_section
from deepspeed_compress.config import methods as m
from deepspeed_compress.config import places as p
from deepspeed_compress.config.islands import PRESETS, Outer
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import CompressWarning, ConfigError
from tests.support.properties import properties

VALIDATOR = jsonschema.Draft202012Validator(json_schema())
DESIGN_EXAMPLE = {
    "parallelism": {"zero_stage": 1, "tensor": 2, "pipeline": 2},
    "gradients": {
        "method": "blockwise",
        "bits": 4,
        "error_feedback": {"dtype": "bf16"},
        "hierarchy": {"ranks_per_node": 8},
        "overrides": [{"parameters": "embed|norm|bias", "method": "none"}],
    },
    "weights": {"method": "blockwise", "bits": 4},
    "schedule": {"warmup_steps": 200},
    "monitor": {"every": 10},
}

ACCEPTED = [
    {},
    DESIGN_EXAMPLE,
    {"gradients": {"method": "qsgd", "error_feedback": None, "rotation": None, "chunk_bytes": None}},
    {"gradients": {"method": "topk", "density": 0.1, "scope": "threshold", "values": None}},
    {"gradients": {"method": "topk", "values": {"bits": 4, "rounding": "stochastic"}}, "seed": 7},
    {"weights": {}, "on_missing_state": "reset"},
    {"lint": {"ignore": ["batch-triangle"]}, "monitor": {"path": "runs/a", "every": 5, "cosine_every": 10}},
]


def problems_of(section: object) -> dict[str, str]:
    """Return the text of each problem, by its pointer below the section."""
    prefix = f"/{SECTION}"
    return {p.pointer.removeprefix(prefix): str(p) for p in find_problems({SECTION: section})}


@pytest.mark.parametrize("section", ACCEPTED)
def test_accepted_sections_parse_and_fit_the_schema(section: dict) -> None:
    VALIDATOR.validate(section)
    ds_config = {"zero_optimization": {"stage": 1}, SECTION: section}
    assert find_problems(ds_config) == []
    parsed = parse_section({SECTION: section})
    assert parse_section({SECTION: json.loads(parsed.model_dump_json())}) == parsed


def test_empty_section_is_the_documented_default() -> None:
    parsed = parse_section({SECTION: {}})
    assert parsed == CompressConfig()
    assert parsed.weights == m.NoCompression()
    assert parsed.gradients == p.BlockwiseGradients(
        bits=8,
        block_size=256,
        rounding="nearest",
        scale_dtype="fp32",
        error_feedback=ErrorFeedbackConfig(dtype="bf16", device="accelerator", decay=1.0, reset_interval=None),
        rotation=None,
        hierarchy=None,
        overrides=(),
        min_numel=0,
        chunk_bytes=None,
    )


def test_models_are_frozen_and_hashable() -> None:
    config = CompressConfig()
    hash(config)
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "pointer", "fragments"),
    [
        ({"gradient": {}}, "/gradient", ["unknown key", "given {}", '"gradients", if you meant that']),
        ({"zero_stage": 1}, "/zero_stage", ["unknown key", '"parallelism"', "remove the key"]),
        ({"gradients": {"density": 0.1}}, "/gradients/density", ["unknown key", '"block_size"']),
        ({"gradients": {"a/b~": 1}}, "/gradients/a~1b~0", ["unknown key", "remove the key"]),
        ({"gradients": {"method": "blockwize"}}, "/gradients/method", ['"blockwize"', 'Write "blockwise"']),
        ({"gradients": {"method": ["x"]}}, "/gradients/method", ['["x"]', '"topk"']),
        ({"gradients": "topk"}, "/gradients", ['"topk" is not accepted', "an object"]),
        ({"gradients": {"bits": 5}}, "/gradients/bits", ["5 is not accepted", "allowed: 8, 4, 3, 2)", "default 8"]),
        ({"gradients": {"bits": "8"}}, "/gradients/bits", ['"8" is not accepted', "Write 8"]),
        ({"gradients": {"block_size": 100}}, "/gradients/block_size", ["100", "power of two", "128"]),
        ({"gradients": {"error_feedback": True}}, "/gradients/error_feedback", ["true", "null", "{}"]),
        ({"gradients": {"method": "topk", "density": 0}}, "/gradients/density", ["0", "above 0 up to 1"]),
        ({"gradients": {"method": "topk", "values": {"bits": 5}}}, "/gradients/values/bits", ["5", "8, 4, 3, 2)"]),
        ({"gradients": {"method": "dgc", "clip_norm": 0}}, "/gradients/clip_norm", ["above 0 or null"]),
        ({"gradients": {"method": "powersgd", "hierarchy": None}}, "/gradients/hierarchy", ["unknown key", '"rank"']),
        ({"gradients": {"rotation": {}}}, "/gradients/rotation/method", ["missing", '"method": "dct"']),
        ({"gradients": {"rotation": {"method": "dct", "block_size": 64}}}, "/gradients/rotation/block_size", ["tile"]),
        ({"gradients": {"every": 2}}, "/gradients/every", ["unknown key", '"overrides"']),
        (
            {"gradients": {"overrides": [{"parameters": "a", "method": "bf16", "bits": 4}]}},
            "/gradients/overrides/0/bits",
            ['allowed: "every", "method", "parameters"'],
        ),
        ({"weights": {"method": "qsgd"}}, "/weights/method", ['"qsgd"', '"none", "blockwise", "sign", "topk"']),
        ({"weights": {"error_feedback": {}}}, "/weights/error_feedback", ["unknown key", '"overlap"']),
        (
            {"gradients": {"overrides": [{"parameters": "[a", "method": "none"}]}},
            "/gradients/overrides/0/parameters",
            ['"[a"', "not a regular expression: unterminated character set"],
        ),
        (
            {"gradients": {"overrides": [{"parameters": "a"}]}},
            "/gradients/overrides/0/method",
            ["missing", 'Write "method": "none"'],
        ),
        ({"parallelism": {"zero_stage": 4}}, "/parallelism/zero_stage", ["4", "from 0 up to 3 or null"]),
        ({"seed": 2**63}, "/seed", [str(2**63), "below"]),
        (
            {"checkpointing": {"every": "10 mins"}},
            "/checkpointing/every",
            ['"10 mins"', 'from 1, or a string such as "30 s"'],
        ),
        ({"islands": {"by_host": True, "sync_every": 0}}, "/islands/sync_every", ["0 is not", "from 1, or a string"]),
        ({"islands": {"by_host": True, "preset": ["diloco"]}}, "/islands/preset", ['["diloco"] is not', '"diloco"']),
        ({"parallelism": {"partition": [3, -1]}}, "/parallelism/partition/1", ["-1 is not accepted", "from 0)"]),
        ({"parallelism": {"partition": [3]}}, "/parallelism/partition", ["[3]", '"uniform", or a list of 2 or more']),
        ({"parallelism": {"partition": "even"}}, "/parallelism/partition", ['"even"', '"uniform", or a list of 2']),
        ({"adaptive": {"candidates": []}}, "/adaptive/candidates", ["[] is not", "a list of 1 or more or null"]),
        (
            {"islands": {"elastic": {"rendezvous": "head"}}},
            "/islands/elastic/rendezvous",
            ['"head" is not an address (allowed: host:port, with', 'write "head.example.org:29400"'],
        ),
        (
            {"communication": {"max_rate": "10 mb"}},
            "/communication/max_rate",
            ['"10 mb" is not a rate in bits (allowed: "500 kbit/s", "200 Mbit/s", "1 Gbit/s"). Write'],
        ),
        ({"monitor": {"path": "auto"}}, "/monitor/path", ['"auto"', "Accelerate", "leave the key out"]),
        ({"gradients": {"bits": "auto"}}, "/gradients/bits", ['"auto"', "Accelerate"]),
        (None, "", ["null is not accepted", "{} for the defaults"]),
        # {} would be a different setting from the default: 4 bits.
        ({"weights": "none"}, "/weights", ['"none" is not accepted', 'for its default {"method": "none"}.']),
        ("auto", "", ['"auto" is not accepted', 'Write {"preset": "auto"}.']),
        ({"gradients": {"method": "9" * 5000}}, "/gradients/method", ["is not accepted", '"topk"']),
        ({"gradients": {"hierarchy": {}}}, "/gradients/hierarchy/ranks_per_node", ['Write "ranks_per_node": 2, for']),
        ({"schedule": {"ramp": {"steps": 0}}}, "/schedule/ramp/steps", ["0 is not accepted", "Write 1, for instance"]),
        ({"lint": {"ignore": [3]}}, "/lint/ignore/0", ["3 is not accepted", "Write an allowed value."]),
        ([], "", ["[] is not accepted", "an object"]),
    ],
)
def test_one_problem_names_key_value_allowed_and_remedy(section: object, pointer: str, fragments: list[str]) -> None:
    problems = problems_of(section)
    assert list(problems) == [pointer]
    assert [text for text in fragments if text not in problems[pointer]] == []
    with pytest.raises(ConfigError, match=r"^1 problem in"):
        parse_section({SECTION: section})


def test_an_unknown_method_hides_only_what_is_next_to_it() -> None:
    """The method decides which keys an object has."""
    section = {"gradients": {"method": "magic", "bogus": 1}, "weights": {"method": "int4"}, "guard": {"x": 1}}
    assert problems_of(section).keys() == {"/gradients/method", "/weights/method", "/guard/x"}


def test_all_problems_come_at_once() -> None:
    section = {"gradient": {}, "gradients": {"bits": 5, "block_size": "auto"}, "seed": "x", "activations": {"bits": 8}}
    with pytest.raises(ConfigError, match=r"^5 problems in") as caught:
        parse_section({SECTION: section})
    for pointer in ("gradient", "gradients/bits", "gradients/block_size", "seed", "activations/bits"):
        assert f"/{SECTION}/{pointer}: " in str(caught.value)


NAMES = sorted(
    {"method", "values", "overrides", "parameters", "error_feedback", "bits", "density", "block_size", "every"}
    | {"dtype", "rounding", "gradients", "parallelism", "zero_stage", "weights", "monitor", "path", "lint"}
    | {"hierarchy", "ranks_per_node", "inside", "rotation", "tile", "group", "memory", "factors", "decay"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70000),
    st.floats(),
    st.sampled_from(
        ("topk", "blockwise", "none", "bf16", "auto", "fp32", "qsgd", "[", "stochastic", "dgc", "demo", "powersgd")
    ),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@properties
@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3) | JSON)
def test_any_section_either_parses_or_is_a_config_error(section: object) -> None:
    before = json.dumps(section)
    ds_config = {SECTION: section}
    problems = find_problems(ds_config)
    assert json.dumps(section) == before
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressWarning)
        if problems:
            with pytest.raises(ConfigError):
                expand(ds_config, parse_section(ds_config))
            return
        expand(ds_config, parse_section(ds_config))
    VALIDATOR.validate(section)


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ({"seed": 1, "train_batch_size": 8}, 'the section is missing. Write "deepspeed_compress": {} for the defaults'),
        (
            {"deepspeed_compres": {}, "gradients": {}},
            'found "deepspeed_compres" instead). Write "deepspeed_compress" in the file',
        ),
    ],
)
def test_the_error_for_a_missing_section_names_the_likely_typo(file: dict[str, object], text: str) -> None:
    [problem] = find_problems(file)
    assert text in str(problem)


def test_written_keys_override_only_themselves_in_a_preset() -> None:
    islands = parse_section(
        {
            SECTION: {
                "islands": {
                    "size": 1,
                    "preset": "sparseloco",
                    "exchange": {"density": 0.1},
                    "outer": {"optimizer": "nesterov"},
                }
            }
        }
    ).islands
    preset = PRESETS["sparseloco"]["exchange"]
    assert islands is not None
    assert islands.exchange == preset.model_copy(update={"density": 0.1})
    assert (islands.outer.optimizer, islands.outer.lr) == ("nesterov", 1.0)
    diloco = parse_section({SECTION: {"islands": {"size": 1, "preset": "diloco", "outer": {"lr": 0.5}}}}).islands
    assert diloco is not None
    assert (diloco.outer.optimizer, diloco.outer.lr) == ("nesterov", 0.5)
    own = {"size": 1, "preset": "sparseloco", "exchange": {"method": "topk", "values": {"bits": 4}}}
    values = parse_section({SECTION: {"islands": own}}).islands.exchange.values
    assert values.bits == 4


@pytest.mark.parametrize(("name", "block_size"), [("adam", 1), ("muon", None)])
def test_presets_of_an_inner_optimizer_are_the_measured_settings(name: str, block_size: int | None) -> None:
    islands = parse_section({SECTION: {"islands": {"size": 1, "preset": name}}}).islands
    assert islands is not None
    assert islands.outer == Outer(optimizer="nesterov", lr=0.7, momentum=0.5)
    assert (islands.second_moments and islands.second_moments.block_size) == block_size
    without = parse_section({SECTION: {"islands": {"size": 1, "preset": name, "second_moments": None}}}).islands
    assert without is not None
    assert without.second_moments is None


SURROGATE = "\ud800x"


@pytest.mark.parametrize(
    "file",
    [
        {SECTION: {"monitor": {"path": SURROGATE}}},
        {SECTION: {SURROGATE: 1}},
        {f"deepspeed_compres{SURROGATE}": {}},
    ],
)
def test_surrogates_appear_escaped_in_errors(
    file: dict[str, object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The captured streams accept no surrogate."""
    with pytest.raises(ConfigError) as caught:
        parse_section(file)
    assert "\\ud800x" in str(caught.value).encode().decode()
    (tmp_path / "ds_config.json").write_text(json.dumps(file))
    assert main(["check", str(tmp_path / "ds_config.json")]) == 1
    assert "\\ud800x" in capsys.readouterr().out
