"""Candidates for a file: which ones fit it, and which keys of the file's section are kept."""

import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.lint.runner import lint_text
from deepspeed_compress.tools.tune.space import (
    BASELINE,
    DENSE_START,
    FILE,
    SPACE,
    Candidate,
    find_candidates,
    load_space,
)

ADAM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95]}}
TRAINERS = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}}
NO_MOMENTUM = {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.0, 0.95]}}


def file(section: Any = None, stage: int = 2, optimizer: Any = NO_MOMENTUM, **others: Any) -> dict[str, Any]:
    given = {} if section is None else {SECTION: section}
    return {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": optimizer,
        "zero_optimization": {"stage": stage},
        **others,
        **given,
    }


def without_optimizer() -> dict[str, Any]:
    return {key: value for key, value in file().items() if key != "optimizer"}


def names(found: list[Candidate]) -> list[str]:
    return [candidate.name for candidate in found]


def test_an_ordinary_file_gets_the_whole_space() -> None:
    kept, left = find_candidates(file())
    assert names(kept) == [BASELINE, *SPACE]
    assert left == {}


@pytest.mark.parametrize("name", [BASELINE, *SPACE])
def test_each_candidate_makes_a_file_without_findings(name: str) -> None:
    kept, _ = find_candidates(file({"gradients": {"method": "percentile"}, "monitor": {"cosine_every": 10}}))
    [candidate] = [candidate for candidate in kept if candidate.name == name]
    written = {**file(), SECTION: candidate.section}
    assert find_problems(written) == []
    assert [finding.message for finding in lint_text(json.dumps(written, indent=2))] == []


@pytest.mark.parametrize(
    ("ds_config", "out", "reason"),
    [
        (file(optimizer=ADAM), {"demo"}, "/optimizer/params/betas"),
        (file(optimizer=TRAINERS), {"demo"}, '/optimizer/params/betas: "auto" may add a second momentum'),
        (without_optimizer(), {"demo"}, "/optimizer: is missing"),
        (file(stage=0), {"blockwise4-weights4"}, 'the same as "blockwise4"'),
        (file({"gradients": {"bits": 4}}), {"blockwise4"}, f'the same as "{FILE}"'),
        (file({}), {"blockwise8"}, f'the same as "{FILE}"'),
        (file({"gradients": {"method": "none"}}), {FILE}, f'the same as "{BASELINE}"'),
    ],
)
def test_candidates_that_do_not_fit_the_file_are_excluded(
    ds_config: dict[str, Any], out: set[str], reason: str
) -> None:
    kept, left = find_candidates(ds_config)
    assert left.keys() == set(out)
    assert all(found.startswith(reason) for found in left.values())
    assert not out & set(names(kept))


def test_candidates_with_a_schedule_fit_a_file_with_the_preset() -> None:
    """Their uncompressed start would contradict `auto`."""
    kept, left = find_candidates(file({"preset": "auto"}))
    assert list(left) == ["blockwise4-weights4"]
    assert [one.name for one in kept if one.config.auto] == [FILE]


@pytest.mark.parametrize("ds_config", [file(optimizer=TRAINERS), without_optimizer()])
def test_a_candidate_of_the_user_may_need_what_the_file_does_not_tell(ds_config: dict[str, Any]) -> None:
    assert "mine" in names(find_candidates(ds_config, {"mine": {"gradients": {"method": "demo"}}})[0])


@pytest.mark.parametrize(("stage", "weights"), [(0, "none"), (1, "blockwise"), (3, "blockwise")])
def test_weights_are_compressed_where_they_are_gathered(stage: int, weights: str) -> None:
    kept, _ = find_candidates(file(stage=stage))
    assert {one.config.weights.method for one in kept if one.name in ("sign", "demo", "powersgd4")} == {weights}


def section_of(name: str, section: Any) -> dict[str, Any]:
    kept, _ = find_candidates(file(section))
    return {candidate.name: dict(candidate.section) for candidate in kept}[name]


def test_lossy_methods_start_uncompressed_and_a_longer_start_stays() -> None:
    assert section_of("sign", {})["schedule"] == {"warmup_steps": DENSE_START}
    assert section_of("sign", {"schedule": {"warmup_steps": 500}})["schedule"] == {"warmup_steps": 500}
    assert section_of("blockwise4", {"schedule": {"warmup_steps": 7}})["schedule"] == {"warmup_steps": 7}
    assert "schedule" not in section_of("blockwise4", {})


def test_the_baseline_keeps_the_settings_that_apply_to_it() -> None:
    own = {
        "parallelism": {"zero_stage": 2},
        "gradients": {"method": "qsgd"},
        "weights": {"bits": 4},
        "schedule": {"warmup_steps": 9},
        "seed": 3,
        "monitor": {"every": 2, "cosine_every": 4},
    }
    assert section_of(BASELINE, own) == {
        "parallelism": {"zero_stage": 2},
        "gradients": {"method": "none"},
        "weights": {"method": "none"},
        "monitor": {"every": 2},
    }


@pytest.mark.parametrize("key", [{"ownership": "balanced"}, {"communication": {"max_rate": "1 Gbit/s"}}])
def test_every_candidate_is_valid_with_keys_that_uncompressed_training_refuses(key: dict[str, Any]) -> None:
    kept, _ = find_candidates(file({"gradients": {"bits": 4}, **key}))
    assert [one.name for one in kept if find_problems({**file(), SECTION: dict(one.section)})] == []


def write(directory: Path, value: object) -> Path:
    path = directory / "space.json"
    path.write_text(json.dumps(value))
    return path


def test_a_space_of_ones_own(tmp_path: Path) -> None:
    entries = [{"name": "two", "gradients": {"bits": 2}}, {"weights": {"bits": 4}}]
    own = file({"gradients": {"block_size": 64}})
    patches = load_space(write(tmp_path, entries))
    assert list(patches) == ["two", "own2"]
    kept, left = find_candidates(own, patches)
    sections = {candidate.name: candidate.section for candidate in kept}
    assert list(sections) == [BASELINE, FILE, "two", "own2"]
    assert sections["two"]["gradients"] == {"method": "blockwise", "block_size": 64, "bits": 2}
    assert sections["own2"] == {"gradients": {"block_size": 64}, "weights": {"bits": 4}}
    assert left == {}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "needs names"),
        ({"name": "a"}, "cannot be read as a list of objects"),
        ([3], "cannot be read as a list of objects"),
        ([{"name": 3}], "cannot be read as a list of objects"),
        ([{"name": "a/b"}], "needs names"),
        ([{"name": "none"}], "needs names"),
        ([{"name": "a"}, {"name": "a"}], "needs names"),
    ],
)
def test_a_wrong_space(value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load_space(write(tmp_path, value))
    with pytest.raises(ConfigError, match="cannot be read as a list of objects"):
        load_space(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("patch", "reason"),
    [
        ({"gradients": {"bits": 5}}, f"/{SECTION}/gradients/bits: 5"),
        ({"gradient": {}}, f"/{SECTION}/gradient: unknown key"),
        ({"gradients": 3}, f"/{SECTION}/gradients"),
        ({"schedule": {"warmup": 3}}, f"/{SECTION}/schedule/warmup: unknown key"),
    ],
)
def test_a_candidate_that_is_invalid_is_left_out(patch: dict[str, Any], reason: str) -> None:
    kept, left = find_candidates(file(), {"a": patch})
    assert names(kept) == [BASELINE]
    assert left["a"].startswith(reason)


def test_settings_of_model_and_network_are_kept() -> None:
    own = {
        "gradients": {
            "method": "topk",
            "density": 0.5,
            "min_numel": 10,
            "hierarchy": {"ranks_per_node": 2},
            "overrides": [{"parameters": "embed", "method": "none"}],
        },
        "monitor": {"every": 7},
    }
    found = section_of("blockwise4", own)
    assert found["gradients"]["min_numel"] == 10
    assert found["gradients"]["hierarchy"]["ranks_per_node"] == 2
    assert found["gradients"]["overrides"][0]["parameters"] == "embed"
    assert "density" not in found["gradients"]
    assert found["monitor"] == {"every": 7}
    assert section_of(FILE, own) == own
