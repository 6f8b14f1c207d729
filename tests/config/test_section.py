import json
import warnings

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from deepspeed_compress.config import (
    SECTION,
    BlockwiseConfig,
    BlockwiseValues,
    CastConfig,
    CompressConfig,
    ErrorFeedback,
    NoneConfig,
    TopKConfig,
    find_problems,
    json_schema,
    parse_section,
)
from deepspeed_compress.config.planned import PLANNED_KEYS, PLANNED_VALUES
from deepspeed_compress.errors import CompressWarning, ConfigError

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
    "guard": {"full_sync_every": 1000, "on_anomaly": "disable"},
    "monitor": {"every": 10},
}
ACCEPTED = [
    {},
    {"parallelism": None, "gradients": {}},
    {key: value for key, value in DESIGN_EXAMPLE.items() if key in ("parallelism", "schedule", "monitor")},
    {"gradients": {"bits": 4, "error_feedback": None}},
    {"gradients": {"method": "none"}},
    {"gradients": {"method": "bf16", "error_feedback": {"dtype": "bf16"}}},
    {"gradients": {"method": "topk", "density": 0.1, "values": {"method": "fp16"}}},
    {"gradients": {"method": "topk", "values": {"bits": 4, "rounding": "stochastic"}}, "seed": 7},
    {"gradients": {"overrides": [{"parameters": "embed|norm", "method": "none"}]}},
    {"lint": {"ignore": ["batch-triangle"]}, "monitor": {"path": "runs/a", "every": 5, "cosine_every": 10}},
]


def problems_of(section: object) -> dict[str, str]:
    """The text of each problem by its pointer below the section."""
    prefix = f"/{SECTION}"
    return {p.pointer.removeprefix(prefix): str(p) for p in find_problems({SECTION: section})}


@pytest.mark.parametrize("section", ACCEPTED)
def test_accepted_sections_parse_and_fit_the_schema(section: dict) -> None:
    jsonschema.Draft202012Validator(json_schema()).validate(section)
    assert find_problems({SECTION: section}) == []
    parsed = parse_section({SECTION: section})
    assert parse_section({SECTION: json.loads(parsed.model_dump_json())}) == parsed


def test_empty_section_is_the_documented_default() -> None:
    parsed = parse_section({SECTION: {}})
    assert parsed == CompressConfig()
    assert parsed.gradients == BlockwiseConfig(
        bits=8, block_size=256, rounding="nearest", error_feedback=ErrorFeedback(dtype="bf16")
    )


@pytest.mark.parametrize(
    ("gradients", "expected"),
    [
        ({"method": "none"}, NoneConfig()),
        ({"method": "bf16"}, CastConfig(method="bf16")),
        ({"bits": 4}, BlockwiseConfig(bits=4)),
        ({"method": "topk", "values": {}}, TopKConfig(values=BlockwiseValues())),
    ],
)
def test_method_chooses_the_model(gradients: dict, expected: object) -> None:
    assert parse_section({SECTION: {"gradients": gradients}}).gradients == expected


def test_models_are_frozen_and_hashable() -> None:
    config = CompressConfig()
    hash(config)
    with pytest.raises(ValidationError):
        config.seed = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("section", "pointer", "fragments"),
    [
        ({"gradient": {}}, "/gradient", ["unknown key", "given {}", '"gradients", if you meant that']),
        ({"zero_stage": 1}, "/zero_stage", ["unknown key", "/parallelism/zero_stage"]),
        ({"gradients": {"density": 0.1}}, "/gradients/density", ["unknown key", 'method "topk"']),
        ({"gradients": {"a/b~": 1}}, "/gradients/a~1b~0", ["unknown key", "remove the key"]),
        ({"gradients": {"method": "none", "overrides": []}}, "/gradients/overrides", ["unknown key"]),
        ({"gradients": {"method": "blockwize"}}, "/gradients/method", ['"blockwize"', 'Write "blockwise"']),
        ({"gradients": {"method": ["x"]}}, "/gradients/method", ['["x"]', '"topk"']),
        ({"gradients": "topk"}, "/gradients", ['"topk" is not accepted', "an object"]),
        ({"gradients": {"bits": 3}}, "/gradients/bits", ["3 is not accepted", "allowed: 8, 4", "default 8"]),
        ({"gradients": {"bits": "8"}}, "/gradients/bits", ['"8" is not accepted', "Write 8"]),
        ({"gradients": {"bits": True}}, "/gradients/bits", ["true is not accepted"]),
        ({"gradients": {"block_size": 100}}, "/gradients/block_size", ["100", "power of two", "128"]),
        ({"gradients": {"block_size": 16}}, "/gradients/block_size", ["16 is not accepted", "32, 64"]),
        ({"gradients": {"error_feedback": True}}, "/gradients/error_feedback", ["true", "null", "{}"]),
        ({"gradients": {"method": "topk", "density": 0}}, "/gradients/density", ["0", "above 0 up to 1"]),
        ({"gradients": {"method": "topk", "density": 1.1}}, "/gradients/density", ["1.1", "up to 1"]),
        ({"gradients": {"method": "topk", "values": {"bits": 5}}}, "/gradients/values/bits", ["5", "8, 4"]),
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
        ({"schedule": {"warmup_steps": -1}}, "/schedule/warmup_steps", ["-1", "from 0"]),
        ({"seed": 2**63}, "/seed", [str(2**63), "below"]),
        ("auto", "", ['"auto" is not accepted', "Accelerate"]),
        ({"monitor": {"path": "auto"}}, "/monitor/path", ['"auto"', "Accelerate", "leave the key out"]),
        ({"gradients": {"bits": "auto"}}, "/gradients/bits", ['"auto"', "Accelerate"]),
        (None, "", ["null is not accepted", "{} for its defaults"]),
        ([], "", ["[] is not accepted", "an object"]),
    ],
)
def test_one_problem_names_key_value_allowed_and_remedy(section: object, pointer: str, fragments: list[str]) -> None:
    problems = problems_of(section)
    assert list(problems) == [pointer]
    assert [text for text in fragments if text not in problems[pointer]] == []
    with pytest.raises(ConfigError, match=r"^1 problem in"):
        parse_section({SECTION: section})


def test_all_problems_come_at_once() -> None:
    section = {"gradient": {}, "gradients": {"bits": 3, "block_size": "auto"}, "seed": "x", "weights": {}}
    with pytest.raises(ConfigError, match=r"^5 problems in") as caught:
        parse_section({SECTION: section})
    for pointer in ("gradient", "gradients/bits", "gradients/block_size", "seed", "weights"):
        assert f"/{SECTION}/{pointer}: " in str(caught.value)


def test_problems_of_parallelism_join_those_of_the_section() -> None:
    ds_config = {
        "zero_optimization": {"stage": 2},
        SECTION: {"gradients": {"bits": 3}, "parallelism": {"zero_stage": 1, "tensor": 3}},
    }
    pointers = [problem.pointer.removeprefix(f"/{SECTION}/") for problem in find_problems(ds_config, 4)]
    assert pointers == ["gradients/bits", "parallelism/zero_stage", "parallelism"]


def test_missing_section_says_what_to_add() -> None:
    with pytest.raises(ConfigError, match=r'"deepspeed_compress": \{\} for the defaults'):
        parse_section({"train_batch_size": 8})
    with pytest.raises(ConfigError, match='did you mean it by "deepspeed-compress"'):
        parse_section({"deepspeed-compress": {}})


def test_design_example_is_refused_for_its_unbuilt_parts_alone() -> None:
    problems = problems_of(DESIGN_EXAMPLE)
    assert sorted(problems) == ["/gradients/hierarchy", "/guard", "/weights"]
    assert all("not available in this version (available: " in text for text in problems.values())


def planned_sections() -> list[tuple[tuple[str, ...], object]]:
    keys = [((*place, key), {}) for place, names in PLANNED_KEYS.items() for key in sorted(names)]
    values = [(place, v) for place, found in PLANNED_VALUES.items() for v in sorted(found, key=str)]
    return keys + values


def nested(path: tuple[str, ...], value: object) -> object:
    """The section that holds `value` at `path`, valid but for it."""
    for part in reversed(path):
        value = [value] if part == "*" else {part: value}
        if part == "values":
            value |= {"method": "topk"}
    return value


@pytest.mark.parametrize(("path", "value"), planned_sections())
def test_planned_parts_are_recognised_and_refused(path: tuple[str, ...], value: object) -> None:
    section = nested(path, value)
    problem = problems_of(section)["/" + "/".join(path).replace("*", "0")]
    assert "not available in this version (available: " in problem
    assert "available: )" not in problem
    with pytest.raises(ConfigError):
        parse_section({SECTION: section})


NAMES = sorted(
    {"method", "values", "overrides", "parameters", "error_feedback", "bits", "density", "block_size"}
    | {"dtype", "rounding", "gradients", "parallelism", "zero_stage", "weights", "monitor", "path", "lint"}
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 70000),
    st.floats(),
    st.sampled_from(["topk", "blockwise", "none", "bf16", "auto", "fp32", "qsgd", "[", "stochastic"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3) | JSON)
def test_any_section_either_parses_or_is_a_config_error(section: object) -> None:
    before = json.dumps(section)
    problems = find_problems({SECTION: section})
    assert json.dumps(section) == before
    if problems:
        with pytest.raises(ConfigError):
            parse_section({SECTION: section})
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressWarning)
        parse_section({SECTION: section})
    jsonschema.Draft202012Validator(json_schema()).validate(section)


GRADIENTS = st.one_of(
    st.builds(lambda method: {"method": method}, st.sampled_from(["none", "bf16", "fp16"])),
    st.fixed_dictionaries(
        {},
        optional={
            "bits": st.sampled_from([4, 8]),
            "block_size": st.sampled_from([32, 256, 65536]),
            "rounding": st.sampled_from(["nearest", "stochastic"]),
            "error_feedback": st.sampled_from([None, {}, {"dtype": "bf16"}]),
        },
    ),
    st.fixed_dictionaries(
        {"method": st.just("topk")},
        optional={
            "density": st.floats(0, 1, exclude_min=True),
            "values": st.sampled_from([None, {}, {"method": "bf16"}, {"bits": 4}]),
        },
    ),
)


@given(GRADIENTS)
def test_written_out_sections_read_back_the_same(gradients: dict) -> None:
    parsed = CompressConfig.model_validate({"gradients": gradients})
    written = json.loads(parsed.model_dump_json())
    assert CompressConfig.model_validate(written) == parsed
    jsonschema.Draft202012Validator(json_schema()).validate(written)
